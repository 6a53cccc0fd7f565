"""Lanes of the last moments as text."""

from pathlib import Path

import pytest

from distdbg.analyze.facts import gather
from distdbg.analyze.lately import Bar, Window
from distdbg.analyze.read import read_run
from distdbg.analyze.verdict import diagnose_run
from distdbg.cli import main
from distdbg.report.lanes import WIDTH, lane, render
from distdbg.schema import EventKind as K
from tests.unit.report.test_html import stalled
from tests.unit.shards import job, train

WINDOW = Window(begin=0, end=100, fault=80, now=500)


def bar(begin: int, end: int, what: str, depth: int = 0, *, still: bool = False) -> Bar:
    return Bar(begin, end, what, what, "", 0, depth, 0, open=still)


def test_a_letter_says_what_took_most_of_its_time() -> None:
    """Ten columns of ten: forward, backward with a wait in it, the script's own code."""
    bars = [bar(0, 30, "forward"), bar(30, 80, "backward"), bar(60, 80, "finalizing", 1)]
    assert lane(bars, WINDOW, 10) == "fffbbb--.."


def test_a_culprit_stands_to_the_end() -> None:
    """What a culprit never left is marked; a victim's wait that never ended is a wait."""
    bars = [bar(0, 500, "backward", still=True), bar(50, 500, "node", 1, still=True)]
    assert lane(bars, WINDOW, 10, stands=True) == "##########"
    waits = [bar(0, 500, "backward", still=True), bar(50, 500, "finalizing", 1, still=True)]
    assert lane(waits, WINDOW, 10) == "bbbbb-----"


def test_a_stall_in_eighty_columns(run_dir: Path) -> None:
    """Each rank has a lane, the culprit's is marked, and no line is wider than 80 columns."""
    stalled(run_dir)
    run = read_run(run_dir)
    lines = render(gather(run), diagnose_run(run)).splitlines()
    assert max(map(len, lines)) <= WIDTH
    rows = [line for line in lines if "rank " in line]
    assert [line[:8] for line in rows] == ["  rank 0", "  rank 1", "> rank 2", "  rank 3"]
    assert rows[2].endswith("#####")
    assert rows[0].endswith("-----")
    assert "alike" in lines[0]


def test_where_an_exception_left(run_dir: Path) -> None:
    """The moment of the culprit's exception has a mark of its own."""
    ranks = job(run_dir, 2)
    train(ranks)
    ranks[1].backward("ExpBackward0", leave=False)
    error = ranks[1].writer.intern("error", "ValueError: bad", {"type": "ValueError", "where": "train.py:1 in f"})
    ranks[1].event(K.BACKWARD_RAISED, name=error, seq=3).event(K.EXCEPTION, name=error).event(K.EXIT, seq=1)
    run = read_run(run_dir)
    rows = [line for line in render(gather(run), diagnose_run(run)).splitlines() if "rank " in line]
    assert "!" not in rows[0]
    assert rows[1].count("!") == 1


def test_many_ranks_show_the_culprit(run_dir: Path) -> None:
    """With more ranks than fit the culprit is among those shown, and the rest is counted."""
    stalled(run_dir, world=40)
    run = read_run(run_dir)
    text = render(gather(run), {"kind": "stalled", "culprits": [{"rank": 39, "step": 4}]})
    assert "> rank 39" in text
    assert "and 24 more ranks" in text


def test_colour_changes_no_letter(run_dir: Path) -> None:
    """Without its escapes the coloured text is the plain one."""
    import re

    stalled(run_dir)
    run = read_run(run_dir)
    facts, verdict = gather(run), diagnose_run(run)
    coloured = render(facts, verdict, colour=True)
    assert "\x1b[1;31m#" in coloured
    plain = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", coloured).splitlines()]
    assert plain == render(facts, verdict).splitlines()


def test_the_command_draws_them_when_asked(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`diagnose --lanes` draws; without a terminal nothing is drawn; JSON stays JSON."""
    train(job(run_dir, 2))
    for options, drawn in ((["--lanes"], True), ([], False), (["--json", "--lanes"], False)):
        assert main(["diagnose", str(run_dir), *options]) == 0
        assert ("f forward" in capsys.readouterr().out) is drawn
