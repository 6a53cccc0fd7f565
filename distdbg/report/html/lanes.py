"""A lane per rank around the fault: what it did, when; what a culprit stands in, in red."""

from typing import Any

from distdbg.analyze.facts import Facts
from distdbg.analyze.lately import Bar, Window, bars_of, gone_at, raised_in, window_of
from distdbg.report.html import svg

WIDTH, LEFT = 1120, 86
MAX_FULL = 12  # lanes with all their depth; more ranks get one thin row each
ROW, THIN, GAP = 13, 8, 8
MAX_DEPTH = 5
_CLASS = {"collective": "wait", "wait": "wait", "setup": "wait", "finalizing": "wait"}
_LEGEND = (
    ("forward", "forward"), ("backward", "backward"), ("node", "a node of backward"), ("optimizer", "optimizer"),
    ("data", "data"), ("checkpoint", "checkpoint"), ("wait", "a call of torch.distributed, or waiting"),
    ("stands", "a culprit stands here, or raised here"),
)  # fmt: skip


def render(facts: Facts, verdict: dict[str, Any]) -> str:
    """HTML, "" where there is nothing to draw."""
    if not any(view.last_t for view in facts.views.values()):
        return ""
    window = window_of(facts, verdict)
    culprits = list(dict.fromkeys(c["rank"] for c in verdict.get("culprits", []) if c.get("rank") in facts.views))
    others = [rank for rank in facts.views if rank not in culprits]
    full = sorted([*culprits, *others][:MAX_FULL])
    if len(facts.views) > MAX_FULL:
        full = sorted([*culprits[: MAX_FULL - 2], *others[:2]])
    thin = [rank for rank in facts.views if rank not in full]
    stands = bool(facts.symptom)
    # Of each culprit the step in which it raised, where that is what it did.
    steps = {c["rank"]: c.get("step") if verdict["kind"] == "exception" else None for c in verdict.get("culprits", [])}
    parts = [legend(), svg.scroll(_lanes(facts, window, full, steps, thin=False), "lanes of ranks", tall=True)]
    if thin:
        rest = svg.scroll(_lanes(facts, window, thin, steps, thin=True), "lanes of the other ranks", tall=True)
        parts.append(f"<details open><summary>{len(thin)} more ranks, a thin row each</summary>{rest}</details>")
    after = window.now - window.end
    if stands and after > 100_000_000:
        parts.append(f'<p class="dim">Nothing changed in the {after / 1e9:.1f} s after that.</p>')
    return "".join(parts)


def legend() -> str:
    items = (svg.swatch(name, shown) for name, shown in _LEGEND)
    return f'<div class="legend">{"".join(items)}</div>'


def _lanes(facts: Facts, window: Window, ranks: list[int], culprits: dict[int, int | None], *, thin: bool) -> str:
    parts: list[str] = []
    y = 20.0
    for rank in ranks:
        gone = gone_at(facts, rank)
        bars = bars_of(facts.views[rank], window, gone)
        depth = 0 if thin else min(MAX_DEPTH, max((bar.depth for bar in bars), default=0))
        bad = rank in culprits
        height = THIN if thin else (depth + 1) * ROW
        if not thin or rank % 8 == 0 or bad:
            parts.append(svg.label(4, y + (THIN if thin else ROW) - 2, f"rank {rank}", "bad" if bad else "dim"))
        parts.append(svg.rect(LEFT, y, WIDTH - LEFT, height, "idle"))
        red = _red(bars, culprits[rank]) if bad and facts.symptom else []
        parts += _bars(bars, window, y, depth, red, thin=thin)
        if not thin:
            parts += _end(facts, rank, window, y, height, gone, [bar for bar in red if bar.raised])
        y += height + (1 if thin else GAP)
    return svg.picture(WIDTH + 8, y + 4, _axis(window, y) + "".join(parts), "what each rank did around the fault")


def _red(bars: list[Bar], step: int | None) -> list[Bar]:
    """Of a culprit's bars those it stands in, or that its exception left."""
    return [bar for bar in bars if bar.open and not bar.waits] or (raised_in(bars, step) if step is not None else [])


def _end(facts: Facts, rank: int, window: Window, y: float, height: float, gone: int, raised: list[Bar]) -> list[str]:
    """A mark where a rank raised, and where its process was gone."""
    parts = []
    if raised:
        x = _x(raised[-1].end, window)
        parts.append(svg.label(x + 5, y + (raised[-1].depth + 1) * ROW - 3, f"raised in {raised[-1].name}", "bad"))
    if gone and gone < window.end:
        x, end = _x(gone, window), facts.ends[rank]
        parts.append(svg.line(x, y, x, y + height, "gone"))
        if not raised:
            shown, room = f"gone: {end.signal or end.how}", x < WIDTH - 130
            label = (x + 4, "dim", "start") if room else (x - 4, "inside", "end")
            parts.append(svg.label(label[0], y + ROW - 3, shown, label[1], label[2]))
    return parts


def _x(t: int, window: Window) -> float:
    share = (t - window.begin) / max(1, window.end - window.begin)
    return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT)


def _axis(window: Window, bottom: float) -> str:
    span_ms = (window.end - window.begin) / 1e6
    unit = next(
        (u for u in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4) if span_ms / u <= 12), 6e4
    )
    parts = []
    first = -int((window.fault - window.begin) / 1e6 / unit)
    for tick in range(first, int((window.end - window.fault) / 1e6 / unit) + 1):
        x = _x(window.fault + int(tick * unit * 1e6), window)
        parts.append(svg.line(x, 16, x, bottom, "fault" if tick == 0 else "axis"))
        shown = "0 ms" if tick == 0 else f"{tick * unit:+g}"
        parts.append(svg.label(min(x, WIDTH - 14), 12, shown, "dim", "middle"))
    return "".join(parts)


def _bars(bars: list[Bar], window: Window, y: float, depth: int, bad: list[Bar], *, thin: bool) -> list[str]:
    parts: list[str] = []
    drawn: dict[int, float] = {}  # by row, how far to the right it is drawn: what is narrower than a pixel is left out
    for bar in bars:
        row = min(bar.depth, depth)
        left, right = _x(bar.begin, window), _x(bar.end, window)
        red = any(bar is one for one in bad)
        if thin and bar.depth > 0 and not (bar.waits or red):
            continue
        seen = left if thin and bar.depth else max(left, drawn.get(row, 0.0))
        if not red and right - seen < 0.7:
            continue
        drawn[row] = max(drawn.get(row, 0.0), right)
        kind = "stands" if red else _CLASS.get(bar.what, bar.what)
        top, height = (y, THIN) if thin else (y + row * ROW, ROW - 1)
        parts.append(
            svg.rect(
                left, top, max(right - left, 2.5) if red else right - left, height, kind, "" if thin else _title(bar)
            )
        )
        if not thin and right - left > 60:
            room = int((right - left) / 6.2)
            parts.append(svg.label(left + 3, top + 9.5, svg.shorten(bar.name, room), "inside"))
    return parts


def _title(bar: Bar) -> str:
    module = f" of {bar.module}" if bar.module and bar.what == "node" else ""
    length = f"{(bar.end - bar.begin) / 1e6:.3f} ms"
    return f"{bar.what} {bar.name}{module}, step {bar.step}: " + (f"never left, for {length}" if bar.open else length)
