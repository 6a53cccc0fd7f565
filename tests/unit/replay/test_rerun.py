"""Bundles run again without the job: by the rebuilt operation, or by the user's own backward."""

from pathlib import Path
from typing import Any

import pytest
import torch

from distdbg.errors import BundleError
from distdbg.replay.bundle import load_bundle
from tests.unit.replay import bundles

SOURCE = """
import torch
import neighbour

print("imported")

class Outer:
    class Level(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, level):
            raise AssertionError("forward is not run")

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            if ctx.level <= neighbour.LEAST:
                raise ValueError("level must be positive")
            return grad * x, None

if __name__ == "__main__":
    raise AssertionError("training is not run")
"""


def function(**changes: Any) -> dict[str, Any]:
    """What a bundle of the Function above says."""
    place = {"shape": [2], "dtype": "float32"}
    return {
        "node": "LevelBackward", "saved": {"saved_0": torch.tensor([2.0, 3.0])}, "needs_input_grad": [True, False],
        "function": {"module": "__main__", "qualname": "Outer.Level", "file": "/job/train.py", "line": 12},
        "context": {"level": 0.0}, "error": dict(bundles.ERROR), "returns": [place], **changes,
    }  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The user's code, with a module beside it."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text(SOURCE)
    (folder / "neighbour.py").write_text("LEAST = 0\n")
    return folder


def test_an_operation(tmp_path: Path) -> None:
    """A C++ node's operation is rebuilt; its gradients are compared with those that the job got."""
    grad, result = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    good = bundles.write(tmp_path, [grad], reason="asked", saved={"result": result}, outputs=[grad * result])
    found = load_bundle(good).replay()
    assert (found.ran, found.same, found.how) == (True, True, "operation rebuilt")
    other = bundles.write(tmp_path, [grad], reason="asked", saved={"result": result}, outputs=[grad])
    found = load_bundle(other).replay()
    assert (found.ran, found.same) == (True, False)
    assert "other gradients than in the job" in found.summary


def test_an_error_that_the_operation_does_not_have(tmp_path: Path) -> None:
    """Where the rebuilt operation does not fail, that is said: it ran, and the outcome is not the job's."""
    path = bundles.write(tmp_path, [torch.ones(1)], saved={"result": torch.ones(1)}, error=dict(bundles.ERROR))
    found = load_bundle(path).replay()
    assert (found.ran, found.same) == (True, False)
    assert "did not fail" in found.summary


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"node": "FftR2CBackward0"}, "not among the"),
        ({"node": "AccumulateGrad"}, "parameter's gradient"),
        ({"saved": {}}, "not in the bundle"),
        ({"saved": {"result": {"unreadable": "freed", "now": None}}}, "could not be read any more"),
        ({"error": {"type": "RuntimeError", "message": "... modified by an inplace operation"}}, "about the graph"),
        ({"inputs": [{"shape": [1 << 30], "dtype": "float32"}]}, "described only"),
        (function(), "your code (/job/train.py:12)"),
    ],
)
def test_why_not(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    """What is not run again says why."""
    found = load_bundle(bundles.write(tmp_path, [torch.ones(2)], **changes)).replay()
    assert (found.ran, found.same) == (False, None)
    assert why in found.summary


@pytest.mark.parametrize("name", ["train.py", "."])
def test_the_users_backward(name: str, source: Path, tmp_path: Path) -> None:
    """A Function is imported from the file or folder given: its backward fails as it did, nothing else runs."""
    bundle = load_bundle(bundles.write(tmp_path, [torch.ones(2)], **function()))
    found = bundle.replay(source / name)
    assert (found.ran, found.same) == (True, True)
    assert found.error == {"type": "ValueError", "message": "level must be positive"}


def test_the_users_backward_gives_gradients(source: Path, tmp_path: Path) -> None:
    """With the context of a healthy call it returns what it returned; a None that came in is zeros."""
    changes = function(context={"level": 1.0}, error=None, outputs=[torch.tensor([2.0, 3.0])])
    found = load_bundle(bundles.write(tmp_path, [torch.ones(2)], **changes)).replay(source)
    assert (found.ran, found.same, found.summary) == (True, True, "ran, and returned the same gradients bit for bit")
    changes = function(context={"level": 1.0}, expects=[{"shape": [2], "dtype": "float32"}], error=None)
    found = load_bundle(bundles.write(tmp_path, [None], **changes)).replay(source)
    assert found.ran
    assert found.outputs is not None
    assert (found.outputs[0] or {})["max"] == 0.0


def test_a_wrong_shape_again(source: Path, tmp_path: Path) -> None:
    """The engine's check of shapes is part of the replay."""
    text = "Function LevelBackward returned an invalid gradient at index 0 - got [2] but expected "
    text += "shape compatible with [5]"
    error = {"type": "RuntimeError", "message": text}
    changes = function(context={"level": 1.0}, error=error, returns=[{"shape": [5], "dtype": "float32"}])
    found = load_bundle(bundles.write(tmp_path, [torch.ones(2)], **changes)).replay(source)
    assert (found.ran, found.same) == (True, True)


def test_debugger(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With debug the backward runs under pdb: it stops on the first line and goes on when told."""
    commands = iter(["p ctx.level", "c", "q"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(commands))
    found = load_bundle(bundles.write(tmp_path, [torch.ones(2)], **function())).replay(source, debug=True)
    assert (found.ran, found.same) == (True, True)
    assert next(commands, "all used") == "all used"


@pytest.mark.parametrize(
    ("path", "qualname", "text"),
    [
        ("none.py", "Outer.Level", "no such file"),
        ("train.py", "Outer.Other", "defines no torch.autograd.Function"),
        ("train.py", "torch.load", "defines no torch.autograd.Function"),
        ("train.py", "main.<locals>.Level", "defined within a function"),
        ("train.py", "__builtins__", "defined within a function"),
        ("broken.py", "Outer.Level", "cannot be imported"),
        ("many", "Outer.Level", "2 files named train.py"),
    ],
)
def test_a_source_of_no_use(path: str, qualname: str, text: str, source: Path, tmp_path: Path) -> None:
    """What --source cannot give is a clear error."""
    (source / "broken.py").write_text("1 / 0\n")
    for name in "ab":
        (source / "many" / name).mkdir(parents=True)
        (source / "many" / name / "train.py").write_text("")
    changes = function(function={"qualname": qualname, "file": "/job/train.py"})
    with pytest.raises(BundleError, match=text):
        load_bundle(bundles.write(tmp_path, [torch.ones(2)], **changes)).replay(source / path)


def test_source_is_not_imported_unasked(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a source no code is run, even where the bundle names a file that is there."""
    changes = function(function={"qualname": "Outer.Level", "file": str(source / "train.py"), "line": 1})
    assert not load_bundle(bundles.write(tmp_path, [torch.ones(2)], **changes)).replay().ran
    assert "imported" not in capsys.readouterr().out
