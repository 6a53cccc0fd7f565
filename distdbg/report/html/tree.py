"""The place in the model: the tree of modules with the ranks that stand in each."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from distdbg.analyze.facts import Facts
from distdbg.analyze.waits import names_of
from distdbg.report.html.svg import text

MAX_CHILDREN = 60


@dataclass
class _Node:
    name: str
    path: str
    class_name: str = ""
    children: dict[str, "_Node"] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)
    busy: bool = False  # a rank stands here or below


def positions(facts: Facts, verdict: dict[str, Any]) -> dict[int, str | None]:
    """By rank, the module it stands in (culprits: as the verdict says), None where it is in none."""
    found: dict[int, str | None] = {}
    for rank, view in facts.views.items():
        place = facts.at(rank, view.place.stack, view.place) if view.place.stack else {}
        found[rank] = place.get("module")
    for culprit in verdict.get("culprits", []):
        if culprit.get("rank") in found:
            found[culprit["rank"]] = culprit.get("module")
    return found


def render(facts: Facts, verdict: dict[str, Any]) -> str:
    """HTML, "" where no rank told of a module."""
    root = _Node("model", "")
    for path, class_name in sorted(_modules(facts).items()):
        _add(root, path, class_name)
    if not root.children:
        return ""
    outside: list[int] = []
    for rank, module in positions(facts, verdict).items():
        if module is None:
            outside.append(rank)
        else:
            _add(root, module, "").ranks.append(rank)
    _mark(root)
    culprits = {c.get("rank") for c in verdict.get("culprits", [])}
    around = ""
    if outside:
        chips = [
            _chip([r for r in outside if r in culprits], True),
            _chip([r for r in outside if r not in culprits], False),
        ]
        around = f'<p class="dim">In no module (between them, waiting, or ended): {"".join(chips)}</p>'
    return f'<div class="tree"><ul>{_item(root, culprits)}</ul></div>{around}'


def _modules(facts: Facts) -> dict[str, str]:
    found: dict[str, str] = {}
    for view in facts.views.values():
        for name in view.names:
            if name is not None and name.category == "module":
                found.setdefault(name.text, str((name.extra or {}).get("class", "")))
    return found


def _add(root: _Node, path: str, class_name: str) -> _Node:
    node = root
    for part in path.split(".") if path else []:
        deeper = f"{node.path}.{part}" if node.path else part
        node = node.children.setdefault(part, _Node(part, deeper))
    node.class_name = node.class_name or class_name
    return node


def _mark(node: _Node) -> bool:
    below = [_mark(child) for child in node.children.values()]
    node.busy = bool(node.ranks) or any(below)
    return node.busy


def _order(node: _Node) -> tuple[bool, int, str]:
    return (not node.name.isdigit(), int(node.name) if node.name.isdigit() and len(node.name) < 9 else 0, node.name)


def _chip(ranks: Iterable[int], bad: bool) -> str:
    found = list(ranks)
    return f'<span class="chip{" bad" if bad else ""}">{text(names_of(found))}</span>' if found else ""


def _item(node: _Node, culprits: set[Any]) -> str:
    head = f"{text(node.name, 200)} <span class=dim>{text(node.class_name, 100)}</span>"
    head += _chip((r for r in node.ranks if r in culprits), True)
    head += _chip((r for r in node.ranks if r not in culprits), False)
    if not node.children:
        return f"<li>{head}</li>"
    children = sorted(node.children.values(), key=_order)
    # The busy ones are never left out.
    shown = [child for position, child in enumerate(children) if child.busy or position < MAX_CHILDREN]
    inner = "".join(_item(child, culprits) for child in shown)
    if len(shown) < len(children):
        inner += f"<li class=dim>and {len(children) - len(shown)} more</li>"
    opened = " open" if node.busy or not node.path else ""
    return f"<li><details{opened}><summary>{head}</summary><ul>{inner}</ul></details></li>"
