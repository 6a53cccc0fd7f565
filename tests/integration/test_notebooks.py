"""The notebooks run from top to bottom, and are committed with their outputs."""

import base64
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))

# In a process of its own: the libraries of a kernel's client start threads and give warnings of their own.
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient
book = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(book, timeout=150, kernel_name="python3").execute()
nbformat.write(book, sys.argv[2])
"""


def text_of(book: nbformat.NotebookNode) -> str:
    """All that the cells printed or returned as text."""
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path) -> None:
    """Every cell runs without an error on this machine's Python."""
    command = [sys.executable, "-c", EXECUTE, str(path), str(tmp_path / "done.ipynb")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    if path.stem == "find-the-stalled-node":
        found = text_of(nbformat.read(tmp_path / "done.ipynb", as_version=4))
        assert "stalled - rank 1" in found
        assert "AddmmBackward0" in found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_readable_without_running(path: Path) -> None:
    """What is committed carries its outputs, and none of them is an error or a complaint."""
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


def test_shows_the_open_node() -> None:
    """The notebook about a stall is committed with its picture and the verdict that it comes to."""
    book = nbformat.read(next(path for path in NOTEBOOKS if path.stem == "find-the-stalled-node"), as_version=4)
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert base64.b64decode(pictures[0]).startswith(b"\x89PNG")
    assert "stalled - rank 1" in text_of(book)
