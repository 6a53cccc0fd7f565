"""Own time of each rank in each module, against the median over the ranks."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from distdbg.analyze.owntime import Times
from distdbg.analyze.straggler import WARM_UP
from distdbg.report.html import svg

MAX_ROWS = 40
LEFT, WIDTH, ROW = 250, 1120, 17
_BOUNDS = (0.5, 0.77, 0.91, 1.1, 1.3, 2.0)  # ratios between the seven colours
_SHOWN = ("less than half", "0.5 to 0.77", "0.77 to 0.91", "0.91 to 1.1", "1.1 to 1.3", "1.3 to 2", "more than twice")
NOTABLE = 0.005  # of a step


@dataclass
class _Row:
    name: str
    ms: np.ndarray  # by rank
    middle: float
    excess: float  # of the rank with the largest, ms a step


def render(times: dict[int, Times], verdict: dict[str, Any], modules: list[str]) -> str:
    """HTML, "" with one rank or without whole steps. ``modules``: their order in the model."""
    steps = _steps(times, verdict)
    if len(times) < 2 or len(steps) < 2:
        return ""
    rows = _rows(times, steps, modules)
    if not rows:
        return ""
    ranks = list(times)
    culprits = {c.get("rank") for c in verdict.get("culprits", [])}
    cell = max(3.0, min(60.0, (WIDTH - LEFT) / len(ranks)))
    picture = svg.picture(
        LEFT + cell * len(ranks) + 70,
        30 + ROW * len(rows) + 6,
        _cells(rows, ranks, culprits, cell),
        "own time, rank by module",
    )
    about = f"Medians over steps {steps[0]} to {steps[-1]}, waits taken out; own time against the median of the ranks."
    worst = _worst(rows, ranks, culprits)
    return (
        f'<p class="dim">{about}</p>{_legend()}{svg.scroll(picture, "heat map of ranks and modules", tall=True)}{worst}'
    )


def _steps(times: dict[int, Times], verdict: dict[str, Any]) -> list[int]:
    common: set[int] | None = None
    for one in times.values():
        common = set(one.own) if common is None else common & set(one.own)
    steps = sorted(common or ())[:-1]  # the last may not have ended
    first = WARM_UP
    if verdict.get("kind") == "straggler" and verdict["culprits"]:
        first = max(first, int(verdict["culprits"][0].get("step") or 0))
    return [s for s in steps if s >= first]


def _rows(times: dict[int, Times], steps: list[int], modules: list[str]) -> list[_Row]:
    names: dict[str, set[Any]] = {}
    for one in times.values():
        for step in steps:
            for key in one.own[step]:
                names.setdefault(key[2] or f"({key[0]})", set()).add(key)
    rows = []
    for name, keys in names.items():
        ms = np.array(
            [np.median([sum(one.own[s].get(key, 0) for key in keys) for s in steps]) / 1e6 for one in times.values()]
        )
        middle = float(np.median(ms))
        rows.append(_Row(name, ms, middle, float(np.max(np.abs(ms - middle)))))
    total = sum(row.middle for row in rows)
    rows = [row for row in rows if max(row.middle, row.excess) > 0.002 * total]
    rows = sorted(rows, key=lambda row: -row.excess)[:MAX_ROWS]
    order = {name: position for position, name in enumerate(modules)}
    return sorted(rows, key=lambda row: order.get(row.name, len(order)))


def _class(ms: float, middle: float, least: float) -> int:
    """The colour, from -3 to 3; 0 for a difference that no step would notice."""
    if abs(ms - middle) < least:
        return 0
    return sum(ms > bound * middle for bound in _BOUNDS) - 3


def _cells(rows: list[_Row], ranks: list[int], culprits: set[Any], cell: float) -> str:
    parts = []
    every = max(1, round(34 / cell))
    for column, rank in enumerate(ranks):
        bad = rank in culprits
        if bad or (
            column % every == 0 and not any(abs(column - ranks.index(c)) < every for c in culprits if c in ranks)
        ):
            parts.append(svg.label(LEFT + (column + 0.5) * cell, 18, rank, "bad" if bad else "dim", "middle"))
    shapes: dict[int, list[str]] = {}
    least = NOTABLE * sum(row.middle for row in rows)
    for number, row in enumerate(rows):
        y = 26 + number * ROW
        parts.append(svg.label(LEFT - 8, y + 12, svg.shorten(row.name, 36), "mono", "end"))
        parts.append(svg.label(LEFT + cell * len(ranks) + 6, y + 12, f"{row.middle:.2f} ms", "dim"))
        for column, ms in enumerate(row.ms.tolist()):
            kind = _class(ms, row.middle, least)
            x = LEFT + column * cell
            if len(ranks) <= 32 or abs(kind) >= 2:
                title = f"rank {ranks[column]}, {row.name}: {ms:.3f} ms a step, median {row.middle:.3f} ms"
                parts.append(svg.rect(x, y, cell - 0.5, ROW - 1, f"c{kind}", title))
            else:  # thousands of cells without a story of their own: one path a colour
                shapes.setdefault(kind, []).append(f"M{x:.1f} {y}h{cell - 0.5:.1f}v{ROW - 1}h-{cell - 0.5:.1f}z")
    paths = "".join(f'<path class="c{kind}" d="{"".join(found)}"/>' for kind, found in shapes.items())
    return paths + "".join(parts)


def _legend() -> str:
    items = (svg.swatch(f"c{number - 3}", shown) for number, shown in enumerate(_SHOWN))
    return f'<div class="legend">{"".join(items)}</div>'


def _worst(rows: list[_Row], ranks: list[int], culprits: set[Any]) -> str:
    """The largest excesses as a table: what the picture shows, for reading and by keyboard."""
    least = NOTABLE * sum(row.middle for row in rows)
    found = sorted(
        ((ms - row.middle, ranks[column], row, ms) for row in rows for column, ms in enumerate(row.ms.tolist())),
        key=lambda one: -one[0],
    )[:8]
    body = "".join(
        f"<tr{' class=bad' if rank in culprits else ''}><td>{rank}</td><td class=name>{svg.text(row.name)}</td>"
        f"<td class=number>{ms:.2f}</td><td class=number>{row.middle:.2f}</td><td class=number>{excess:+.2f}</td></tr>"
        for excess, rank, row, ms in found
        if excess > least
    )
    if not body:
        return ""
    names = ("ms a step", "median", "more")
    numbers = "".join(f"<th class=number>{name}</th>" for name in names)
    head = f"<tr><th>rank</th><th>module</th>{numbers}</tr>"
    return f"<details open><summary>the largest differences</summary><table>{head}{body}</table></details>"
