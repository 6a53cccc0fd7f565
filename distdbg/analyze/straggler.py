"""A rank that makes the others wait, step after step, and where its lateness arises.

A step takes equally long on all ranks, since collectives make all wait for the slowest; own time tells them
apart. All thresholds are relative to the job's own step and its own noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from distdbg.analyze.facts import Facts
from distdbg.analyze.owntime import Key, Times, own_times
from distdbg.analyze.parting import roles

WARM_UP = 2  # the first steps allocate, compile and rebuild buckets
MIN_STEPS = 8  # late ones
STEADY = 3.0  # times the spread of the lateness from step to step
SHARE = 0.10  # of a step, that must be lost for others to care
LATE = 0.85  # the part of the steps, from the first late one on, in which a straggler is late
NOISE = 4.0  # times the spread that the same place shows on the other ranks


@dataclass
class Late:
    """One rank's lateness: the place it arises in, the step from which on, ns a step."""

    rank: int
    key: Key
    step: int
    excess: float
    share: float
    waited: float


def find(facts: Facts) -> dict[str, Any] | None:
    """The verdict of kind `straggler`, or None."""
    if facts.symptom or len(facts.views) < 2:
        return None
    found: list[Late] = []
    for ranks in roles(facts.views):
        if len(ranks) > 1:
            times = {rank: own_times(facts.views[rank]) for rank in ranks}
            found.extend(late for rank in ranks if (late := _late(facts, rank, times)) is not None)
    if not found:
        return None
    found.sort(key=lambda late: -late.excess)
    worst = [late for late in found if late.excess > found[0].excess / 2]
    return _verdict(facts, worst)


def _steps(facts: Facts, times: dict[int, Times]) -> list[int]:
    first = max(max(facts.views[rank].first_step for rank in times), WARM_UP)
    last = min(facts.views[rank].steps_ended for rank in times)
    return list(range(first, last))


def _late(facts: Facts, rank: int, times: dict[int, Times]) -> Late | None:
    steps = _steps(facts, times)
    others = [other for other in times if other != rank]
    if len(steps) < MIN_STEPS:
        return None
    mine = times[rank]
    step_ns = median(mine.total(s) + mine.waiting.get(s, 0) for s in steps)
    if _imbalanced(rank, times, steps) or step_ns <= 0:
        return None
    excess = [mine.total(s) - median(times[o].total(s) for o in others) for s in steps]
    begin = _onset(excess, step_ns)
    if begin is None:
        return None
    during = steps[begin:]
    lost = median(excess[begin:])
    waited = median(median(times[o].waiting.get(s, 0) for o in others) - mine.waiting.get(s, 0) for s in during)
    if waited < lost / 3:
        return None  # nobody waited for it: the work was not in the others' way
    noise = (
        median(abs(times[o].total(s) - median(times[p].total(s) for p in others)) for s in during for o in others)
        if len(others) > 1
        else 0.0
    )
    if lost < NOISE * noise:
        return None
    key = _place(rank, others, times, during, lost)
    if key is None:
        return None
    return Late(rank, key, during[0], lost, lost / step_ns, waited)


def _imbalanced(rank: int, times: dict[int, Times], steps: Sequence[int]) -> bool:
    """A rank with a larger batch or longer sequences has more to do: imbalance, no straggler."""
    sizes = {r: sum(t.inputs.get(s, 0) for s in steps) for r, t in times.items()}
    others = [size for r, size in sizes.items() if r != rank]
    return bool(others) and sizes[rank] > 1.1 * median(others)


def _onset(excess: list[float], step_ns: float) -> int | None:
    """The index from which on a rank is late for good, or None: late in most steps from there to the end."""
    lost = median(excess[len(excess) // 2 :])
    if lost < SHARE * step_ns:
        return None
    # The beginning that divides best: before it steps count against, after it for being late; spikes count little.
    gains = [min(max(e, -lost), 2 * lost) - lost / 2 for e in excess]
    totals = [sum(gains[begin:]) for begin in range(len(gains))]
    begin = max(range(len(totals)), key=lambda index: totals[index])
    tail = excess[begin:]
    if len(tail) < MIN_STEPS or sum(e > lost / 3 for e in tail) < LATE * len(tail):
        return None
    return begin


def _place(rank: int, others: list[int], times: dict[int, Times], steps: list[int], lost: float) -> Key | None:
    """The place in which at least half of the lateness arises, steadily; None where there is no such place.

    Lateness spread over everything is what a busy machine looks like, too, and names nobody.
    """
    best: tuple[float, Key] | None = None
    for key in {key for s in steps for key in times[rank].own.get(s, {})}:
        extra = [
            times[rank].own.get(s, {}).get(key, 0) - median(times[o].own.get(s, {}).get(key, 0) for o in others)
            for s in steps
        ]
        middle = median(extra)
        deviation = median(abs(value - middle) for value in extra)
        if middle >= lost / 2 and middle > STEADY * deviation and (best is None or middle > best[0]):
            best = (middle, key)
    return best[1] if best is not None else None


def _verdict(facts: Facts, late: list[Late]) -> dict[str, Any]:
    entries = []
    evidence = []
    for one in late:
        phase, node, module = one.key
        entries.append(facts.culprit(one.rank, phase=phase, node=node or None, module=module or None, step=one.step))
        evidence.append(
            f"rank {one.rank} works {one.excess / 1e6:.1f} ms a step longer than the others from step {one.step} on "
            f"({one.share:.0%} of a step); they wait {one.waited / 1e6:.1f} ms a step longer than it does"
        )
    phase, node, module = late[0].key
    place = f"node {node} of module {module}" if node else f"module {module}" if module else f"phase {phase}"
    who = facts.names([one.rank for one in late])
    return {
        "kind": "straggler",
        "cause": f"{late[0].excess / 1e6:.0f} ms a step more in {place}",
        "culprits": entries,
        "summary": f"{who} makes the others wait from step {late[0].step} on: {late[0].excess / 1e6:.0f} ms a step "
        f"more in {phase}, {place}",
        "victims": facts.victims({one.rank for one in late}),
        "evidence": evidence,
        "confidence": 0.85,
        "ruled_out": [
            "a larger batch: inputs are of one size",
            "sporadic delays: it is late in nearly all steps since",
        ],
    }
