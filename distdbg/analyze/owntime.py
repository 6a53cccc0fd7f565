"""Own time: how long a rank worked itself, by step and place, with its waits for others taken out.

Between two events of a thread the time belongs to the innermost thing open. What waits for other ranks is
kept apart: Python's waits for a collective's work, the end of a DDP backward (after the last node, before
the engine returns), buffers synchronised in DDP's forward, the making of process groups.
"""

from dataclasses import dataclass, field

import numpy as np

from distdbg.analyze.rank import RankView, uneventful
from distdbg.schema import EventKind as K

Key = tuple[str, str, str]  # (phase, node or "", module or "")

_BEGIN = {
    K.FORWARD_BEGIN: "forward",
    K.PREHOOK: "node",
    K.BACKWARD_BEGIN: "backward",
    K.OPTIMIZER_BEGIN: "optimizer",
    K.DATA_BEGIN: "data",
    K.CHECKPOINT_BEGIN: "checkpoint",
    K.COLLECTIVE: "wait",
    K.WAIT_BEGIN: "wait",
    K.SETUP_BEGIN: "wait",
    K.GC_BEGIN: "gc",
}
_END = {
    K.FORWARD_END: "forward",
    K.FORWARD_RAISED: "forward",
    K.POSTHOOK: "node",
    K.BACKWARD_END: "backward",
    K.BACKWARD_RAISED: "backward",
    K.OPTIMIZER_END: "optimizer",
    K.OPTIMIZER_RAISED: "optimizer",
    K.DATA_END: "data",
    K.DATA_RAISED: "data",
    K.CHECKPOINT_END: "checkpoint",
    K.CHECKPOINT_RAISED: "checkpoint",
    K.COLLECTIVE_END: "wait",
    K.WAIT_END: "wait",
    K.SETUP_END: "wait",
    K.CALL_RAISED: "wait",
    K.GC_END: "gc",
}


@dataclass
class Times:
    """ns, by step: own time by place, waiting, and the size of the model's input (numbers of elements)."""

    own: dict[int, dict[Key, int]] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)

    def total(self, step: int) -> int:
        return sum(self.own.get(step, {}).values())


def core_waits(view: RankView) -> tuple[np.ndarray, np.ndarray]:
    """(moments, ns for which the main thread had waited for a core by then), one a beat; empty where not known."""
    beats = view.records[view.records["kind"] == K.HEARTBEAT]
    beats = beats[np.sort(np.unique(beats["t"], return_index=True)[1])]
    if not len(beats) or not beats["seq"].max() > 0:
        beats = beats[:0]
    return beats["t"], beats["seq"]


def own_times(view: RankView) -> Times:
    """Own times of the main thread (on the CPU the engine runs in the thread that calls it)."""
    records = view.records
    keep = (records["thread"] == 0) & (records["kind"] != K.MAGNITUDE) & (records["kind"] != K.DIGEST)
    records = records[keep]
    times = Times()
    marks = uneventful(records)
    within = _nodes(view, times, records, marks)
    kept = records[~marks]
    columns = [kept[name].tolist() for name in ("kind", "t", "step", "name", "module", "a", "b")]
    stack: list[tuple[str, Key]] = []
    before = 0
    after_sync = finalizing = False
    for kind, t, step, name, module, a, b, nodes in zip(*columns, within, strict=True):
        if before:
            _add(times, step, stack, t - before - nodes, after_sync or finalizing)
        before = t
        after_sync = False
        what = _BEGIN.get(kind)
        if what is not None:
            key: Key = (what, "", "")
            if what == "node":
                key = ("backward", view.text(name), view.text(module))
            elif what == "forward":
                key = ("forward", "", view.text(module))
                if a == 1:
                    times.inputs[step] = times.inputs.get(step, 0) + b
            stack.append((what, key))
            continue
        what = _END.get(kind)
        if what is not None:
            for position in range(len(stack) - 1, -1, -1):
                if stack[position][0] == what:
                    del stack[position:]
                    break
            # DDP's forward waits in C++ right after it has issued the broadcast of its buffers.
            after_sync = kind == K.COLLECTIVE_END and bool(stack) and stack[-1][0] == "forward"
            if what == "backward":
                finalizing = False
        elif kind == K.BACKWARD_FINAL:
            finalizing = True
        elif kind == K.STEP:
            stack.clear()
    return times


def _nodes(view: RankView, times: Times, records: np.ndarray, marks: np.ndarray) -> list[int]:
    """Add the times of nodes in which nothing else happened; returns these times (ns) by event that is left.

    Most events are of such nodes, so they are summed up all at once.
    """
    pre = np.flatnonzero(marks & (records["kind"] == K.PREHOOK))
    t = records["t"]
    spent = t[pre + 1] - t[pre] if len(pre) else np.zeros(0, dtype=np.int64)
    if len(pre):
        places = np.stack([records[name][pre].astype(np.int64) for name in ("step", "name", "module")])
        distinct, inverse = np.unique(places, axis=1, return_inverse=True)
        sums = np.zeros(distinct.shape[1], dtype=np.int64)
        np.add.at(sums, inverse.reshape(-1), spent)
        for step, name, module, total in zip(*distinct.tolist(), sums.tolist(), strict=True):
            own = times.own.setdefault(step, {})
            key = ("backward", view.text(name), view.text(module))
            own[key] = own.get(key, 0) + total
    so_far = np.zeros(len(records) + 1, dtype=np.int64)
    so_far[pre + 1] = spent
    so_far = np.cumsum(so_far)[:-1] if len(records) else so_far[:-1]
    found: list[int] = np.diff(so_far[~marks], prepend=0).tolist()
    return found


def _add(times: Times, step: int, stack: list[tuple[str, Key]], elapsed: int, waiting: bool) -> None:
    if waiting or (stack and stack[-1][0] == "wait"):
        times.waiting[step] = times.waiting.get(step, 0) + elapsed
        return
    if stack and stack[-1][0] == "gc":
        return  # a collection strikes where it will; it is no place's own time
    key = stack[-1][1] if stack else ("loop", "", "")
    own = times.own.setdefault(step, {})
    own[key] = own.get(key, 0) + elapsed
