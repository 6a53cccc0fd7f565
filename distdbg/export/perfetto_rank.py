"""One rank's events as trace events: begins joined with their ends, thread by thread, while they are read."""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from distdbg.analyze.merge import LOW
from distdbg.analyze.read import ShardStream
from distdbg.analyze.spans import END_KINDS, PAIRS
from distdbg.schema import EventKind as K

if TYPE_CHECKING:
    from distdbg.export.perfetto import Flows, TraceFile

_BEGIN = {int(begin): what for what, (begin, _) in PAIRS.items()}
_END = {int(kind): what for kind, what in END_KINDS.items()}
_INSTANT = {
    K.BACKWARD_FINAL: "final callback",
    K.STALL: "stall noticed",
    K.EXCEPTION: "exception",
    K.EXIT: "exit",
    K.LOST: "events lost",
}
_INSTANTS = {int(kind): text for kind, text in _INSTANT.items()}
_RAISED = {int(kind) for kind in K if kind.name.endswith("_RAISED")}
_CHUNK = 1 << 16
# The steps are drawn on a thread of their own, the others come behind it. A thread with the number of its process
# would be taken for the main one, and number 0 for the idle one.
_STEPS_TID = 100_000
_MAIN_TID = _STEPS_TID + 1


@dataclass
class _Open:
    what: str
    t: int
    step: int
    name: int
    module: int
    seq: int
    a: int
    b: int


class RankTrace:
    """Writes one shard; counts what it has written in ``spans`` and ``markers``."""

    def __init__(self, stream: ShardStream, pid: int, trace: "TraceFile", flows: "Flows", steps: range | None) -> None:
        self.stream, self.pid, self.trace, self.flows, self.steps = stream, pid, trace, flows, steps
        self.spans = self.markers = 0
        self._stacks: dict[int, list[_Open]] = {}
        self._last = 0  # of any thread, the watchdog's beats too: until then the rank was seen
        self._last_work = 0
        self._step_begins: dict[int, int] = {}
        self._text = lru_cache(maxsize=None)(lambda number: json.dumps(stream.text(number)))

    def write(self, culprits: list[dict[str, Any]], verdict: dict[str, Any]) -> None:
        self._metadata()
        for records in self.stream.segments():
            for begin in range(0, len(records), _CHUNK):
                self._events(records[begin : begin + _CHUNK])
        for thread, stack in self._stacks.items():
            while stack:
                self._close(stack.pop(), self._last, thread, left=False)
        self._steps()
        for culprit in culprits:
            self._mark(culprit, verdict)

    # ---- names of processes and threads

    def _metadata(self) -> None:
        stream = self.stream
        attempt = f" (attempt {stream.attempt})" if stream.attempt else ""
        labels = f"{stream.host}, pid {stream.pid}{self._clock_label()}"
        self._meta("process_name", 0, name=f"rank {stream.rank}{attempt}")
        self._meta("process_labels", 0, labels=labels)
        self._meta("process_sort_index", 0, sort_index=self.pid)
        self._meta("thread_name", _STEPS_TID, name="steps")
        self._meta("thread_sort_index", _STEPS_TID, sort_index=-1)

    def _clock_label(self) -> str:
        clocks = self.stream.clocks
        if clocks is None or len(clocks.wall) < 2:
            return ""
        if self.stream.clock == clocks.reference:
            return ", the reference clock"
        error = self.stream.clock_error_ns
        return ", clock not compared" if error is None else f", clock within {error / 1e6:.3f} ms"

    def _meta(self, what: str, tid: int, **args: Any) -> None:
        event = {"ph": "M", "name": what, "pid": self.pid, "tid": tid, "args": args}
        self.trace.write(json.dumps(event))

    # ---- events

    def _events(self, records: np.ndarray) -> None:
        offset = self.stream.offset_ns
        columns = [records[n].tolist() for n in ("t", "kind", "thread", "step", "name", "module", "seq", "a", "b")]
        for t, kind, thread, step, name, module, seq, a, b in zip(*columns, strict=True):
            t += offset
            if t > self._last:
                self._last = t
            stack = self._stacks.get(thread)
            if stack is None:
                stack = self._thread(thread)
            what = _BEGIN.get(kind)
            if what is not None:
                self._last_work = t
                if step not in self._step_begins:
                    self._step_begins[step] = t
                stack.append(_Open(what, t, step, name, module, seq, a, b))
                continue
            ended = _END.get(kind)
            if ended is not None:
                self._last_work = t
                self._end(stack, ended, t, thread, (module, seq, a), name if kind in _RAISED else 0)
            elif kind == K.STEP:
                self._step_begins[step + 1] = t
            elif kind in _INSTANTS and (self.steps is None or step in self.steps):
                self._instant(_INSTANTS[kind], t, thread, step, name)

    def _thread(self, thread: int) -> list[_Open]:
        self._meta("thread_name", _MAIN_TID + thread, name="main" if thread == 0 else f"thread {thread}")
        self._meta("thread_sort_index", _MAIN_TID + thread, sort_index=thread)
        stack = self._stacks[thread] = []
        return stack

    def _end(
        self,
        stack: list[_Open],
        ended: tuple[str, ...],
        t: int,
        thread: int,
        keys: tuple[int, int, int],
        error: int,
    ) -> None:
        module, seq, a = keys
        for position in range(len(stack) - 1, -1, -1):
            o = stack[position]
            if o.what not in ended:
                continue
            if o.what == "node" and (o.seq != seq or o.a & LOW != a & LOW):
                continue
            if (o.what == "backward" and o.seq != seq) or (o.what == "forward" and o.module != module):
                continue
            while len(stack) > position + 1:  # never told of their end, but over with what is around them
                self._close(stack.pop(), t, thread, left=False)
            self._close(stack.pop(), t, thread, left=True, error=error)
            return

    def _close(self, o: _Open, t: int, thread: int, *, left: bool, error: int = 0) -> None:
        if self.steps is not None and o.step not in self.steps:
            return
        name, args = self._describe(o)
        # A span that was never left is over before its time only where what is around it has ended.
        colour = "" if left and not error else ', "cname": "terrible"'
        opened = "" if left else ', "open": true'
        if error:
            opened = f', "raised": {self._text(error)}'
        shown = name if left else name[:-1] + ' (never left)"'
        us, ns = divmod(max(0, t - o.t), 1000)
        self.trace.write(
            f'{{"ph": "X", "cat": "{o.what}", "name": {shown}, "pid": {self.pid}, "tid": {_MAIN_TID + thread}, '
            f'"ts": {self.trace.ts(o.t)}, "dur": {us}.{ns:03d}{colour}, "args": {{"step": {o.step}{args}{opened}}}}}'
        )
        self.spans += 1
        if o.what == "collective" and (key := self.stream.group(o.a & LOW)[0]):
            # A flow belongs to the span that it falls into, so not on its very edge.
            self.flows.add(key, o.seq & LOW, o.t + (1 if t - o.t > 1 else 0), self.pid, _MAIN_TID + thread)

    def _describe(self, o: _Open) -> tuple[str, str]:
        """Name and the rest of the args, as JSON."""
        text, what = self._text, o.what
        module = f', "module": {text(o.module)}' if o.module else ""
        if what == "node":
            return text(o.name), f'{module}, "node_index": {o.seq}, "backward": {o.a & LOW}'
        if what == "forward":
            shown = text(o.module)
            return (shown if len(shown) > 2 else '"(model)"'), f', "call": {o.seq}'
        if what == "backward":
            return f'"backward {o.seq}"', f', "nodes": {o.a}, "source": {text(o.name)}'
        if what == "collective":
            group = self.stream.group(o.a & LOW)[1]
            return (
                f'{text(o.name)[:-1]} #{o.seq & LOW}"',
                f', "group": {json.dumps(group)}, "seq": {o.seq & LOW}, "bytes": {o.b}, '
                f'"signature": {text(o.a >> 32)}, "source": {text(o.seq >> 32)}{module}',
            )
        if what == "wait":
            return '"wait"', module
        if what == "gc":
            return f'"gc generation {o.a}"', ""
        return (f'{text(o.name)[:-1]} ({what})"' if o.name else f'"{what}"'), ""

    def _instant(self, text: str, t: int, thread: int, step: int, name: int) -> None:
        detail = f', "detail": {self._text(name)}' if name else ""
        self.trace.write(
            f'{{"ph": "i", "s": "t", "cat": "event", "name": "{text}", "pid": {self.pid}, "tid": {_MAIN_TID + thread}, '
            f'"ts": {self.trace.ts(t)}, "args": {{"step": {step}{detail}}}}}'
        )

    def _steps(self) -> None:
        """A row of spans, one a step; the last may not have ended."""
        begins = sorted(self._step_begins.items())
        for position, (step, t) in enumerate(begins):
            end = begins[position + 1][1] if position + 1 < len(begins) else max(self._last_work, t)
            if (self.steps is None or step in self.steps) and end > t:
                us, ns = divmod(end - t, 1000)
                self.trace.write(
                    f'{{"ph": "X", "cat": "step", "name": "step {step}", "pid": {self.pid}, "tid": {_STEPS_TID}, '
                    f'"ts": {self.trace.ts(t)}, "dur": {us}.{ns:03d}, "args": {{"step": {step}}}}}'
                )
                self.spans += 1

    # ---- the verdict

    def _mark(self, culprit: dict[str, Any], verdict: dict[str, Any]) -> None:
        step = culprit.get("step")
        t = self._last_work or self._last
        if verdict.get("kind") in ("mismatch", "straggler", "numeric") and step in self._step_begins:
            t = self._step_begins[step]
        facts = {key: value for key, value in culprit.items() if value is not None}
        event = {
            "ph": "i",
            "s": "p",
            "cat": "verdict",
            "name": f"distdbg: {verdict.get('kind')}: {verdict.get('summary')}",
            "pid": self.pid,
            "tid": _MAIN_TID,
            "cname": "terrible",
            "args": {**facts, "cause": verdict.get("cause"), "confidence": verdict.get("confidence")},
        }
        self.trace.write(json.dumps(event)[:-1] + f', "ts": {self.trace.ts(t)}}}')
        self.markers += 1
