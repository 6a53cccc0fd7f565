"""The verdict in words, its culprits, the evidence, and how each rank ended."""

from typing import Any

from distdbg.analyze.facts import Facts
from distdbg.analyze.waits import names_of
from distdbg.report.html.svg import text

_FIELDS = (
    ("phase", "phase"), ("step", "step"), ("node", "node"), ("module", "module"), ("parameter", "parameter"),
    ("collective", "call"), ("group", "group"), ("error", "error"), ("signal", "signal"), ("source", "source"),
    ("since_s", "since (s)"), ("host", "host"), ("pid", "pid"),
)  # fmt: skip
MAX_CARDS = 8
_HOW = {
    "running": "alive",
    "left": "came to its end",
    "exception": "ended by an exception",
    "crashed": "crashed",
    "vanished": "gone without an end of its script",
    "stopped": "stopped (SIGSTOP)",
    "terminated": "ended by the launcher",
}


def verdict(found: dict[str, Any]) -> str:
    """Kind, the sentence, and a card for each culprit."""
    kind = str(found.get("kind", "unknown"))
    shown = kind if kind in ("healthy", "unknown") else ""
    parts = [
        f'<span class="kind {shown}">{text(kind)}</span> <span class=dim>sure: {text(found.get("confidence"))}</span>'
    ]
    parts.append(f"<h1>{text(found.get('summary', ''))}</h1>")
    culprits = found.get("culprits", [])
    parts.append('<div class="cards">' + "".join(_card(one) for one in culprits[:MAX_CARDS]) + "</div>")
    if len(culprits) > MAX_CARDS:
        rest = names_of(c["rank"] for c in culprits[MAX_CARDS:])
        parts.append(f"<p>The same is said of {text(rest)}.</p>")
    if found.get("cause"):
        parts.append(f"<p>Cause: {text(found['cause'])}.</p>")
    if found.get("missing_ranks"):
        parts.append(f"<p>Missing: no shard of {text(names_of(found['missing_ranks']))}.</p>")
    return "".join(parts)


def _card(culprit: dict[str, Any]) -> str:
    rows = [f"<dt>rank</dt><dd><strong>{text(culprit.get('rank'))}</strong></dd>"]
    for key, shown in _FIELDS:
        if culprit.get(key) is not None:
            rows.append(f"<dt>{shown}</dt><dd>{text(culprit[key])}</dd>")
    return f'<div class="card"><dl>{"".join(rows)}</dl></div>'


def sentences(found: list[str], limit: int = 40) -> str:
    """A list of sentences."""
    more = f"<li class=dim>and {len(found) - limit} more</li>" if len(found) > limit else ""
    return "<ul>" + "".join(f"<li>{text(one)}</li>" for one in found[:limit]) + more + "</ul>" if found else ""


def ends(facts: Facts, found: dict[str, Any]) -> str:
    """A row a rank: where it was, how it ended."""
    culprits = {c.get("rank") for c in found.get("culprits", [])}
    rows = []
    for rank in sorted({*facts.views, *facts.ends}):
        view, end = facts.views.get(rank), facts.ends.get(rank)
        how = _HOW.get(end.how, end.how) if end else "no end seen"
        if end and (end.signal or end.code):
            how += f" ({end.signal or f'exit code {end.code}'})"
        cells = ["", "", "no shard", "", ""]
        if view is not None:
            place = facts.at(rank, view.place.stack, view.place)
            inside = " ".join(str(part) for part in (place["phase"], place["node"], place["module"]) if part)
            quiet = (facts.now_of(rank) - view.last_t) / 1e9 if view.last_t else 0.0
            cells = [view.shard.host, str(view.shard.pid), str(view.step), inside, f"{quiet:.1f}"]
        row = "".join(f"<td>{text(cell, 300)}</td>" for cell in [rank, *cells, how])
        rows.append(f"<tr{' class=bad' if rank in culprits else ''}>{row}</tr>")
    head = "".join(f"<th>{one}</th>" for one in ("rank", "host", "pid", "step", "last in", "silent (s)", "end"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
