"""The verdict as a tired person reads it in a terminal: one sentence, the place, who waits, where the files are."""

import re
import textwrap
from pathlib import Path
from typing import Any

WIDTH = 110
_LABEL = 9
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a message must not colour, clear or retitle the terminal


def render(verdict: dict[str, Any], run_dir: str | Path | None = None) -> str:
    """The verdict as plain text, without a final newline."""
    lines = ["distdbg: " + _CONTROL.sub("?", verdict["summary"])]
    for culprit in verdict.get("culprits", [])[:4]:
        if len(verdict["culprits"]) > 1:
            lines += _row("rank", str(culprit["rank"]))
        lines += _culprit(culprit)
    if len(verdict.get("culprits", [])) > 4:
        lines += _row("", f"and {len(verdict['culprits']) - 4} more ranks (verdict.json has them)")
    lines += _others(verdict.get("victims", []))
    if verdict["kind"] not in ("healthy",):
        for sentence in verdict.get("evidence", [])[:5]:
            lines += _row("evidence", sentence)
        sure = f"{verdict['confidence']:.2f}"
        ruled = "; ".join(verdict.get("ruled_out", []))
        lines += _row("sure", f"{sure} (ruled out: {ruled})" if ruled else sure)
    else:
        for sentence in verdict.get("evidence", [])[:5]:
            lines += _row("note", sentence)
    if verdict.get("missing_ranks"):
        lines += _row("missing", f"no shard of {ranks_text(verdict['missing_ranks'])}")
    if run_dir is not None and verdict["kind"] != "healthy":
        lines += _row("files", f"{run_dir}: verdict.json timeline.csv")
    return "\n".join(lines)


def ranks_text(ranks: list[int]) -> str:
    """ "rank 3", "ranks 0, 1 and 5 more"."""
    shown = ", ".join(map(str, ranks[:20]))
    more = f" and {len(ranks) - 20} more" if len(ranks) > 20 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _row(label: str, text: str) -> list[str]:
    first = f"  {label:<{_LABEL}}"
    text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first)) or [first.rstrip()]


def _culprit(culprit: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if culprit.get("phase"):
        step = f" of step {culprit['step']}" if culprit["step"] is not None else ""
        lines += _row("phase", culprit["phase"] + step)
    if culprit.get("node"):
        lines += _row("node", culprit["node"] + _position(culprit))
    place = ", ".join(part for part in (culprit.get("module"), culprit.get("source")) if part)
    if place:
        lines += _row("module" if culprit.get("module") else "source", place)
    if culprit.get("parameter"):
        lines += _row("param", culprit["parameter"])
    if culprit.get("error"):
        lines += _row("error", culprit["error"])
    if culprit.get("signal"):
        lines += _row("signal", culprit["signal"])
    if culprit.get("collective"):
        group = f" of {culprit['group']}" if culprit.get("group") else ""
        lines += _row("call", f"{culprit['collective']}{group}")
    return lines


def _position(culprit: dict[str, Any]) -> str:
    count = culprit.get("node_count")
    return f", number {culprit['node_index'] + 1} of {count}" if count else ""


def _others(victims: list[dict[str, Any]]) -> list[str]:
    """Victims that wait in the same for the same, in one row."""
    rows: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for victim in victims:
        rows.setdefault((victim["in"], tuple(victim["waits_for"])), []).append(victim["rank"])
    lines: list[str] = []
    for (where, on), ranks in list(rows.items())[:6]:
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:12]))}"
        who += f" and {len(ranks) - 12} more" if len(ranks) > 12 else ""
        waits = f" for rank{'s' if len(on) > 1 else ''} {', '.join(map(str, on[:8]))}" if on else ""
        verb = "only waited" if len(ranks) > 1 else "waited"
        lines += _row("others", f"{who} {verb}{waits}: {where}")
    return lines
