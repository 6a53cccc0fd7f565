"""Options and the run directory; nothing is launched here."""

import json
from pathlib import Path

import pytest

from distdbg import launcher
from distdbg.cli import main
from distdbg.errors import LaunchError
from distdbg.launcher import build_parser, prepare


def test_options_before_the_script_are_ours_or_torchruns() -> None:
    """Ours and torchrun's mix freely before SCRIPT; what follows SCRIPT is the script's, whatever it is called."""
    ours = ["--run-dir", "d", "--standalone", "--stall-timeout", "9", "--nproc-per-node", "4"]
    args = build_parser().parse_args([*ours, *["train.py", "--run-dir", "x", "--keep", "3", "-m"]])
    assert (str(args.run_dir), args.stall_timeout, args.standalone, args.nproc_per_node) == ("d", 9.0, True, "4")
    assert args.training_script == "train.py"
    assert args.training_script_args == ["--run-dir", "x", "--keep", "3", "-m"]
    assert (args.on_stall, args.numerics, args.keep) == ("report", False, None)


@pytest.mark.parametrize("bad", ["--stall-timeout 0", "--stall-timeout x", "--on-stall wait", "--keep none"])
def test_bad_values_are_refused(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that makes no sense is refused with the option's name, before anything starts."""
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args([*bad.split(), "train.py"])
    assert caught.value.code == 2
    assert bad.split()[0] in capsys.readouterr().err


def test_no_python_and_a_missing_script(capsys: pytest.CaptureFixture[str]) -> None:
    """--no-python and a script that is not there end at once, with what to do instead."""
    assert main(["run", "--no-python", "prog"]) == 2
    assert "use torchrun for it" in capsys.readouterr().err
    assert main(["run", "no-such-script.py"]) == 2
    assert "no such script: no-such-script.py" in capsys.readouterr().err


def test_default_directories_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of one second get two directories, named after time and script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher.time, "strftime", lambda _: "20260101-000000")
    args = build_parser().parse_args(["my train.py"])
    first, second = prepare(args), prepare(args)
    assert first is not None
    assert second is not None
    assert first.name == "20260101-000000-my_train"
    assert second.name == "20260101-000000-my_train-2"
    assert json.loads((first / "run.json").read_text())["script"] == "my train.py"


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    """A run directory that is not empty, or a file, is never written into; several nodes may share one."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "x").write_text("")
    with pytest.raises(LaunchError, match="not empty"):
        prepare(build_parser().parse_args(["--run-dir", str(tmp_path / "old"), "t.py"]))
    with pytest.raises(LaunchError, match="is a file"):
        prepare(build_parser().parse_args(["--run-dir", str(tmp_path / "old" / "x"), "t.py"]))
    shared = ["--nnodes", "2", "--run-dir", str(tmp_path / "old"), "t.py"]
    assert prepare(build_parser().parse_args(shared)) == tmp_path / "old"


def test_an_unwritable_place_means_no_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing can be written the job runs without, and one line says so."""
    (tmp_path / "file").write_text("")
    args = build_parser().parse_args(["--run-dir", str(tmp_path / "file" / "run"), "t.py"])
    assert prepare(args) is None
    assert capsys.readouterr().err.count("not recording") == 1
