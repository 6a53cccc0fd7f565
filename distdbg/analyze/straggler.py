"""A rank that makes the others wait, step after step, and where its lateness arises.

A step takes equally long on all ranks, since collectives make all wait for the slowest; own time tells them
apart. All thresholds are relative to the job's own step and its own noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from distdbg.analyze.facts import Facts
from distdbg.analyze.owntime import Key, Times, core_waits, own_times
from distdbg.analyze.parting import roles
from distdbg.analyze.rank import RankView
from distdbg.schema import EventKind as K

WARM_UP = 2  # the first steps allocate, compile and rebuild buckets
MIN_STEPS = 8  # late ones
STEADY = 3.0  # times the spread of the lateness from step to step
SHARE = 0.10  # of a step, that must be lost for others to care
LATE = 0.85  # the part of the steps, from the first late one on, in which a straggler is late
MIN_BEFORE = 3  # steps of a rank's habit, where it is told by that
WIDER = 1.4  # times what a finer place explains, for a wider one to be named
SLOW_SHARE = 0.25  # of a step, that must be lost where no place can be named
NOISE = 4.0  # times the spread that the same module or node shows on the other ranks


@dataclass
class Late:
    """One rank's lateness: the place it arises in, the step from which on, ns a step."""

    rank: int
    key: Key
    step: int
    excess: float
    share: float
    waited: float
    habit: bool = False  # told by its own earlier steps: it has no peer that does the same


def find(facts: Facts) -> dict[str, Any] | None:
    """The verdict of kind `straggler`, or None."""
    if facts.symptom or len(facts.views) < 2:
        return None
    times = {rank: own_times(view) for rank, view in facts.views.items()}
    found: list[Late] = []
    for ranks in roles(facts.views):
        for rank in ranks:
            if len(ranks) > 1:
                peers, steps = {r: times[r] for r in ranks}, _steps(facts, ranks, WARM_UP)
                late = _behind_peers(rank, peers, steps) or _slow_everywhere(facts, rank, peers, steps)
            else:
                late = _slower_than_before(rank, times, _steps(facts, tuple(facts.views), 1))
            if late is not None:
                found.append(late)
    if not found:
        return None
    found.sort(key=lambda late: -late.excess)
    worst = [late for late in found if late.excess > found[0].excess / 2]
    return _verdict(facts, worst)


def imbalance(facts: Facts) -> list[str]:
    """In words, ranks that the others wait for because they have more to do: larger batches, no fault."""
    found = []
    for ranks in roles(facts.views):
        if len(ranks) < 2:
            continue
        times = {r: own_times(facts.views[r]) for r in ranks}
        steps = _steps(facts, ranks, WARM_UP)
        for rank in ranks:
            others = [other for other in ranks if other != rank]
            if len(steps) < MIN_STEPS or not _imbalanced(rank, times, steps):
                continue
            mine = times[rank]
            longer = median(mine.total(s) - median(times[o].total(s) for o in others) for s in steps)
            step_ns = median(mine.total(s) + mine.waiting.get(s, 0) for s in steps)
            sizes = {r: sum(t.inputs.get(s, 0) for s in steps) for r, t in times.items()}
            usual = median(sizes[o] for o in others)
            if longer > SHARE * step_ns and usual > 0:
                found.append(
                    f"rank {rank} works {longer / 1e6:.1f} ms a step longer than the others ({longer / step_ns:.0%} of "
                    f"a step), on inputs {sizes[rank] / usual:.1f} times as large: imbalance, no fault"
                )
    return found


def _steps(facts: Facts, ranks: tuple[int, ...], warm_up: int) -> list[int]:
    first = max(max(facts.views[rank].first_step for rank in ranks), warm_up)
    last = min(facts.views[rank].steps_ended for rank in ranks)
    return list(range(first, last))


# ---- where lateness may arise


def _places(times: Times, steps: Sequence[int]) -> list[tuple[Key, frozenset[Key]]]:
    """Places, the finest first: a node or module in a phase, all nodes of a module, a module in all phases.

    The second of a pair are the keys whose times are summed up.
    """
    keys = {key for s in steps for key in times.own.get(s, {})}
    wider: dict[Key, set[Key]] = {}
    for phase, node, module in keys:
        wider.setdefault((phase, "", module), set()).add((phase, node, module))
        if module:
            wider.setdefault(("", "", module), set()).add((phase, node, module))
    fine = [(key, frozenset({key})) for key in sorted(keys)]
    return fine + [(key, frozenset(found)) for key, found in sorted(wider.items()) if len(found) > 1]


def _in(times: Times, step: int, keys: frozenset[Key]) -> int:
    own = times.own.get(step, {})
    return sum(own.get(key, 0) for key in keys)


def _named(key: Key, keys: frozenset[Key], extra: dict[Key, float]) -> Key:
    """The name of a place: of a module slow in several phases the phase with the most of it."""
    if key[0]:
        return key
    most = max(keys, key=lambda k: extra.get(k, 0.0))
    return (most[0], "", key[2])


# ---- against its peers


def _behind_peers(rank: int, times: dict[int, Times], steps: list[int]) -> Late | None:
    """Lateness against the median of its peers: the finest place that holds at least half of it.

    What is spread over everything is what a busy machine looks like, too, and names nobody.
    """
    others = [other for other in times if other != rank]
    if len(steps) < MIN_STEPS:
        return None
    mine = times[rank]
    step_ns = median(mine.total(s) + mine.waiting.get(s, 0) for s in steps)
    if step_ns <= 0 or _imbalanced(rank, times, steps):
        return None
    total = [mine.total(s) - median(times[o].total(s) for o in others) for s in steps]
    best: Late | None = None
    means: dict[Key, float] = {}
    for key, keys in _places(mine, steps):
        extra = [_in(mine, s, keys) - median(_in(times[o], s, keys) for o in others) for s in steps]
        begin = _onset(extra, step_ns)
        if begin is None:
            continue
        during = steps[begin:]
        lost = means[key] = median(extra[begin:])
        if not lost / 3 <= median(total[begin:]) <= 2 * lost:
            continue  # made good elsewhere, or a part of what is spread over more
        waited = median(median(times[o].waiting.get(s, 0) for o in others) - mine.waiting.get(s, 0) for s in during)
        if waited < lost / 3:
            continue  # nobody waited for it: the work was not in the others' way
        if not _stands_out(key, extra[begin:], [[_in(times[o], s, keys) for s in during] for o in others]):
            continue
        # A wider place counts only where it explains much more than the finer ones within it.
        if best is None or lost > WIDER * best.excess:
            best = Late(rank, _named(key, keys, means), during[0], lost, lost / step_ns, waited)
    return best


def _stands_out(key: Key, extra: list[float], theirs: list[list[int]]) -> bool:
    """Whether lateness is more than noise: steady; in a module or node, or beyond what its peers vary there."""
    lost = median(extra)
    if key[2] and len(theirs) > 1:
        spread = [abs(row[i] - median(other[i] for other in theirs)) for row in theirs for i in range(len(extra))]
        return lost > NOISE * median(spread)
    return lost > STEADY * median(abs(value - lost) for value in extra)


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


def _slow_everywhere(facts: Facts, rank: int, times: dict[int, Times], steps: list[int]) -> Late | None:
    """A rank that is slower than its peers in all it does: a slow machine.

    One that has to share its cores looks the same by the clock; how long it had no core to run on tells them apart.
    """
    others = [other for other in times if other != rank]
    mine = times[rank]
    if len(steps) < MIN_STEPS or len(others) < 2 or _imbalanced(rank, times, steps):
        return None
    step_ns = median(mine.total(s) + mine.waiting.get(s, 0) for s in steps)
    excess = [float(mine.total(s) - median(times[o].total(s) for o in others)) for s in steps]
    begin = _onset(excess, step_ns)
    if begin is None:
        return None
    during, lost = steps[begin:], median(excess[begin:])
    spread = [abs(times[o].total(s) - median(times[p].total(s) for p in others)) for s in during for o in others]
    waited = median(median(times[o].waiting.get(s, 0) for o in others) - mine.waiting.get(s, 0) for s in during)
    if lost < SLOW_SHARE * step_ns or lost < NOISE * median(spread) or waited < lost / 3:
        return None
    shared = {r: _core_wait(facts.views[r], during) for r in times}
    known = [value for r, value in shared.items() if r != rank and value is not None]
    own = shared[rank]
    if own is None or len(known) < len(others):
        return None
    slower = lost - max(0.0, own - median(known))  # what it works longer than they do, once it has a core
    if slower < max(lost / 3, SHARE * step_ns):
        return None
    return Late(rank, ("", "", ""), during[0], lost, lost / step_ns, waited)


def _core_wait(view: RankView, steps: list[int]) -> float | None:
    """ns a step for which a rank's main thread had no core to run on, None where that is not known."""
    moments, waited = core_waits(view)
    ends = view.of_kind(K.STEP)
    ends = ends[(ends["step"] >= steps[0]) & (ends["step"] <= steps[-1])]["t"]
    if len(moments) < 2 or len(ends) < 2:
        return None
    return float(np.diff(np.interp(ends[[0, -1]], moments, waited))[0]) / (len(ends) - 1)


# ---- against its own habit


def _slower_than_before(rank: int, times: dict[int, Times], steps: list[int]) -> Late | None:
    """A rank without peers (a pipeline's stage) that got slower in one place from some step on, for good.

    A stage that is slower from the start on is so by design. The others must wait for it as they did not before,
    and have no more work themselves.
    """
    mine, others = times[rank], [other for other in times if other != rank]
    if len(steps) < MIN_BEFORE + MIN_STEPS:
        return None
    best: Late | None = None
    means: dict[Key, float] = {}
    for key, keys in _places(mine, steps):
        series = [float(_in(mine, s, keys)) for s in steps]
        begin = _change(series)
        if begin is None:
            continue
        before, during = steps[:begin], steps[begin:]
        lost = means[key] = median(series[begin:]) - median(series[:begin])
        step_ns = median(mine.total(s) + mine.waiting.get(s, 0) for s in before)
        if lost < SHARE * step_ns or (best is not None and lost <= WIDER * best.excess):
            continue

        def more(values: Callable[[int], float], before: list[int] = before, during: list[int] = during) -> float:
            return median(values(s) for s in during) - median(values(s) for s in before)

        waited = max(more(lambda s, o=o: times[o].waiting.get(s, 0)) for o in others)  # type: ignore[misc]
        busier = max(more(lambda s, o=o: times[o].total(s)) for o in others)  # type: ignore[misc]
        fed = median(mine.inputs.get(s, 0) for s in during) > 1.1 * median(mine.inputs.get(s, 0) for s in before)
        if waited < lost / 3 or busier > lost / 3 or fed or more(lambda s: mine.waiting.get(s, 0)) > lost / 3:
            continue
        best = Late(rank, _named(key, keys, means), during[0], lost, lost / step_ns, waited, habit=True)
    return best


def _change(series: list[float]) -> int | None:
    """The index at which a series rises for good and clearly, from one steady level to another; None if it does not."""
    best: tuple[float, int] | None = None
    for begin in range(MIN_BEFORE, len(series) - MIN_STEPS + 1):
        low, high = median(series[:begin]), median(series[begin:])
        middle = (low + high) / 2
        above = sum(value > middle for value in series[begin:]) / (len(series) - begin)
        below = sum(value < middle for value in series[:begin]) / begin
        spread = max(median(abs(v - low) for v in series[:begin]), median(abs(v - high) for v in series[begin:]))
        if high - low > STEADY * spread and above >= LATE and below >= LATE:
            score = sum(v > middle for v in series[begin:]) + sum(v < middle for v in series[:begin])
            if best is None or score > best[0]:
                best = (score, begin)
    return best[1] if best is not None else None


def _verdict(facts: Facts, late: list[Late]) -> dict[str, Any]:
    entries = []
    evidence = []
    for one in late:
        phase, node, module = one.key
        entries.append(
            facts.culprit(one.rank, phase=phase or None, node=node or None, module=module or None, step=one.step)
        )
        than = "it did before" if one.habit else "the others"
        wait = "than before" if one.habit else "than it does"
        evidence.append(
            f"rank {one.rank} works {one.excess / 1e6:.1f} ms a step longer than {than} from step {one.step} on "
            f"({one.share:.0%} of a step); others wait {one.waited / 1e6:.1f} ms a step longer {wait}"
        )
    phase, node, module = late[0].key
    place = f"in {phase}, " + (f"node {node} of module {module}" if node else f"module {module}" if module else "")
    place = place.rstrip(", ") if phase else "in all that it does (a slow machine)"
    who = facts.names([one.rank for one in late])
    make = "makes" if len(late) == 1 else "make"
    return {
        "kind": "straggler",
        "cause": f"{late[0].excess / 1e6:.0f} ms a step more {place}",
        "culprits": entries,
        "summary": f"{who} {make} the others wait from step {late[0].step} on: {late[0].excess / 1e6:.0f} ms a step "
        f"more {place}",
        "victims": facts.victims({one.rank for one in late}),
        "evidence": evidence,
        "confidence": 0.85,
        "ruled_out": [
            "a larger batch: inputs are of one size",
            "sporadic delays: it is late in nearly all steps since",
        ],
    }
