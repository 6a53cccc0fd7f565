"""Spans: each begin joined with its end; own time and time spent waiting inside.

Own time is without children, and without the end of a DDP backward, from its final callback on: a wait for others.
"""

from dataclasses import dataclass

import numpy as np

from distdbg.analyze.merge import Timeline, merge
from distdbg.analyze.read import Run
from distdbg.schema import EventKind as K

PAIRS: dict[str, tuple[K, tuple[K, ...]]] = {
    "node": (K.PREHOOK, (K.POSTHOOK,)),
    "forward": (K.FORWARD_BEGIN, (K.FORWARD_END, K.FORWARD_RAISED)),
    "backward": (K.BACKWARD_BEGIN, (K.BACKWARD_END, K.BACKWARD_RAISED)),
    "data": (K.DATA_BEGIN, (K.DATA_END, K.DATA_RAISED)),
    "optimizer": (K.OPTIMIZER_BEGIN, (K.OPTIMIZER_END, K.OPTIMIZER_RAISED)),
    "checkpoint": (K.CHECKPOINT_BEGIN, (K.CHECKPOINT_END, K.CHECKPOINT_RAISED)),
    "collective": (K.COLLECTIVE, (K.COLLECTIVE_END, K.CALL_RAISED)),
    "wait": (K.WAIT_BEGIN, (K.WAIT_END, K.CALL_RAISED)),
    "setup": (K.SETUP_BEGIN, (K.SETUP_END, K.CALL_RAISED)),
    "gc": (K.GC_BEGIN, (K.GC_END,)),
}
END_KINDS: dict[K, tuple[str, ...]] = {}  # what an event may be the end of
for _what, (_, _stops) in PAIRS.items():
    for _stop in _stops:
        END_KINDS[_stop] = (*END_KINDS.get(_stop, ()), _what)
_WAITS = ("collective", "wait", "setup")
_KEYED = ("node", "backward", "forward")  # ends name what they end


@dataclass
class _Open:
    what: str
    row: int
    begin: int
    key: tuple[int, ...]
    children: int = 0
    waiting: int = 0
    final: tuple[int, int, int] | None = None  # of a backward: moment, children and waiting at its final callback


def spans_of(run: Run) -> Timeline:
    """One row a begin/end pair, sorted by begin; ``event`` is what the span is of, ``open`` whether it never ended."""
    timeline = merge(run)
    columns, texts = timeline.columns, dict(timeline.texts)
    events = texts["event"]
    begins, ends = _by_code(events)
    final = events.index(K.BACKWARD_FINAL.label) if K.BACKWARD_FINAL.label in events else -1
    rows: list[int] = []
    durations: list[int] = []
    own: list[int] = []
    waits: list[int] = []
    still: list[bool] = []
    what: list[str] = []
    stacks: dict[tuple[int, int, int], list[_Open]] = {}
    last: dict[tuple[int, int, int], int] = {}

    def close(opened: _Open, end: int, stack: list[_Open], never: bool) -> None:
        duration = end - opened.begin
        waiting = duration if opened.what in _WAITS else opened.waiting
        children = opened.children
        if opened.final is not None:  # all nodes have run: from here on it only waits for the gradients of others
            children = opened.final[1] + end - opened.final[0]
            waiting = opened.final[2] + end - opened.final[0]
        if stack:
            stack[-1].children += duration
            stack[-1].waiting += waiting
        rows.append(opened.row)
        durations.append(duration)
        own.append(max(0, duration - children))
        waits.append(waiting)
        still.append(never)
        what.append(opened.what)

    names = ("event", "time_unix_ns", "rank", "attempt", "thread", "node_index", "seq", "module")
    values = [columns[name].tolist() for name in names]
    for row, (event, t, rank, attempt, thread, index, seq, module) in enumerate(zip(*values, strict=True)):
        where = (rank, attempt, thread)
        last[where] = t
        begun, ended = begins.get(event), ends.get(event)
        if event == final:
            stack = stacks.get(where, [])
            if stack and stack[-1].what == "backward":
                stack[-1].final = (t, stack[-1].children, stack[-1].waiting)
            continue
        if begun is not None:
            stacks.setdefault(where, []).append(_Open(begun, row, t, _key(begun, index, seq, module)))
        elif ended is not None:
            stack = stacks.get(where, [])
            position = _find(stack, ended, index, seq, module)
            if position is not None:
                while len(stack) > position + 1:  # never told of their end, but over with what is around them
                    close(stack.pop(), t, stack, True)
                close(stack.pop(), t, stack, False)
    for where, stack in stacks.items():
        while stack:
            close(stack.pop(), last[where], stack, True)
    return _assemble(timeline, rows, durations, own, waits, still, what)


def _by_code(events: list[str]) -> tuple[dict[int, str], dict[int, tuple[str, ...]]]:
    codes = {text: code for code, text in enumerate(events)}
    begins: dict[int, str] = {}
    ends: dict[int, tuple[str, ...]] = {}
    for what, (begin, _) in PAIRS.items():
        if begin.label in codes:
            begins[codes[begin.label]] = what
    for stop, whats in END_KINDS.items():
        if stop.label in codes:
            ends[codes[stop.label]] = whats
    return begins, ends


def _key(what: str, index: int, seq: int, module: int) -> tuple[int, ...]:
    return {"node": (index, seq), "backward": (seq,), "forward": (module,)}.get(what, ())


def _find(stack: list[_Open], ended: tuple[str, ...], index: int, seq: int, module: int) -> int | None:
    for position in range(len(stack) - 1, -1, -1):
        opened = stack[position]
        if opened.what in ended and (opened.what not in _KEYED or opened.key == _key(opened.what, index, seq, module)):
            return position
    return None


def _assemble(
    timeline: Timeline,
    rows: list[int],
    durations: list[int],
    own: list[int],
    waits: list[int],
    still: list[bool],
    what: list[str],
) -> Timeline:
    order = np.argsort(np.array(rows, dtype=np.int64), kind="stable")
    taken = np.array(rows, dtype=np.int64)[order]
    columns = {name: values[taken] for name, values in timeline.columns.items()}
    kinds = ["", *PAIRS]
    columns["event"] = np.array([kinds.index(w) for w in what], dtype=np.int32)[order]
    columns["begin_s"] = columns.pop("time_s")
    for name, found in (("duration_us", durations), ("own_us", own), ("wait_us", waits)):
        columns[name] = np.array(found, dtype=np.int64)[order] / 1e3
    columns["open"] = np.array(still, dtype=bool)[order]
    return Timeline(columns, {**timeline.texts, "event": kinds})
