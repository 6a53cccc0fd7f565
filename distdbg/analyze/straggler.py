"""A rank that makes the others wait, step after step, and where its lateness arises.

A step takes equally long on all ranks, since collectives make all wait for the slowest; own time tells them
apart. All thresholds are relative to the job's own step and its own noise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np

from distdbg.analyze.facts import Facts
from distdbg.analyze.owntime import Key, core_waits, own_times
from distdbg.analyze.parting import roles
from distdbg.analyze.rank import RankView
from distdbg.schema import EventKind as K

WARM_UP = 2  # the first steps allocate, compile and rebuild buckets
MIN_STEPS = 8  # late ones
MIN_TAIL = 32  # steps of a run's end that are looked at by themselves
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


def late(facts: Facts) -> list[Late]:
    """The ranks that make the others wait, the worst first; others that are much less late than it are left out."""
    if len(facts.views) < 2:
        return []
    found: list[Late] = []
    for table in _tables(facts):
        for part in table.tails():
            behind = _behind_peers(part)
            behind |= _slow_everywhere(facts, part, behind)
            if behind:
                found += behind.values()
                break
    alone = [ranks[0] for ranks in roles(facts.views) if len(ranks) == 1]
    if alone:
        everyone = tuple(facts.views)
        table = _table(facts, everyone, 1)
        habits = (_slower_than_before(table, everyone.index(rank)) for rank in alone)
        found += [one for one in habits if one is not None]
    found.sort(key=lambda one: -one.excess)
    return [one for one in found if one.excess > found[0].excess / 2]


def suspects(facts: Facts, count: int) -> list[int]:
    """The ranks that are most behind their peers, whether that is much or little."""
    found: list[tuple[float, int]] = []
    for table in _tables(facts):
        if table.steps:
            behind = np.median(table.total - others_median(table.total), axis=1) / np.maximum(table.step_ns, 1)
            found += zip(behind.tolist(), table.ranks, strict=True)
    return [rank for _, rank in sorted(found, reverse=True)[:count]]


def imbalance(facts: Facts) -> list[str]:
    """In words, ranks that the others wait for because they have more to do: larger batches, no fault."""
    found = []
    for table in _tables(facts):
        if len(table.steps) < MIN_STEPS:
            continue
        longer = np.median(table.total - others_median(table.total), axis=1)
        sizes = table.inputs.sum(axis=1, keepdims=True)
        usual = others_median(sizes)
        for row in np.flatnonzero(_imbalanced(table) & (longer > SHARE * table.step_ns) & (usual[:, 0] > 0)).tolist():
            share, times = longer[row] / table.step_ns[row], sizes[row, 0] / usual[row, 0]
            found.append(
                f"rank {table.ranks[row]} works {longer[row] / 1e6:.1f} ms a step longer than the others ({share:.0%} "
                f"of a step), on inputs {times:.1f} times as large: imbalance, no fault"
            )
    return found


def _steps(facts: Facts, ranks: tuple[int, ...], warm_up: int) -> list[int]:
    first = max(max(facts.views[rank].first_step for rank in ranks), warm_up)
    last = min(facts.views[rank].steps_ended for rank in ranks)
    return list(range(first, last))


# ---- where lateness may arise


@dataclass
class Table:
    """Times of ranks (rows) in steps (columns), ns: by place, in all, waiting; and the sizes of inputs."""

    ranks: tuple[int, ...]
    steps: list[int]
    places: dict[Key, np.ndarray]
    total: np.ndarray
    waiting: np.ndarray
    inputs: np.ndarray

    @cached_property
    def step_ns(self) -> np.ndarray:
        """By rank, the median time of a step."""
        found: np.ndarray = np.median(self.total + self.waiting, axis=1)
        return found

    def tails(self) -> Iterator["Table"]:
        """The table, then its later half, and so on: a rank may be late for good only since lately."""
        yield self
        count = len(self.steps) // 2
        while count >= MIN_TAIL:
            places = {key: values[:, -count:] for key, values in self.places.items()}
            rest = (values[:, -count:] for values in (self.total, self.waiting, self.inputs))
            yield Table(self.ranks, self.steps[-count:], places, *rest)
            count //= 2

    def wider(self) -> list[tuple[Key, frozenset[Key]]]:
        """Places, the finest first: a node or module in a phase, all nodes of a module, a module in all phases.

        The second of a pair are the keys whose times are summed up.
        """
        groups: dict[Key, set[Key]] = {}
        for phase, node, module in self.places:
            groups.setdefault((phase, "", module), set()).add((phase, node, module))
            if module:
                groups.setdefault(("", "", module), set()).add((phase, node, module))
        fine = [(key, frozenset({key})) for key in sorted(self.places)]
        return fine + [(key, frozenset(found)) for key, found in sorted(groups.items()) if len(found) > 1]

    def spent(self, keys: frozenset[Key]) -> np.ndarray:
        found: np.ndarray = sum((self.places[key] for key in keys), np.zeros_like(self.total))
        return found


def _tables(facts: Facts) -> list[Table]:
    """A table for each role of several ranks; made once a run, since two questions are asked of them."""
    known: list[Table] | None = facts.__dict__.get("straggler_tables")
    if known is None:
        several = [ranks for ranks in roles(facts.views) if len(ranks) > 1]
        known = facts.__dict__["straggler_tables"] = [_table(facts, ranks, WARM_UP) for ranks in several]
    return known


def _table(facts: Facts, ranks: tuple[int, ...], warm_up: int) -> Table:
    steps = _steps(facts, ranks, warm_up)
    shape = (len(ranks), len(steps))
    table = Table(ranks, steps, {}, *(np.zeros(shape) for _ in range(3)))
    for row, rank in enumerate(ranks):
        times = own_times(facts.views[rank])
        for key, every in zip(times.keys, times.table, strict=True):
            spent = times.at(every, steps)
            if spent.any():
                table.places.setdefault(key, np.zeros(shape))[row] = spent
        table.total[row] = times.at(times.totals, steps)
        table.waiting[row] = times.at(times.waiting_ns, steps)
        table.inputs[row] = times.at(times.elements, steps)
    return table


def others_median(values: np.ndarray) -> np.ndarray:
    """For each entry the median of its column without it; shape as ``values``, which has two rows at least."""
    rows = len(values)
    order = np.argsort(values, axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, axis=0)
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(rows)[:, None], axis=0)

    def nth(k: int) -> np.ndarray:  # of the others, in order
        found: np.ndarray = np.where(rank > k, ordered[k], ordered[min(k + 1, rows - 1)])
        return found

    middle = (rows - 1) // 2
    return nth(middle) if (rows - 1) % 2 else (nth(middle - 1) + nth(middle)) / 2


def _named(key: Key, keys: frozenset[Key], extra: dict[Key, float]) -> Key:
    """The name of a place: of a module slow in several phases the phase with the most of it."""
    if key[0]:
        return key
    most = max(keys, key=lambda k: extra.get(k, 0.0))
    return (most[0], "", key[2])


# ---- against its peers


def _behind_peers(table: Table) -> dict[int, Late]:
    """Lateness against the median of its peers, by rank: the finest place that holds at least half of it.

    What is spread over everything is what a busy machine looks like, too, and names nobody.
    """
    found: dict[int, Late] = {}
    if len(table.steps) < MIN_STEPS:
        return found
    total = table.total - others_median(table.total)
    waited = others_median(table.waiting) - table.waiting
    fed = _imbalanced(table)
    means: dict[int, dict[Key, float]] = {}
    for key, keys in table.wider():
        spent = table.spent(keys)
        extra = spent - others_median(spent)
        second = np.median(extra[:, extra.shape[1] // 2 :], axis=1)
        for row in np.flatnonzero((second >= SHARE * table.step_ns) & (table.step_ns > 0) & ~fed).tolist():
            begin = _onset(extra[row])
            if begin is None:
                continue
            rank = table.ranks[row]
            lost = float(np.median(extra[row, begin:]))
            means.setdefault(rank, {})[key] = lost
            if not lost / 3 <= np.median(total[row, begin:]) <= 2 * lost:
                continue  # made good elsewhere, or a part of what is spread over more
            wait = float(np.median(waited[row, begin:]))
            if wait < lost / 3:
                continue  # nobody waited for it: the work was not in the others' way
            if not _stands_out(key, extra[row, begin:], np.delete(spent, row, axis=0)[:, begin:]):
                continue
            best = found.get(rank)
            # A wider place counts only where it explains much more than the finer ones within it.
            if best is None or lost > WIDER * best.excess:
                place = _named(key, keys, means[rank])
                found[rank] = Late(rank, place, table.steps[begin], lost, lost / float(table.step_ns[row]), wait)
    return found


def _stands_out(key: Key, extra: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether lateness is more than noise: steady; in a module or node, or beyond what its peers vary there."""
    lost = float(np.median(extra))
    if key[2] and len(theirs) > 1:
        return lost > NOISE * float(np.median(np.abs(theirs - np.median(theirs, axis=0))))
    return lost > STEADY * float(np.median(np.abs(extra - lost)))


def _imbalanced(table: Table) -> np.ndarray:
    """Marks ranks with larger batches or longer sequences: they have more to do, which is no straggling."""
    sizes = table.inputs.sum(axis=1, keepdims=True)
    found: np.ndarray = (sizes > 1.1 * others_median(sizes))[:, 0]
    return found


def _onset(excess: np.ndarray) -> int | None:
    """The index from which on a rank is late for good, or None: late in most steps from there to the end."""
    lost = float(np.median(excess[len(excess) // 2 :]))
    # The beginning that divides best: before it steps count against, after it for being late; spikes count little.
    gains = np.clip(excess, -lost, 2 * lost) - lost / 2
    begin = int(np.argmax(np.cumsum(gains[::-1])[::-1]))
    tail = excess[begin:]
    if len(tail) < MIN_STEPS or np.mean(tail > lost / 3) < LATE:
        return None
    return begin


def _slow_everywhere(facts: Facts, table: Table, done: dict[int, Late]) -> dict[int, Late]:
    """Ranks that are slower than their peers in all they do: slow machines.

    One that has to share its cores looks the same by the clock; how long it had no core to run on tells them apart.
    """
    found: dict[int, Late] = {}
    if len(table.steps) < MIN_STEPS or len(table.ranks) < 3:
        return found
    excess = table.total - others_median(table.total)
    waited = others_median(table.waiting) - table.waiting
    second = np.median(excess[:, excess.shape[1] // 2 :], axis=1)
    late = (second >= SLOW_SHARE * table.step_ns) & (table.step_ns > 0) & ~_imbalanced(table)
    for row in np.flatnonzero(late).tolist():
        rank, begin = table.ranks[row], _onset(excess[row])
        if begin is None or rank in done:
            continue
        step_ns, lost = float(table.step_ns[row]), float(np.median(excess[row, begin:]))
        others = np.delete(table.total, row, axis=0)[:, begin:]
        spread = float(np.median(np.abs(others - np.median(others, axis=0))))
        wait = float(np.median(waited[row, begin:]))
        if lost < SLOW_SHARE * step_ns or lost < NOISE * spread or wait < lost / 3:
            continue
        shared = {r: _core_wait(facts.views[r], table.steps[begin:]) for r in table.ranks}
        known = [value for r, value in shared.items() if r != rank and value is not None]
        own = shared[rank]
        if own is None or len(known) < len(table.ranks) - 1:
            continue
        slower = lost - max(0.0, own - median(known))  # what it works longer than they do, once it has a core
        if slower >= max(lost / 3, SHARE * step_ns):
            found[rank] = Late(rank, ("", "", ""), table.steps[begin], lost, lost / step_ns, wait)
    return found


def _core_wait(view: RankView, steps: list[int]) -> float | None:
    """ns a step for which a rank's main thread had no core to run on, None where that is not known."""
    moments, waited = core_waits(view)
    ends = view.of_kind(K.STEP)
    ends = ends[(ends["step"] >= steps[0]) & (ends["step"] <= steps[-1])]["t"]
    if len(moments) < 2 or len(ends) < 2:
        return None
    return float(np.diff(np.interp(ends[[0, -1]], moments, waited))[0]) / (len(ends) - 1)


# ---- against its own habit


def _slower_than_before(table: Table, row: int) -> Late | None:
    """A rank without peers (a pipeline's stage) that got slower in one place from some step on, for good.

    A stage that is slower from the start on is so by design. The others must wait for it as they did not before,
    and have no more work themselves.
    """
    if len(table.steps) < MIN_BEFORE + MIN_STEPS or len(table.ranks) < 2:
        return None
    best: Late | None = None
    means: dict[Key, float] = {}
    whole = table.total[row] + table.waiting[row]
    for key, keys in table.wider():
        series = table.spent(keys)[row]
        rise = float(np.median(series[-MIN_STEPS:]) - np.median(series[:MIN_BEFORE]))
        if rise < SHARE / 2 * float(np.median(whole[:MIN_BEFORE])):
            continue
        begin = _change(series)
        if begin is None:
            continue
        lost = means[key] = float(np.median(series[begin:]) - np.median(series[:begin]))
        step_ns = float(np.median(whole[:begin]))
        if lost < SHARE * step_ns or (best is not None and lost <= WIDER * best.excess):
            continue
        waited, busier = (_more(values, begin) for values in (table.waiting, table.total))
        own_wait, fed = waited[row], _more(table.inputs, begin)[row] > 0.1 * np.median(table.inputs[row, :begin])
        waited, busier = np.delete(waited, row), np.delete(busier, row)
        if waited.max() < lost / 3 or busier.max() > lost / 3 or fed or own_wait > lost / 3:
            continue
        place, wait = _named(key, keys, means), float(waited.max())
        best = Late(table.ranks[row], place, table.steps[begin], lost, lost / step_ns, wait, habit=True)
    return best


def _more(values: np.ndarray, begin: int) -> np.ndarray:
    """By rank, how much larger the median is from a step on than before."""
    found: np.ndarray = np.median(values[:, begin:], axis=1) - np.median(values[:, :begin], axis=1)
    return found


def _change(series: np.ndarray) -> int | None:
    """The index at which a series rises for good and clearly, from one steady level to another; None if it does not."""
    # Near the index at which it departs most from its mean; spikes are cut, so that one of them is no departure.
    cut = np.minimum(series, np.median(series[-MIN_STEPS:]))
    near = int(np.argmin(np.cumsum(cut - cut.mean()))) + 1
    best: tuple[float, int] | None = None
    for begin in range(max(MIN_BEFORE, near - 3), min(len(series) - MIN_STEPS, near + 3) + 1):
        before, after = series[:begin], series[begin:]
        low, high = float(np.median(before)), float(np.median(after))
        above, below = np.mean(after > (low + high) / 2), np.mean(before < (low + high) / 2)
        spread = max(float(np.median(np.abs(before - low))), float(np.median(np.abs(after - high))))
        if high - low > STEADY * spread and above >= LATE and below >= LATE:
            score = float(above * len(after) + below * len(before))
            if best is None or score > best[0]:
                best = (score, begin)
    return best[1] if best is not None else None


def told(facts: Facts, late: list[Late]) -> dict[str, Any]:
    """The verdict of kind `straggler`."""
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
