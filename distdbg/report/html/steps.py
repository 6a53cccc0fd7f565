"""How long the steps took: the median over the ranks, its spread, and a culprit's own work in them."""

from typing import Any

import numpy as np

from distdbg.analyze.owntime import Times
from distdbg.analyze.straggler import WARM_UP
from distdbg.report.html import svg

WIDTH, HEIGHT, LEFT, BOTTOM = 1120, 210, 60, 26
MAX_POINTS = 500


def render(times: dict[int, Times], verdict: dict[str, Any]) -> str:
    """HTML, "" with fewer than two steps after warm-up."""
    steps = sorted({step for one in times.values() for step in one.own})[:-1]
    if len(steps) < WARM_UP + 2:
        return ""
    stride = -(-len(steps) // MAX_POINTS)
    steps = steps[::stride]
    length = _by_rank(times, steps, waits=True)
    own = _by_rank(times, steps, waits=False)
    culprits = [c["rank"] for c in verdict.get("culprits", []) if c.get("rank") in times]
    late = list(times).index(culprits[0]) if culprits and verdict.get("kind") == "straggler" else None
    # The first steps are often many times longer than the rest; they run out of the picture, lest they flatten it.
    top = float(np.nanmax(np.nanpercentile(length[:, WARM_UP:], 90, axis=0))) * 1.25 or 1.0

    def points(values: np.ndarray) -> list[tuple[float, float]]:
        return [
            (_x(position, len(steps)), _y(float(value), top))
            for position, value in enumerate(values)
            if np.isfinite(value)
        ]

    middle = np.nanmedian(length, axis=0)
    band = points(np.nanmax(length, axis=0)) + points(np.nanmin(length, axis=0))[::-1]
    parts = [_axes(steps, top), svg.path(band, "band", close=True), svg.path(points(middle), "median")]
    parts.append(svg.path(points(np.nanmedian(own, axis=0)), "own"))
    if late is not None:
        parts.append(svg.path(points(own[late]), "late"))
        begun = int(verdict["culprits"][0].get("step") or 0)
        if begun in steps:
            x = _x(steps.index(begun), len(steps))
            parts.append(svg.line(x, 6, x, HEIGHT - BOTTOM, "fault"))
    picture = svg.picture(WIDTH + 10, HEIGHT, "".join(parts), "time of each step in ms")
    return _legend(culprits[0] if late is not None else None) + svg.scroll(picture, "steps over time")


def _by_rank(times: dict[int, Times], steps: list[int], *, waits: bool) -> np.ndarray:
    """ms, shape (ranks, steps); nan where a rank has no such step."""
    rows = [
        [(t.total(s) + (t.waiting.get(s, 0) if waits else 0)) / 1e6 if s in t.own else np.nan for s in steps]
        for t in times.values()
    ]
    return np.array(rows, dtype=float)


def _x(position: int, count: int) -> float:
    return LEFT + position / max(1, count - 1) * (WIDTH - LEFT - 10)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - min(1.0, value / top) * (HEIGHT - BOTTOM - 10)


def _axes(steps: list[int], top: float) -> str:
    unit = next(
        (u for u in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4) if top / u <= 6), 6e4
    )
    parts = []
    for tick in range(int(top / unit) + 1):
        y = _y(tick * unit, top)
        parts.append(svg.line(LEFT, y, WIDTH, y, "axis"))
        parts.append(svg.label(LEFT - 6, y + 4, f"{tick * unit:g} ms", "dim", "end"))
    every = max(1, len(steps) // 12)
    for position in range(0, len(steps), every):
        parts.append(svg.label(_x(position, len(steps)), HEIGHT - 8, steps[position], "dim", "middle"))
    return "".join(parts)


def _legend(late: int | None) -> str:
    items = [
        "blue line: a step, median over the ranks (band: least to most)",
        "green, dashed: own work, median over the ranks",
    ]
    if late is not None:
        items.append(f"red: own work of rank {late}; the dashed line is where it begins to be late")
    return f'<div class="legend">{"".join(f"<span>{svg.text(item)}</span>" for item in items)}</div>'
