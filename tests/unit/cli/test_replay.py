"""`distdbg replay`, as a person and as a script see it."""

import json
from pathlib import Path

import pytest
import torch

from distdbg.cli import main
from tests.unit.replay import bundles


def test_prints_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Node, module, error, tensors, both outcomes, and the other ranks' bundles beside it."""
    grad = torch.tensor([1.0, float("nan")])
    path = bundles.write(tmp_path, [grad], saved={"result": torch.ones(2)}, error=dict(bundles.ERROR), context={"k": 3})
    bundles.write(tmp_path, [torch.ones(2)], rank=1)
    assert main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    for text in (
        "rank0-step3-ExpBackward0.bundle: rank 0, step 3, failure",
        "node      ExpBackward0, number 1",
        "error     ValueError: level must be positive",
        "received  0: float32[2], 1 NaN, 0 infinite",
        "context   k: 3",
        "then      ExpBackward0 was not run again: a test",
        "here      ran, and did not fail",
        "ranks 0, 1 compared",
        "the incoming gradient is not finite on rank 0, finite on rank 1",
    ):
        assert text in out


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json gives the bundle, what came of the replay here, and the differences between ranks."""
    paths = [
        str(bundles.write(tmp_path, [torch.ones(size)], rank=rank, saved={"result": torch.ones(size)}))
        for rank, size in enumerate((2, 3))
    ]
    assert main(["replay", "--json", *paths]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [bundle["here"]["ran"] for bundle in found["bundles"]] == [True, True]
    assert found["bundles"][1]["rank"] == 1
    assert found["differences"] == ["the incoming gradient is [2] on rank 0, [3] on rank 1"]


def test_json_stays_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the user's code prints while it is imported goes to stderr."""
    source = tmp_path / "train.py"
    source.write_text("import torch\nprint('hello')\nclass F(torch.autograd.Function):\n    pass\n")
    function = {"module": "__main__", "qualname": "F", "file": "train.py", "line": 3}
    path = bundles.write(tmp_path, [torch.ones(1)], function=function, needs_input_grad=[True])
    assert main(["replay", "--json", str(path), "--source", str(source)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["bundles"][0]["here"]["ran"]
    assert "hello" in captured.err


def test_names_from_a_file_are_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters in a bundle do not reach the terminal."""
    path = bundles.write(tmp_path, [torch.ones(1)], outcome="\x1b]0;owned\x07\r")
    assert main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07\\x0d" in out
    assert "\x1b" not in out


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing bundle ends with 2 and one line; --pdb asks for --source."""
    assert main(["replay", str(tmp_path / "none.bundle")]) == 2
    assert capsys.readouterr().err.startswith("distdbg: error: ")
    with pytest.raises(SystemExit):
        main(["replay", "x.bundle", "--pdb"])
