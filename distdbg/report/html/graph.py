"""Who waits for whom: ranks that wait alike in one box, arrows to those they wait for."""

import re
from dataclasses import dataclass
from typing import Any

from distdbg.analyze.facts import Facts
from distdbg.analyze.waits import names_of
from distdbg.report.html import svg

BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y = 300, 62, 90, 18
MAX_BOXES = 24


@dataclass
class _Box:
    ranks: list[int]
    on: tuple[int, ...]
    where: str
    bad: bool
    level: int = 0
    x: float = 0
    y: float = 0


def render(facts: Facts, verdict: dict[str, Any]) -> str:
    """HTML, "" where nobody waits."""
    boxes = _boxes(facts, verdict)
    if not any(box.on for box in boxes):
        return ""
    left_out = boxes[MAX_BOXES:]
    boxes = boxes[:MAX_BOXES]
    _levels(boxes)
    width, height = _place(boxes)
    arrows = "".join(_arrow(box, other) for box in boxes for other in boxes if other is not box and _waits(box, other))
    shapes = "".join(_shape(box) for box in boxes)
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 Z"/></marker></defs>'
    )
    picture = svg.scroll(svg.picture(width, height, head + arrows + shapes, "who waits for whom"), "who waits for whom")
    lines = "".join(f"<li>{svg.text(_sentence(box), 600)}</li>" for box in [*boxes, *left_out] if box.on)
    return f"{picture}<details><summary>in words</summary><ul>{lines}</ul></details>"


def _boxes(facts: Facts, verdict: dict[str, Any]) -> list[_Box]:
    culprits = verdict.get("culprits", [])
    named = {c.get("rank") for c in culprits}
    boxes: dict[tuple[Any, ...], _Box] = {}
    for culprit in culprits:
        place = culprit.get("node") or culprit.get("module") or culprit.get("collective") or ""
        where = " ".join(part for part in (culprit.get("phase"), place) if part)
        blocked = facts.blocked.get(int(culprit["rank"]))  # in a deadlock a culprit waits, too
        on = blocked.on if blocked is not None else ()
        boxes.setdefault((True, on, where), _Box([], on, where, True)).ranks.append(int(culprit["rank"]))
    for victim in verdict.get("victims", []):
        on, where = tuple(victim.get("waits_for", ())), str(victim.get("in", ""))
        boxes.setdefault((False, on, where), _Box([], on, where, False)).ranks.append(int(victim["rank"]))
    there = {rank for box in boxes.values() for rank in box.ranks}
    for rank in sorted({rank for box in boxes.values() for rank in box.on} - there - named)[:8]:
        boxes[(False, rank)] = _Box([rank], (), "no shard, or gone", False)
    return list(boxes.values())


def _waits(box: _Box, other: _Box) -> bool:
    return any(rank in box.on for rank in other.ranks)


def _levels(boxes: list[_Box]) -> None:
    """Column by the longest way to a box that waits for nobody; a cycle ends after as many rounds as boxes."""
    for _ in boxes:
        changed = False
        for box in boxes:
            deeper = max((other.level + 1 for other in boxes if other is not box and _waits(box, other)), default=0)
            if deeper > box.level and deeper < len(boxes):
                box.level, changed = deeper, True
        if not changed:
            return


def _place(boxes: list[_Box]) -> tuple[float, float]:
    used = sorted({box.level for box in boxes}, reverse=True)  # the root at the right
    for column, level in enumerate(used):
        here = [box for box in boxes if box.level == level]
        for row, box in enumerate(here):
            box.x, box.y = 6 + column * (BOX_WIDTH + GAP_X), 8 + row * (BOX_HEIGHT + GAP_Y)
    return max(b.x for b in boxes) + BOX_WIDTH + 8, max(b.y for b in boxes) + BOX_HEIGHT + 8


def _arrow(box: _Box, other: _Box) -> str:
    x1, y1, x2, y2 = box.x + BOX_WIDTH, box.y + BOX_HEIGHT / 2, other.x - 3, other.y + BOX_HEIGHT / 2
    if other.x <= box.x:  # a cycle: back over the top
        x1, x2 = box.x, other.x + BOX_WIDTH + 3
    bend = (x2 - x1) / 2
    curve = f"C{x1 + bend:.0f} {y1:.0f} {x2 - bend:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"
    return f'<path class="arrow" d="M{x1:.0f} {y1:.0f} {curve}"/>'


def _shape(box: _Box) -> str:
    class_ = "box bad" if box.bad else "box"
    who = svg.shorten(names_of(box.ranks), 40)
    shape = (
        f'<rect class="{class_}" x="{box.x:.0f}" y="{box.y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5">'
        f"<title>{svg.text(_sentence(box), 400)}</title></rect>"
    )
    split = re.match(r"(.*? of [^,]+), (.*)", box.where)
    head, rest = split.groups() if split else (box.where, "")
    lines = svg.label(box.x + 10, box.y + 20, who, "bad" if box.bad else "")
    lines += svg.label(box.x + 10, box.y + 37, _cut(head, 44), "mono")
    return shape + lines + svg.label(box.x + 10, box.y + 53, _cut(rest, 46), "dim")


def _cut(shown: str, limit: int) -> str:
    return shown if len(shown) <= limit else shown[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _sentence(box: _Box) -> str:
    waits = f" for {names_of(box.on)}" if box.on else ""
    verb = "waits" if len(box.ranks) == 1 else "wait"
    return f"{names_of(box.ranks)} {verb}{waits}: {box.where}" if box.on else f"{names_of(box.ranks)}: {box.where}"
