"""Native stacks by py-spy: written beside the shard, and nothing but a sentence where they cannot be had."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distdbg import nativestacks, processes, schema

ANSWER = [
    {
        "pid": 1, "thread_id": 1, "thread_name": None, "os_thread_id": 1, "active": True, "owns_gil": False,
        "frames": [{"name": "poll", "filename": "/lib/libc.so.6", "short_filename": "libc.so.6", "line": 0}],
    }
]  # fmt: skip


@pytest.fixture
def pid() -> Iterator[int]:
    """A process that waits."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.kill()


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A py-spy on the PATH that does what a shell script says."""
    (folder / "bin").mkdir()
    path = folder / "bin" / "py-spy"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")


def yes() -> bool:
    return True


def test_written(pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and frames are written with the time; py-spy is asked for native frames of that process alone."""
    (tmp_path / "answer").write_text(json.dumps(ANSWER))
    program(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked\ncat {tmp_path}/answer\n')
    assert nativestacks.take(pid, tmp_path, yes) == ""
    found = json.loads((tmp_path / schema.NATIVE_STACKS_FILE).read_text())
    assert found["threads"][0]["frames"] == [["poll", "libc.so.6", 0]]
    assert (tmp_path / "asked").read_text().split() == ["dump", "--native", "--json", "--pid", str(pid)]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Permission Denied: Try running again with elevated permissions' >&2; exit 1", "Permission Denied"),
        ("echo '[{'", "cannot be read"),
        ("echo '[1, {}]'", "cannot be read"),
        ("echo '{}'", "cannot be read"),
        ("exit 3", "exit code 3"),
        ("exec sleep 60", "did not answer"),
    ],
)
def test_not_to_be_had(script: str, why: str, pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, broken or slow: why is told, no file is left, the process goes on."""
    program(tmp_path, monkeypatch, script + "\n")
    assert why in nativestacks.take(pid, tmp_path, yes, timeout=1.0)
    assert not list(tmp_path.glob("stacks*"))
    assert processes.state(pid) in "SR"


def test_never_asked(pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing py-spy, a rank that moves again, is stopped or is gone: py-spy is not started."""
    program(tmp_path, monkeypatch, f"touch {tmp_path}/started\n")
    assert nativestacks.take(pid, tmp_path, lambda: False) == "it moves again"
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    assert nativestacks.take(pid, tmp_path, yes) == "its process is stopped"
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert nativestacks.take(pid, tmp_path, yes) == "its process is gone"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nativestacks.take(pid, tmp_path, yes) == "py-spy is not installed"
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"kind": "stalled", "culprits": 3}', '{"kind": "healthy", "culprits": []}']
)
def test_no_culprits(text: str, tmp_path: Path) -> None:
    """Without a verdict that names standing ranks there is nobody to look at."""
    assert nativestacks.culprits(tmp_path) == []
    (tmp_path / schema.VERDICT_FILE).write_text(text)
    assert nativestacks.culprits(tmp_path) == []
