"""What got slower between two runs: own time per step, by phase and by module and node.

For every place the median over ranks is taken step by step, then the median over steps after warm-up. Its spread
is that of the steps (median absolute deviation, scaled as a standard deviation). A difference counts only beyond
the noise: more than the spread of single steps, four times the error of the medians, and 0.5 % of a step.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

from distdbg.analyze.facts import gather
from distdbg.analyze.lately import step_ns
from distdbg.analyze.owntime import Key, Times, own_times
from distdbg.analyze.read import read_run
from distdbg.analyze.straggler import MIN_STEPS, WARM_UP
from distdbg.errors import RunDirError

MIN_SHARE = 0.005  # of a step
ERRORS = 4.0
_MAD = 1.4826  # from a median absolute deviation to a standard deviation


@dataclass(frozen=True)
class Amount:
    """ms a step: the median over ranks and steps, and the spread over steps."""

    ms: float
    spread_ms: float
    steps: int


@dataclass(frozen=True)
class Difference:
    """One place in both runs. ``beyond_noise``: whether the difference is larger than chance makes it.

    ``ranks``: those that alone got slower or faster, where the median over ranks did not.
    """

    what: str  # step, waiting, phase, place
    phase: str
    node: str
    module: str
    a: Amount
    b: Amount
    beyond_noise: bool
    ranks: tuple[int, ...] = ()

    @property
    def ms(self) -> float:
        return self.b.ms - self.a.ms

    @property
    def title(self) -> str:
        if self.what in ("step", "waiting"):
            return self.what
        place = " in ".join(part for part in (self.node, self.module) if part)
        return f"{self.phase}: {place}" if place else self.phase


@dataclass
class Comparison:
    """``rows``: the step, waiting, phases, then places, by the size of the difference."""

    run_a: str
    run_b: str
    ranks: tuple[int, int]
    steps: tuple[int, int]
    rows: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def found(self) -> list[Difference]:
        """What differs beyond the noise."""
        return [row for row in self.rows if row.beyond_noise]

    @property
    def summary(self) -> str:
        """One sentence: how much longer a step takes, and where most of that arises."""
        step = self.rows[0]
        if not self.found:
            return f"no difference beyond the noise: a step takes {step.a.ms:.1f} and {step.b.ms:.1f} ms"
        text = f"a step takes {_change(step)}" if step.beyond_noise else "a step takes as long as before"
        places = [row for row in self.found if row.what == "place"]
        phases = [row for row in self.found if row.what == "phase"]
        if not places and not phases:
            return text
        worst = max(places or phases, key=lambda row: abs(row.ms))
        same = [row for row in places if row.ms * worst.ms > 0]
        if abs(worst.ms) < sum(abs(row.ms) for row in same) / 2 and phases:
            worst = max(phases, key=lambda row: abs(row.ms))
            text += f"; most in {worst.title} ({_change(worst)}), in {len(same)} places"
        else:
            text += f"; most in {worst.title} ({_change(worst)})"
        if worst.ranks:
            text += f", on rank{'s' if len(worst.ranks) > 1 else ''} {', '.join(map(str, worst.ranks))} alone"
        return text

    def as_dict(self) -> dict[str, Any]:
        """For JSON: times in ms a step."""
        rows = [{**asdict(row), "difference_ms": round(row.ms, 4)} for row in self.rows]
        return {
            "schema": "distdbg.compare/1", "run_a": self.run_a, "run_b": self.run_b, "summary": self.summary,
            "ranks": list(self.ranks), "steps": list(self.steps), "rows": rows, "notes": self.notes,
        }  # fmt: skip


def _change(row: Difference) -> str:
    text = f"{abs(row.ms):.2f} ms {'longer' if row.ms > 0 else 'shorter'}"
    return f"{text}, {row.ms / row.a.ms:+.0%}" if row.a.ms > 0 else text


@dataclass
class _Measured:
    """One run: own times by rank, the steps that all ranks have whole and warm, the lengths of steps (ns)."""

    times: dict[int, Times]
    steps: list[int]
    lengths: list[float]
    step_ns: int


def compare(run_a: str | Path, run_b: str | Path) -> Comparison:
    """Compare two runs. Raises DistdbgError where one cannot be read or has too few steps."""
    a, b = _measure(Path(run_a)), _measure(Path(run_b))
    result = Comparison(str(run_a), str(run_b), (len(a.times), len(b.times)), (len(a.steps), len(b.steps)))
    if len(a.times) != len(b.times):
        result.notes.append(f"the runs have {len(a.times)} and {len(b.times)} ranks: work may be shared otherwise")
    inputs = [median(t.inputs.get(s, 0) for t in run.times.values() for s in run.steps) for run in (a, b)]
    if inputs[0] and inputs[1] and abs(inputs[1] / inputs[0] - 1) > 0.02:
        result.notes.append(f"the model's input differs: {inputs[0]:,.0f} and {inputs[1]:,.0f} elements a step")
    rows = [_difference("step", ("", "", ""), [{0: a.lengths}, {0: b.lengths}], a)]
    waits = [{r: [float(t.waiting.get(s, 0)) for s in run.steps] for r, t in run.times.items()} for run in (a, b)]
    rows.append(_difference("waiting", ("", "", ""), waits, a))
    keys = [key for run in (a, b) for t in run.times.values() for s in run.steps for key in t.own.get(s, {})]
    phases = [_difference("phase", (p, "", ""), [_phase(run, p) for run in (a, b)], a) for p in {k[0] for k in keys}]
    places = [
        _difference("place", key, [_place(run, key) for run in (a, b)], a) for key in set(keys) if key[1] or key[2]
    ]
    rows += sorted(phases, key=lambda row: (-abs(row.ms), row.title))
    rows += sorted(places, key=lambda row: (not row.beyond_noise, -abs(row.ms), row.title))
    result.rows = rows
    return result


def _measure(path: Path) -> _Measured:
    views = gather(read_run(path)).views
    first = max([WARM_UP, *(view.first_step for view in views.values())])
    last = min((view.steps_ended for view in views.values()), default=0)
    steps = list(range(first, last))
    if len(steps) < MIN_STEPS:
        raise RunDirError(
            f"{path}: {max(0, len(steps))} whole steps after the first {WARM_UP} that all ranks ended; "
            f"comparing needs {MIN_STEPS}: record a longer run"
        )
    times = {rank: own_times(view) for rank, view in views.items()}
    totals = ({s: t.total(s) + t.waiting.get(s, 0) for s in steps} for t in times.values())
    by_rank = list(totals)
    lengths = [float(median(total[s] for total in by_rank)) for s in steps]
    return _Measured(times, steps, lengths, step_ns(views.values()))


def _phase(run: _Measured, phase: str) -> dict[int, list[float]]:
    return {
        rank: [float(sum(ns for key, ns in t.own.get(s, {}).items() if key[0] == phase)) for s in run.steps]
        for rank, t in run.times.items()
    }


def _place(run: _Measured, key: Key) -> dict[int, list[float]]:
    return {rank: [float(t.own.get(s, {}).get(key, 0)) for s in run.steps] for rank, t in run.times.items()}


def _difference(what: str, key: Key, samples: Sequence[dict[int, list[float]]], a: _Measured) -> Difference:
    """``samples``: for both runs, ns by rank, one for each step."""
    least = MIN_SHARE * median(a.lengths)
    amounts = [_amount([median(column) for column in zip(*by_rank.values(), strict=True)]) for by_rank in samples]
    beyond = _beyond(amounts[0], amounts[1], least)
    ranks: tuple[int, ...] = ()
    if not beyond and what != "waiting":
        both = sorted(set(samples[0]) & set(samples[1]))
        ranks = tuple(r for r in both if _beyond(_amount(samples[0][r]), _amount(samples[1][r]), 5 * least))
        if ranks and len(both) > 1 and len(ranks) <= len(both) // 2:
            beyond = True
            amounts = [_amount([median(by_rank[r][i] for r in ranks) for i in range(len(by_rank[ranks[0]]))])
                       for by_rank in samples]  # fmt: skip
        else:
            ranks = ()
    phase, node, module = key
    return Difference(what, phase, node, module, amounts[0], amounts[1], beyond, ranks)


def _amount(values: Sequence[float]) -> Amount:
    middle = median(values)
    spread = _MAD * median(abs(value - middle) for value in values)
    return Amount(round(middle / 1e6, 4), round(spread / 1e6, 4), len(values))


def _beyond(a: Amount, b: Amount, least_ns: float) -> bool:
    error = 1.25 * sqrt(a.spread_ms**2 / a.steps + b.spread_ms**2 / b.steps)
    return abs(b.ms - a.ms) > max(ERRORS * error, a.spread_ms, b.spread_ms, least_ns / 1e6)
