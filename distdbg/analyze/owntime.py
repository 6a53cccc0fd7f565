"""Own time: how long a rank worked itself, by step and place, with its waits for others taken out.

Between two events of a thread the time belongs to the innermost thing open. What waits for other ranks is
kept apart: Python's waits for a collective's work, the end of a DDP backward (after the last node, before
the engine returns), buffers synchronised in DDP's forward, the making of process groups.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from distdbg.analyze.rank import RankView
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


_WORDS = tuple(dict.fromkeys(_BEGIN.values()))
_FORWARD, _NODE, _WAIT, _GC = (_WORDS.index(word) + 1 for word in ("forward", "node", "wait", "gc"))


def _table(words: dict[K, str]) -> np.ndarray:
    """By kind, the number (from 1) of what it begins or ends, 0 for none."""
    found = np.zeros(1 << 16, dtype=np.int8)
    for kind, word in words.items():
        found[kind] = _WORDS.index(word) + 1
    return found


_BEGINS, _ENDS = _table(_BEGIN), _table(_END)
_NOT_TIMED = np.zeros(1 << 16, dtype=bool)
_NOT_TIMED[[K.MAGNITUDE, K.DIGEST]] = True


class Times:
    """One rank's times by step, in ns: own time by place, waiting, and the size of the model's input (elements).

    Arrays of all steps of which anything is known: ``steps`` (ascending), ``table`` (places, steps) with the places
    in ``keys``, ``waiting_ns`` and ``elements`` (steps). ``own``, ``waiting`` and ``inputs`` are the same as dicts.
    """

    def __init__(self, steps: np.ndarray, keys: list[Key], table: np.ndarray, seen: np.ndarray) -> None:
        self.steps, self.keys, self.table, self._seen = steps, keys, table, seen
        self.waiting_ns = np.zeros(len(steps), dtype=np.int64)
        self.elements = np.zeros(len(steps), dtype=np.int64)
        self.totals: np.ndarray = table.sum(axis=0)

    @cached_property
    def own(self) -> dict[int, dict[Key, int]]:
        found: dict[int, dict[Key, int]] = {}
        columns = zip(self.steps.tolist(), self.table.T.tolist(), self._seen.T.tolist(), strict=True)
        for step, values, seen in columns:
            here = {key: ns for key, ns, there in zip(self.keys, values, seen, strict=True) if there}
            if here:
                found[step] = here
        return found

    @cached_property
    def waiting(self) -> dict[int, int]:
        return {s: ns for s, ns in zip(self.steps.tolist(), self.waiting_ns.tolist(), strict=True) if ns}

    @cached_property
    def inputs(self) -> dict[int, int]:
        return {s: size for s, size in zip(self.steps.tolist(), self.elements.tolist(), strict=True) if size}

    def total(self, step: int) -> int:
        return int(self.at(self.totals, [step])[0])

    def at(self, values: np.ndarray, steps: Sequence[int]) -> np.ndarray:
        """Of an array over all steps those of some, 0 where nothing is known of a step."""
        if not len(self.steps):
            return np.zeros(len(steps), dtype=np.int64)
        wanted = np.asarray(steps, dtype=np.int64)
        where = np.minimum(np.searchsorted(self.steps, wanted), len(self.steps) - 1)
        found: np.ndarray = np.where(self.steps[where] == wanted, values[where], 0)
        return found


def core_waits(view: RankView) -> tuple[np.ndarray, np.ndarray]:
    """(moments, ns for which the main thread had waited for a core by then), one a beat; empty where not known."""
    beats = view.records[view.records["kind"] == K.HEARTBEAT]
    beats = beats[np.sort(np.unique(beats["t"], return_index=True)[1])]
    if not len(beats) or not beats["seq"].max() > 0:
        beats = beats[:0]
    return beats["t"], beats["seq"]


def own_times(view: RankView) -> Times:
    """Own times of the main thread (on the CPU the engine runs in the thread that calls it); computed once a view."""
    known: Times | None = view.__dict__.get("own_times")
    if known is None:
        keep = (view.records["thread"] == 0) & ~_NOT_TIMED[view.records["kind"]]
        records = view.records if keep.all() else view.records[keep]
        kind = np.ascontiguousarray(records["kind"])
        tops = _tops(kind)
        if tops is None:
            tops = _tops_one_by_one(kind)
        known = view.__dict__["own_times"] = _times(view, records, kind, tops)
    return known


def _tops(kind: np.ndarray) -> np.ndarray | None:
    """After each event, the event that began the innermost thing open (-1: none); None where ends are missing.

    An end with nothing open does nothing, and a step closes all.
    """
    size = len(kind)
    begins, ends, steps = _BEGINS[kind], _ENDS[kind], kind == K.STEP
    row = np.arange(size)
    count = np.cumsum((begins > 0).astype(np.int64) - (ends > 0))
    last = np.maximum.accumulate(np.where(steps, row, -1)) if size else row
    relative = count - np.where(last >= 0, count[last], 0)
    # The lowest it has been since the step began: what lies below 0 are ends with nothing open.
    shift = np.cumsum(steps) * (2 * size + 1)
    lowest = np.minimum.accumulate(relative - shift) + shift if size else relative
    depth = relative - np.minimum(lowest, 0)
    if size and int(depth.max()) >= 1 << 15:
        return None
    before = np.concatenate(([0], depth[:-1])) if size else depth
    closing = (ends > 0) & (before > 0)
    paired = np.flatnonzero((begins > 0) | closing)
    # In order of depth an end follows its begin.
    paired = paired[np.argsort(np.where(closing, before, depth)[paired].astype(np.int16), kind="stable")]
    closed = np.flatnonzero(closing[paired])
    if not np.array_equal(begins[paired[closed - 1]], ends[paired[closed]]):
        return None
    order = np.argsort(depth.astype(np.int16), kind="stable")
    latest = np.maximum.accumulate(np.where(begins[order] > 0, row, -1)) if size else row
    tops = np.full(size, -1, dtype=np.int64)
    tops[order] = order[latest]
    tops[depth == 0] = -1
    return tops


def _tops_one_by_one(kind: np.ndarray) -> np.ndarray:
    """As ``_tops``, whatever was begun and never ended."""
    tops: list[int] = []
    stack: list[tuple[int, int]] = []
    rows = zip(_BEGINS[kind].tolist(), _ENDS[kind].tolist(), (kind == K.STEP).tolist(), strict=True)
    for row, (begun, ended, step) in enumerate(rows):
        if begun:
            stack.append((begun, row))
        elif ended:
            position = next((p for p in range(len(stack) - 1, -1, -1) if stack[p][0] == ended), None)
            if position is not None:
                del stack[position:]
        elif step:
            stack.clear()
        tops.append(stack[-1][1] if stack else -1)
    return np.array(tops, dtype=np.int64)


def _times(view: RankView, records: np.ndarray, kind: np.ndarray, tops: np.ndarray) -> Times:
    """Sums up the time between each two events; it belongs to the step of the second."""
    t, step = np.ascontiguousarray(records["t"]), np.ascontiguousarray(records["step"]).astype(np.int64)
    keys, place = _places(view, records, kind, tops)
    top = np.where(tops >= 0, _BEGINS[kind[tops]], 0) if len(kind) else tops
    # DDP's forward waits in C++ right after it has issued the broadcast of its buffers.
    waiting = (top == _WAIT) | ((kind == K.COLLECTIVE_END) & (top == _FORWARD)) | _finalizing(kind)
    counts = (t[:-1] != 0)[: max(0, len(t) - 1)]
    waits = np.flatnonzero(counts & waiting[:-1])
    works = np.flatnonzero(counts & ~waiting[:-1] & (top[:-1] != _GC))  # a collection is no place's own time
    fed = np.flatnonzero((kind == K.FORWARD_BEGIN) & (records["a"] == 1))
    elapsed = np.diff(t)
    steps, column = np.unique(step, return_inverse=True)
    cell = place[works] * len(steps) + column[works + 1]
    shape = (len(keys), len(steps))
    table = _summed(cell, elapsed[works], len(keys) * len(steps)).reshape(shape)
    seen = np.bincount(cell, minlength=len(keys) * len(steps)).reshape(shape) > 0
    found = Times(steps, keys, table, seen)
    found.waiting_ns = _summed(column[waits + 1], elapsed[waits], len(steps))
    found.elements = _summed(column[fed], records["b"][fed], len(steps))
    return found


def _summed(cells: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    # Sums of whole numbers below 2**53 (104 days in ns) are exact in floating point.
    found: np.ndarray = np.bincount(cells, weights=values, minlength=size).astype(np.int64)
    return found


def _finalizing(kind: np.ndarray) -> np.ndarray:
    """Marks events after a backward's final callback and before its end."""
    final, over = kind == K.BACKWARD_FINAL, (kind == K.BACKWARD_END) | (kind == K.BACKWARD_RAISED)
    last = np.maximum.accumulate(np.where(final | over, np.arange(len(kind)), -1)) if len(kind) else np.arange(0)
    found: np.ndarray = (last >= 0) & final[last]
    return found


def _places(view: RankView, records: np.ndarray, kind: np.ndarray, tops: np.ndarray) -> tuple[list[Key], np.ndarray]:
    """All places by name, and which of them each event leaves a thread in."""
    begins = np.flatnonzero(_BEGINS[kind] > 0)
    what = _BEGINS[kind[begins]].astype(np.int64)
    known = len(view.names)

    def ids(name: str, where: np.ndarray) -> np.ndarray:
        values = records[name][begins].astype(np.int64)
        found: np.ndarray = np.where(where & (values < known), values, 0)
        return found

    module = ids("module", (what == _NODE) | (what == _FORWARD))
    packed = (what * max(1, known) + ids("name", what == _NODE)) * max(1, known) + module
    distinct, first, inverse = np.unique(packed, return_index=True, return_inverse=True)
    codes: dict[Key, int] = {("loop", "", ""): 0}
    code_of = np.zeros(len(distinct), dtype=np.int64)
    for at in np.argsort(first).tolist():  # in order of appearance
        rest, module_id = divmod(int(distinct[at]), max(1, known))
        kind_of, node_id = divmod(rest, max(1, known))
        word = _WORDS[kind_of - 1]
        key: Key = ("backward" if word == "node" else word, view.text(node_id), view.text(module_id))
        code_of[at] = codes.setdefault(key, len(codes))
    place = np.zeros(len(kind), dtype=np.int64)
    place[begins] = code_of[inverse]
    return list(codes), np.where(tops >= 0, place[tops], 0) if len(kind) else place
