"""The verdict as text."""

from pathlib import Path
from typing import Any

from distdbg.report.terminal import WIDTH, render


def verdict(**about: Any) -> dict[str, Any]:
    culprit = {
        "rank": 2, "phase": "backward", "node": "AddBackward0", "module": "blocks.1", "parameter": None, "step": 3,
        "collective": None, "group": None, "error": "ValueError: x", "signal": None, "source": "train.py:9",
    }  # fmt: skip
    return {
        "kind": "exception", "summary": "rank 2 failed", "culprits": [culprit], "victims": [], "evidence": ["it did"],
        "ruled_out": ["that"], "confidence": 0.9, "missing_ranks": [], **about,
    }  # fmt: skip


def test_one_sentence_then_the_place() -> None:
    """The sentence comes first, then where, then the rest; the files last."""
    lines = render(verdict(), Path("runs/x")).splitlines()
    assert lines[0] == "distdbg: rank 2 failed"
    assert [line.split()[0] for line in lines[1:]] == ["phase", "node", "module", "error", "evidence", "sure", "files"]


def test_victims_of_one_kind_share_a_row() -> None:
    """A thousand ranks that wait in the same take one row."""
    victims = [{"rank": r, "waits_for": [2], "in": "all_reduce #7 of world"} for r in range(3, 1000)]
    text = render(verdict(victims=victims))
    assert text.count("others") == 1
    assert "and 985 more only waited for rank 2" in text


def test_long_texts_wrap() -> None:
    """No line but the summary is wider than the width."""
    text = render(verdict(evidence=["word " * 100]))
    assert max(map(len, text.splitlines()[1:])) <= WIDTH


def test_many_culprits_are_counted() -> None:
    """The first few are shown, the rest counted."""
    one = verdict()["culprits"][0]
    text = render(verdict(culprits=[{**one, "rank": r} for r in range(9)]))
    assert "and 5 more ranks" in text


def test_healthy_is_one_line() -> None:
    """A healthy run needs no more than a line."""
    text = render({**verdict(culprits=[], evidence=[]), "kind": "healthy", "summary": "nothing wrong"}, Path("x"))
    assert text == "distdbg: nothing wrong"
