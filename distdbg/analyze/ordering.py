"""Collectives that no rank can leave before the last has come: what they tell of the ranks' clocks.

Only where the records show when a rank was through: a call that waits for its own work, and a DDP backward, which
waits for all of its buckets. With NCCL the host only queues, so there only a barrier tells.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distdbg.analyze.read import Name, Shard, ShardStream
from distdbg.schema import WAIT_OF_CALL
from distdbg.schema import EventKind as K

_WAIT_FOR_ALL = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})
_BLOCKING = frozenset({"gloo", "cpu:gloo"})
_CALL = (K.COLLECTIVE, K.COLLECTIVE_END, K.WAIT_BEGIN, K.WAIT_END)
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Ordered:
    """Calls of the ranks of one clock: each call's last begin and first end (ns), sorted by the call."""

    call: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    span: tuple[int, int]  # of all that was recorded by this clock, ns


def ordered_of(pieces: Iterable[Shard | ShardStream], numbers: dict[str, int]) -> Ordered:
    """The calls that the ranks of one clock left only once all had come.

    ``numbers`` is filled with a number for each kind of call in each group, and shared by all clocks of a run.
    """
    parts = []
    spans: list[int] = []
    for piece in pieces:
        for records in piece.segments() if isinstance(piece, ShardStream) else [piece.records]:
            spans += [int(records["t"].min()), int(records["t"].max())] if len(records) else []
            parts.extend(_calls(records, piece, numbers))
    span = (min(spans, default=0), max(spans, default=0))
    if not any(len(call) for call, _, _ in parts):
        nothing = np.zeros(0, dtype=np.int64)
        return Ordered(nothing, nothing, nothing, span)
    call, begin, end = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(call, kind="stable")
    call, begin, end = call[order], begin[order], end[order]
    starts = np.flatnonzero(np.diff(call, prepend=-1))
    return Ordered(call[starts], np.maximum.reduceat(begin, starts), np.minimum.reduceat(end, starts), span)


def between(own: Ordered, other: Ordered, drift: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(own ns, least, largest offset of the other clock) by each call that ranks of both clocks took part in."""
    _, mine, theirs = np.intersect1d(own.call, other.call, assume_unique=True, return_indices=True)
    begin, end = own.begin[mine], own.end[mine]
    # Neither side's first end is before the other's last begin. Meanwhile the clocks part a little.
    slack = np.ceil(drift * np.abs(end - begin)).astype(np.int64) + 1
    low, high = other.begin[theirs] - end - slack, other.end[theirs] - begin + slack
    return begin + (end - begin) // 2, low, high


def _calls(
    records: np.ndarray, piece: Shard | ShardStream, numbers: dict[str, int]
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(call, begin, end) of the calls that waited, thread by thread."""
    found = []
    chosen = records[np.isin(records["kind"], (*_CALL, K.CALL_RAISED, K.BACKWARD_END, K.BACKWARD_RAISED))]
    for thread in np.unique(chosen["thread"]):
        rows = chosen[chosen["thread"] == thread]
        for begins, ends in (_waited(rows), _by_backward(rows, piece.names)):
            call = _numbered(begins, piece, numbers)
            keep = call >= 0
            found.append((call[keep], begins["t"][keep], ends["t"][keep]))
    return found


def _numbered(begins: np.ndarray, piece: Shard | ShardStream, numbers: dict[str, int]) -> np.ndarray:
    """A number for each call that is the same on all ranks; -1 where not every rank waits for all."""
    group, name = begins["a"] & _LOW, begins["name"].astype(np.int64)
    call = np.full(len(begins), -1, dtype=np.int64)
    for group_id, name_id in {*zip(group.tolist(), name.tolist(), strict=True)}:
        about, operation = _extra(piece.names, group_id), _name(piece.names, name_id)
        here = (group == group_id) & (name == name_id)
        barrier = operation is not None and operation.text == "barrier"
        if operation is None or operation.text not in _WAIT_FOR_ALL or not isinstance(about.get("ranks"), list):
            continue
        if not barrier:
            if about.get("backend") not in _BLOCKING:
                continue
            here &= begins["b"] > 0  # of nothing nobody waits for anybody
        key = f"{piece.attempt} {about.get('key')} {about['ranks']} {operation.text}"
        call[here] = numbers.setdefault(key, len(numbers)) << 32 | begins["seq"][here] & _LOW
    return call


def _name(names: Sequence[Name | None], number: int) -> Name | None:
    return names[number] if 0 < number < len(names) else None


def _extra(names: Sequence[Name | None], number: int) -> dict[str, Any]:
    name = _name(names, number)
    return (name.extra or {}) if name is not None else {}


def _waited(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Calls that waited for their own work before they came back: four events in a row."""
    rows = rows[np.isin(rows["kind"], (*_CALL, K.CALL_RAISED))]
    if len(rows) < 4:
        return rows[:0], rows[:0]
    size = len(rows) - 3
    row = np.all([rows["kind"][i : i + size] == kind for i, kind in enumerate(_CALL)], axis=0)
    begins = np.flatnonzero(row & (rows["a"][2 : 2 + size] == WAIT_OF_CALL))
    return rows[begins], rows[begins + 3]


def _by_backward(rows: np.ndarray, names: Sequence[Name | None]) -> tuple[np.ndarray, np.ndarray]:
    """Calls of DDP's reducer, which a backward that ends in order has waited for."""
    ends = np.flatnonzero(np.isin(rows["kind"], (K.BACKWARD_END, K.BACKWARD_RAISED)))
    calls = np.flatnonzero(rows["kind"] == K.COLLECTIVE)
    issued = rows["seq"][calls] >> 32
    ddp = [n for n in np.unique(issued).tolist() if _extra(names, n).get("issuer") == "DDP"]
    calls = calls[np.isin(issued, ddp)]
    after = np.searchsorted(ends, calls)
    calls, after = calls[after < len(ends)], after[after < len(ends)]
    well = (rows["kind"][ends[after]] == K.BACKWARD_END) & (rows["step"][ends[after]] == rows["step"][calls])
    return rows[calls[well]], rows[ends[after[well]]]
