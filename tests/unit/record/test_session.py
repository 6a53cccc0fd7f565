"""Starting, stopping, forking, and numbers on request."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import distdbg
from distdbg.analyze.read import read_run
from distdbg.errors import RecordingError
from distdbg.record import current
from distdbg.record.session import Settings


def test_start_needs_a_place_and_happens_once(run_dir: Path) -> None:
    """Without a run directory, or while a recording runs, start() is an error that says what to do."""
    with pytest.raises(RecordingError, match="DISTDBG_RUN_DIR"):
        distdbg.start()
    distdbg.start(run_dir)
    with pytest.raises(RecordingError, match=r"call distdbg\.stop\(\) first"):
        distdbg.start(run_dir)
    distdbg.stop()
    distdbg.stop()
    assert current() is None
    distdbg.step()


def test_two_recordings_one_after_the_other(tmp_path: Path) -> None:
    """distdbg can be used twice in a process, each time with a record of its own."""
    for name in ("a", "b"):
        distdbg.start(tmp_path / name)
        torch.ones(1, requires_grad=True).sum().backward()
        distdbg.stop()
        events = distdbg.load(tmp_path / name)
        assert (events["event"] == "prehook").sum() == 2
        assert events["event"].iloc[-1] == "stop"


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher's variables are read, and nonsense in them is an error with the variable's name."""
    monkeypatch.setenv("DISTDBG_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("DISTDBG_KEEP", "all")
    monkeypatch.setenv("DISTDBG_NUMERICS", "1")
    monkeypatch.setenv("DISTDBG_STALL_TIMEOUT", "6")
    found = Settings.from_environ()
    assert (found.run_dir, found.keep_bytes, found.numerics, found.quiet_s) == (tmp_path, None, True, 2.0)
    monkeypatch.setenv("DISTDBG_KEEP", "1.5")
    assert Settings.from_environ().keep_bytes == 3 << 19
    monkeypatch.setenv("DISTDBG_KEEP", "many")
    with pytest.raises(RecordingError, match="DISTDBG_KEEP"):
        Settings.from_environ()


def test_a_forked_child_writes_nothing(run_dir: Path) -> None:
    """A child of fork leaves its parent's shard alone, and can end in every way."""
    distdbg.start(run_dir)
    torch.ones(1, requires_grad=True).sum().backward()
    before = len(read_run(run_dir).shards[0].records)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.ones(1, requires_grad=True).sum().backward()
            code = 0 if current() is None else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    after = read_run(run_dir).shards[0].records
    extra = set(after["kind"][before:].tolist())
    assert extra <= {26, 27}  # the parent's own beat
    distdbg.stop()


def test_an_uncaught_exception_is_recorded(run_dir: Path) -> None:
    """With start() an exception that leaves the script is noted by way of sys.excepthook, which still runs."""
    seen: list[str] = []
    old = sys.excepthook
    sys.excepthook = lambda kind, error, trace: seen.append(str(error))
    try:
        distdbg.start(run_dir)
        try:
            raise ValueError("the end")
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)
        distdbg.stop()
    finally:
        sys.excepthook = old
    assert seen == ["the end"]
    assert distdbg.load(run_dir)["event"].tolist().count("exception") == 1
    assert read_run(run_dir).shards[0].exception is not None


def test_numerics_find_the_first_bad_value(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --numerics the node that turned good gradients bad is named, and weights are digested after a step."""
    monkeypatch.setenv("DISTDBG_NUMERICS", "1")

    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.pow(2).sum(-1).sqrt()

    model = nn.Sequential(nn.Linear(2, 2), Root())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    distdbg.start(run_dir)
    for scale in (1.0, 0.0):
        with torch.no_grad():
            model[0].weight.fill_(scale)
            model[0].bias.fill_(0)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    distdbg.stop()
    verdict = distdbg.diagnose(run_dir)
    assert verdict["kind"] == "numeric"
    culprit = verdict["culprits"][0]
    # sqrt's gradient at 0 is infinite; times 0 it is NaN one node later.
    assert (culprit["node"], culprit["module"], culprit["step"]) == ("SqrtBackward0", "1", 1)
    assert (distdbg.load(run_dir)["event"] == "digest").sum() == 4
