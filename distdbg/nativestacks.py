"""Native stacks of ranks that stand still, by py-spy where it is installed; run by the launcher, never in a rank.

py-spy holds the process while it reads it. A rank is read only once a verdict names it as standing, so none
that merely waits is touched, and never one that is stopped or traced already: py-spy would not come back.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distdbg import processes, schema
from distdbg.files import read_verdict, replace_text

TIMEOUT_S = 20.0  # the symbols of torch's libraries are many
MAX_RANKS = 4
MAX_OUTPUT = 32 << 20
MAX_THREADS = 256
MAX_FRAMES = 200


def culprits(run_dir: Path) -> list[int]:
    """The ranks that verdict.json names as standing; [] where there is none."""
    verdict = read_verdict(run_dir)
    try:
        if verdict["kind"] != "stalled":
            return []
        return [int(culprit["rank"]) for culprit in verdict["culprits"]][:MAX_RANKS]
    except (ValueError, KeyError, TypeError):
        return []


def take(pid: int, folder: Path, still: Callable[[], bool], *, timeout: float = TIMEOUT_S) -> str:
    """Write the stacks of a process beside its shard; returns "" or, in words, why there are none. Never raises."""
    program = shutil.which("py-spy")
    if program is None:
        return "py-spy is not installed"
    why = _untouchable(pid)
    if why or not still():
        return why or "it moves again"
    text, why = _dump(program, pid, timeout)
    if why:
        return why
    try:
        threads = [_thread(found) for found in json.loads(text)[:MAX_THREADS]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "py-spy's answer cannot be read"
    about = {"t_unix_ns": time.time_ns(), "pid": pid, "threads": threads}
    try:
        replace_text(folder / schema.NATIVE_STACKS_FILE, json.dumps(about, indent=1) + "\n")
    except OSError as error:
        return f"not written: {error.strerror}"
    return ""


def _untouchable(pid: int) -> str:
    state = processes.state(pid)
    if state in ("", "Z", "X"):
        return "its process is gone"
    if state in ("T", "t"):
        return "its process is stopped"
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return "its process is gone"
    traced = [line.split()[1] for line in status.splitlines() if line.startswith("TracerPid:")]
    return "a debugger is attached to it" if traced and traced[0] != "0" else ""


def _dump(program: str, pid: int, timeout: float) -> tuple[str, str]:
    """py-spy's JSON and "", or "" and why not."""
    command = [program, "dump", "--native", "--json", "--pid", str(pid)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DISTDBG_")}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, env=environ, errors="replace"
        )
    except subprocess.TimeoutExpired:
        _go_on(pid)
        return "", f"py-spy did not answer within {timeout:g} s"
    except OSError as error:
        return "", f"py-spy cannot be started: {error.strerror}"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return "", f"py-spy: {lines[-1][:200]}"
    if len(done.stdout) > MAX_OUTPUT:
        return "", "py-spy's answer is too long"
    return done.stdout, ""


def _go_on(pid: int) -> None:
    """A tracer that was killed may leave its tracee stopped; it was not before."""
    if processes.state(pid) == "T":
        try:
            os.kill(pid, signal.SIGCONT)
        except OSError:
            pass


def _thread(found: dict[str, Any]) -> dict[str, Any]:
    """A thread, its frames innermost first: [name, file or library, line or 0]."""
    frames = [
        [str(frame["name"]), str(frame.get("short_filename") or frame.get("filename") or ""), int(frame["line"] or 0)]
        for frame in found["frames"][:MAX_FRAMES]
    ]
    ident = found.get("os_thread_id")
    return {"os_thread_id": ident, "name": found.get("thread_name"), "gil": bool(found["owns_gil"]), "frames": frames}
