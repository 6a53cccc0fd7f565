"""Puts the report together: one HTML document, with no script, that fetches nothing."""

from datetime import datetime, timezone
from typing import Any

from distdbg import __version__
from distdbg.analyze.facts import Facts
from distdbg.analyze.owntime import own_times
from distdbg.report.html import graph, heat, lanes, steps, svg, tables, tree
from distdbg.report.html.style import STYLE

# Nothing is fetched and nothing runs, whatever names a run may hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render(facts: Facts, verdict: dict[str, Any]) -> str:
    """The report on a run as HTML."""
    times = {rank: own_times(view) for rank, view in facts.views.items()}
    modules = list(dict.fromkeys(n.text for v in facts.views.values() for n in v.names if n and n.category == "module"))
    heat_map = ("heat", "Own time of ranks in modules", "", heat.render(times, verdict, modules))
    sections = [
        ("lanes", "What the ranks did around the fault", "time in ms", lanes.render(facts, verdict)),
        ("waits", "Who waits for whom", "", graph.render(facts, verdict)),
        ("model", "The place in the model", "", tree.render(facts, verdict)),
        ("steps", "Steps", "", steps.render(times, verdict)),
        ("evidence", "Evidence", "", tables.sentences(verdict.get("evidence", []))),
        ("ruled-out", "Ruled out", "", tables.sentences(verdict.get("ruled_out", []))),
        ("ranks", "The ranks", "", svg.scroll(tables.ends(facts, verdict), "the ranks and their ends", tall=True)),
    ]
    # For a straggler the heat map is the picture to look at first.
    sections.insert(0 if verdict.get("kind") == "straggler" else 4, heat_map)
    shown = [section for section in sections if section[3]]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _, _ in shown)
    body = "".join(
        f'<section aria-labelledby="{key}"><h2 id="{key}">{title}<small>{note}</small></h2>{html}</section>'
        for key, title, note, html in shown
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>distdbg: {svg.text(verdict.get('summary', ''), 120)}</title><style>{STYLE}</style></head>\n"
        '<body><a class="skip" href="#content">to the verdict</a><main id="content">'
        f'<header>{tables.verdict(verdict)}</header><nav aria-label="sections">{links}</nav>\n{body}'
        f"<footer>{_origin(facts)}</footer></main></body></html>\n"
    )


def _origin(facts: Facts) -> str:
    moment = (
        datetime.fromtimestamp(facts.now / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC") if facts.now else ""
    )
    versions = next((v.shard.meta.get("versions") for v in facts.views.values()), None)
    torch = f", torch {versions.get('torch')}" if isinstance(versions, dict) else ""
    events = sum(len(view.records) for view in facts.views.values())
    return svg.text(
        f"{facts.run.path}, as of {moment}; {len(facts.views)} of {facts.world_size} ranks, {events:,} events{torch}; "
        f"distdbg {__version__}"
    )
