"""The command line's own behaviour."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import distdbg
from distdbg.cli import COMMANDS, main
from tests.unit.shards import job, train


def test_help_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Help lists every command; an unknown one is an error that shows the help."""
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main(["--version"]) == 0
    assert distdbg.__version__ in capsys.readouterr().out
    assert main([]) == 2
    assert main(["nonsense"]) == 2
    assert "no such command: nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`distdbg COMMAND --help` works for each."""
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"distdbg {name}" in capsys.readouterr().out


def test_errors_have_an_exit_code_and_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What can't be read is one line that names the path."""
    assert main(["diagnose", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("distdbg: error: ")
    assert str(tmp_path / "none") in said
    assert "Traceback" not in said


def test_diagnose_prints_text_or_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict is a text for people, or the JSON that verdict.json holds with --write."""
    train(job(run_dir, 2))
    assert main(["diagnose", str(run_dir)]) == 0
    assert capsys.readouterr().out.startswith("distdbg: nothing wrong")
    assert main(["diagnose", str(run_dir), "--json", "--write"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads((run_dir / "verdict.json").read_text())
    assert shown == distdbg.diagnose(run_dir)
    assert shown["schema"] == "distdbg.verdict/1"


def test_a_reader_that_leaves_is_no_error(run_dir: Path) -> None:
    """`distdbg diagnose | head` ends quietly."""
    train(job(run_dir, 2))
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "distdbg", "diagnose", str(run_dir), "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert done.stderr == ""
