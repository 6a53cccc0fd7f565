"""What the README promises first: the demo."""

import sys
from pathlib import Path

import pytest

from tests.integration.jobs import run

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


def test_demo(tmp_path: Path) -> None:
    """launch/demo.sh exits with 0, and its verdict names rank 2, the node, the module and the step."""
    done = run(
        ["bash", str(ROOT / "launch" / "demo.sh")],
        tmp_path,
        PYTHON=sys.executable,
        DISTDBG_DEMO_DIR=str(tmp_path / "run"),
    )
    assert done.code == 0, done.err[-2000:]
    assert done.named == ("exception", [2])
    culprit = done.verdict["culprits"][0]
    assert (culprit["phase"], culprit["step"]) == ("backward", 3)
    assert (culprit["node"], culprit["module"]) == ("EmbeddingBackward0", "tokens")
    assert {victim["rank"] for victim in done.verdict["victims"]} == {0, 1, 3}
    assert "(exit code 1, as torchrun's)" in done.out
    assert "timeline.csv" in done.out
    table = done.out.rstrip().splitlines()
    assert "prehook EmbeddingBackward0" in table[-2], "the last row of a node is the open one's prehook"
    assert "backward_raised" in table[-1]
    assert "distdbg: rank 2 failed in backward of step 3" in done.err


def test_demo_without_an_environment(tmp_path: Path) -> None:
    """With a Python that has no torch, launch/demo.sh says what to do instead of starting anything."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = run(["bash", str(ROOT / "launch" / "demo.sh")], tmp_path, PYTHON=str(python))
    assert done.code == 2
    assert "make demo" in done.err
