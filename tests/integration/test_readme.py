"""What the README and the pages in docs/ promise."""

import re
import sys
from pathlib import Path

import pytest

from distdbg import schema
from distdbg.launcher import build_parser
from tests.integration.jobs import run, write

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


def test_tables_are_complete() -> None:
    """The README names every column of the timeline, every kind of verdict and every option of distdbg's own."""
    text = (ROOT / "README.md").read_text()
    for name in (*schema.COLUMNS, *schema.KINDS):
        assert f"`{name}`" in text, name
    ours = next(group for group in build_parser()._action_groups if group.title == "distdbg")
    for action in ours._group_actions:
        assert f"`{action.option_strings[0]}" in text, action.option_strings


def test_events_are_described() -> None:
    """docs/run-directory.md describes every kind of event, and its record's offsets are the real ones."""
    text = (ROOT / "docs" / "run-directory.md").read_text()
    for kind in schema.EventKind:
        stem, _, ending = kind.label.rpartition("_")
        named = f"`{kind.label}`" in text or (f"`{stem}_begin`" in text and f"`_{ending}`" in text)
        assert named, kind.label
    offset = 0
    for name, code in schema.RECORD_FIELDS:
        width = int(code[-1])
        assert f"| `{name}` | {code[1]}{8 * width} | {offset} |" in text
        offset += width
    assert offset == schema.RECORD_SIZE


def test_pandas_example(tmp_path: Path) -> None:
    """The README's pandas example finds the open node in the CSV of a real backward that failed."""
    script = """
    import torch, distdbg
    distdbg.start(sys.argv[1])
    x = torch.randn(3, requires_grad=True)
    y = x.exp()
    loss = y.sum() * 2
    y.add_(1)
    try:
        loss.backward()
    except RuntimeError:
        distdbg.stop()
    """
    path = write(tmp_path, script)
    done = run([sys.executable, str(path), str(tmp_path / "run")], tmp_path)
    assert done.code == 0, done.err
    assert run([sys.executable, "-m", "distdbg", "merge", str(tmp_path / "run")], tmp_path).code == 0
    block = next(
        b for b in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S) if "read_csv" in b
    )
    path = write(tmp_path, block.replace("RUN_DIR", str(tmp_path / "run")), name="example.py", preamble=False)
    done = run([sys.executable, str(path)], tmp_path)
    assert done.code == 0, done.err
    assert len(done.out.strip().splitlines()) == 2
    assert "ExpBackward0" in done.out
