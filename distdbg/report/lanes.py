"""Lanes of the last seconds for a terminal: a row per rank, a letter per moment, 80 columns."""

from typing import Any

from distdbg.analyze.facts import Facts
from distdbg.analyze.lately import Bar, Window, bars_of, gone_at, raised_in, window_of

WIDTH = 80
MAX_RANKS = 16
_LETTERS = {
    "forward": "f", "backward": "b", "node": "b", "optimizer": "o", "data": "d", "checkpoint": "c",
    "collective": "-", "wait": "-", "setup": "-", "finalizing": "-",
}  # fmt: skip
_COLOURS = {"f": "34", "b": "35", "o": "32", "d": "36", "c": "33", "-": "2", "#": "1;31", "!": "1;31"}
LEGEND = (
    "f forward  b backward  o optimizer  d data  c checkpoint  . the script itself",
    "- waits  # stands there  ! raised there  x gone",
)


def render(facts: Facts, verdict: dict[str, Any], *, colour: bool = False) -> str:
    """The lanes as text of at most 80 columns, without a final newline; "" where no rank did anything."""
    if not any(view.last_t for view in facts.views.values()):
        return ""
    window = window_of(facts, verdict)
    culprits = [c["rank"] for c in verdict.get("culprits", []) if c.get("rank") in facts.views]
    steps = {c["rank"]: c.get("step") for c in verdict.get("culprits", []) if verdict.get("kind") == "exception"}
    first = list(dict.fromkeys(culprits))
    ranks = [*first, *(rank for rank in facts.views if rank not in first)]
    shown = sorted(ranks[:MAX_RANKS])
    gutter = max(len(f"rank {rank}") for rank in shown) + 3
    width = WIDTH - gutter - 1
    lines = [_axis(window, gutter, width, stands=bool(facts.symptom))]
    for rank in shown:
        gone = gone_at(facts, rank)
        bars = bars_of(facts.views[rank], window, gone)
        row = lane(bars, window, width, stands=rank in culprits)
        if gone and gone < window.end:
            cut = max(0, _column(gone, window, width))
            row = row[:cut] + "x" + " " * (width - cut - 1)
        raised = raised_in(bars, steps[rank]) if rank in steps else []
        if raised:
            at = min(width - 2, max(0, _column(raised[0].end, window, width)))
            row = row[:at] + ("!x" if row[at] == "x" else "!" + row[at + 1]) + row[at + 2 :]
        mark = ">" if rank in culprits else " "
        lines.append(f"{mark} {f'rank {rank}':<{gutter - 3}} " + (_coloured(row) if colour else row))
    if len(ranks) > len(shown):
        lines.append(f"  and {len(ranks) - len(shown)} more ranks (`distdbg report` draws them all)")
    lines += [f"  {line}" for line in LEGEND]
    return "\n".join(line.rstrip() for line in lines)


def _axis(window: Window, gutter: int, width: int, *, stands: bool) -> str:
    """Times at both ends, relative to the fault, and a mark above it."""
    left = f"{(window.begin - window.fault) / 1e6:+.0f} ms"
    right = f"{(window.end - window.fault) / 1e6:+.0f} ms"
    if stands and window.now - window.end > 1_000_000:
        right += f" (until {(window.now - window.fault) / 1e9:+.1f} s alike)"
    at = min(max(_column(window.fault, window, width), 0), width - 1)
    row = list(" " * width)
    row[: len(left)] = left
    row[width - len(right) :] = right
    if all(c == " " for c in row[max(0, at - 1) : at + 2]):
        row[at] = "v"
    return " " * gutter + "".join(row)


def _column(t: int, window: Window, width: int) -> int:
    return (t - window.begin) * width // max(1, window.end - window.begin)


def lane(bars: list[Bar], window: Window, width: int, *, stands: bool = False) -> str:
    """One letter a column: what took most of its time; "#": a culprit stands, ".": the script's own code."""
    scale = width / max(1, window.end - window.begin)
    share: list[dict[str, float]] = [{} for _ in range(width)]
    for bar in bars:
        letter = _LETTERS.get(bar.what)
        if letter is None:
            continue
        if stands and bar.open and not bar.waits:
            letter = "#"
        left = max(0.0, (bar.begin - window.begin) * scale)
        right = min(float(width), (bar.end - window.begin) * scale)
        for column in range(int(left), min(width, int(right) + 1)):
            covered = min(right, column + 1) - max(left, column)
            if covered > 0:
                cell = share[column]
                # What is inside takes over from what is around it; bars come outermost first.
                for other in cell:
                    cell[other] = max(0.0, cell[other] - covered)
                cell[letter] = cell.get(letter, 0.0) + covered
    return "".join(_letter(cell) for cell in share)


def _letter(cell: dict[str, float]) -> str:
    if not cell or sum(cell.values()) < 0.5:
        return "."
    return max(cell, key=lambda letter: cell[letter])


def _coloured(row: str) -> str:
    parts, previous = [], ""
    for letter in row:
        if letter != previous:
            parts.append("\x1b[0m" if previous in _COLOURS else "")
            parts.append(f"\x1b[{_COLOURS[letter]}m" if letter in _COLOURS else "")
            previous = letter
        parts.append(letter)
    return "".join(parts) + ("\x1b[0m" if previous in _COLOURS else "")
