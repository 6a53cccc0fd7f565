"""A rank that goes round and round in its own code, records events all the time, and keeps the others waiting.

An evaluation on one rank looks the same while it lasts. What tells them apart is the rank's habit: between the
same two collectives it, or a peer, did the same a few times before, and now it does it without end.
"""

from dataclasses import dataclass

import numpy as np

from distdbg.analyze.facts import Facts
from distdbg.analyze.rank import RankView
from distdbg.schema import EventKind as K

ROUNDS = 20  # times as many as ever before between those two collectives
HABIT = 3  # rounds in one place, of its own or of a peer's
WAITED = 10  # times as long as any step so far

_ROUND = (K.FORWARD_BEGIN, K.DATA_BEGIN, K.CHECKPOINT_BEGIN)
_PHASE = {int(K.FORWARD_BEGIN): "forward", int(K.DATA_BEGIN): "data", int(K.CHECKPOINT_BEGIN): "checkpoint"}


@dataclass(frozen=True)
class Circle:
    """What a rank does over and over since its last collective (``since``: unix ns)."""

    rank: int
    since: int
    count: int
    usual: int | None  # the most it or a peer did there; None where nobody did so over and over
    phase: str
    module: str


def find(facts: Facts) -> Circle | None:
    """The one rank for which all others wait while it moves, or None."""
    free = [rank for rank in facts.views if rank not in facts.blocked]
    if len(free) != 1 or len(facts.views) < 2 or facts.missing:
        return None
    rank = free[0]
    view = facts.views[rank]
    if any(rank not in wait.on and not set(wait.on) & set(facts.blocked) for wait in facts.blocked.values()):
        return None
    if facts.ends[rank].how in ("left", "vanished", "crashed") or rank in facts.failures:
        return None
    if facts.now - view.last_t > 1_000_000_000:
        return None  # it is silent: a plain stall
    circle = _circle(view, [v for r, v in facts.views.items() if r != rank and v.parameters == view.parameters])
    if circle is None:
        return None
    quiet = facts.now - max(max(facts.views[r].last_t for r in facts.blocked), circle.since)
    longest = int(np.max(np.diff(_ends(view)), initial=0))
    if quiet < 5_000_000_000 or quiet < WAITED * longest:
        return None
    return circle


def _ends(view: RankView) -> np.ndarray:
    """When steps ended, but the first, which warms up (ns)."""
    found: np.ndarray = view.of_kind(K.STEP)["t"]
    return found


def _rounds(view: RankView) -> np.ndarray:
    """Marks what is done over and over: forwards of whole models, batches loaded, checkpoints."""
    records = view.main
    found: np.ndarray = np.isin(records["kind"], _ROUND) & ((records["kind"] != K.FORWARD_BEGIN) | (records["a"] == 1))
    return found


def _by_position(view: RankView) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """After each collective or step: its index in the records, how many collectives its step had by then, rounds."""
    records = view.main
    cuts = np.flatnonzero(np.isin(records["kind"], (K.COLLECTIVE, K.STEP)))
    if not len(cuts):
        return cuts, cuts, cuts
    step_at = np.maximum.accumulate(np.where(records["kind"][cuts] == K.STEP, np.arange(len(cuts)), 0))
    return cuts, np.arange(len(cuts)) - step_at, np.add.reduceat(_rounds(view), cuts)


def _circle(view: RankView, peers: list[RankView]) -> Circle | None:
    records = view.main
    cuts, positions, counts = _by_position(view)
    if not len(cuts):
        return None
    here, position = int(counts[-1]), int(positions[-1])
    habit = [int(count) for count in counts[:-1][positions[:-1] == position]]
    for peer in peers:
        _, theirs, found = _by_position(peer)
        habit += [int(count) for count in found[theirs == position]]
    habit = [count for count in habit if count >= HABIT]
    usual = max(habit, default=None)
    if here < ROUNDS * (usual or 1):
        return None
    now = records[cuts[-1] :][_rounds(view)[cuts[-1] :]]
    kinds, number = np.unique(now["kind"], return_counts=True)
    kind = int(kinds[np.argmax(number)])
    module = view.text(int(now["module"][-1])) if kind == K.FORWARD_BEGIN else ""
    since = int(records["t"][cuts[-1]]) + view.offset
    return Circle(view.rank, since, here, usual, _PHASE[kind], module)
