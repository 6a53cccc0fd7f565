"""What got slower between two runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic import write_run
from distdbg.analyze.compare import compare
from distdbg.cli import main
from distdbg.errors import RunDirError


def run(path: Path, **options: Any) -> Path:
    write_run(path, **{"ranks": 4, "steps": 24, "layers": 3, **options})
    return path


def test_the_same_twice(tmp_path: Path) -> None:
    """Two runs that differ only by chance differ by nothing, whatever the chance was."""
    before = run(tmp_path / "a")
    for seed in range(1, 6):
        found = compare(before, run(tmp_path / f"b{seed}", seed=seed))
        assert found.found == []
        assert found.summary.startswith("no difference beyond the noise")


def test_one_kind_of_module_got_slower(tmp_path: Path) -> None:
    """All mlps 20 % slower: they and the phases they are in are named, nothing else is."""
    found = compare(run(tmp_path / "a"), run(tmp_path / "b", slower=1.2, seed=1))
    places = {(row.phase, row.module) for row in found.found if row.what == "place"}
    assert places == {(phase, f"blocks.{i}.mlp") for i in range(3) for phase in ("forward", "backward")}
    for row in found.found:
        if row.what == "place":
            assert row.ms / row.a.ms == pytest.approx(0.2, abs=0.03)
    assert {row.phase for row in found.found if row.what == "phase"} == {"forward", "backward"}
    assert "longer" in found.summary
    assert "most in backward" in found.summary


def test_it_got_faster(tmp_path: Path) -> None:
    """The other way round the same places are faster."""
    found = compare(run(tmp_path / "a", slower=1.2), run(tmp_path / "b"))
    assert "shorter" in found.summary
    assert all(row.ms < 0 for row in found.found if row.what != "waiting")


def test_one_rank_alone_got_slower(tmp_path: Path) -> None:
    """A rank that is slower while the median over ranks is not is named, with its module and by how much."""
    found = compare(run(tmp_path / "a"), run(tmp_path / "b", straggler=2, at_step=0, delay_ms=10, seed=1))
    place = next(row for row in found.found if row.what == "place")
    assert (place.module, place.ranks) == ("blocks.2.mlp", (2,))
    assert place.ms == pytest.approx(10, rel=0.1)
    assert next(row for row in found.found if row.what == "waiting").ms == pytest.approx(9, rel=0.2)
    assert "on rank 2 alone" in found.summary


def test_too_short_a_run_is_refused(tmp_path: Path) -> None:
    """With too few steps nothing is said; the message tells how many are needed."""
    with pytest.raises(RunDirError, match="comparing needs 8"):
        compare(run(tmp_path / "a"), run(tmp_path / "b", steps=5))


def test_other_numbers_of_ranks_are_noted(tmp_path: Path) -> None:
    """Runs of different sizes are compared with a note."""
    assert "4 and 2 ranks" in compare(run(tmp_path / "a"), run(tmp_path / "b", ranks=2)).notes[0]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text of at most 120 columns for people, JSON with every row for programs."""
    a, b = run(tmp_path / "a"), run(tmp_path / "b", slower=1.3, seed=1)
    assert main(["compare", str(a), str(b)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("distdbg: a step takes")
    assert max(map(len, lines[1:])) <= 120
    assert main(["compare", str(a), str(b), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "distdbg.compare/1"
    assert {"step", "waiting", "phase", "place"} == {row["what"] for row in found["rows"]}
