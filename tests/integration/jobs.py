"""Runs a script as a real job under `distdbg run` and ends everything it started."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKER = "DISTDBG_TEST_JOB"
LIMIT_S = 90.0

PREAMBLE = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
torch.set_num_threads(1)
RANK = int(os.environ.get("RANK", 0))


def print(*values):  # in one write: the ranks share a pipe, and the built-in one writes each value by itself
    sys.stdout.write(" ".join(map(str, values)) + "\\n")
    sys.stdout.flush()


"""

# A custom Function whose backward fails, or returns another shape, as its level says.
LEVEL = """
class Level(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, level):
        ctx.save_for_backward(x)
        ctx.level = level
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.level <= 0:
            raise ValueError(f"level must be positive, got {ctx.level}")
        if ctx.level > 5:
            return grad[:, :1].expand(-1, 3), None
        return grad, None
"""


@dataclass
class Result:
    """What a job left: its exit code, its output, its run directory and verdict."""

    code: int
    out: str
    err: str
    run: Path

    @property
    def verdict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "verdict.json").read_text())
        return found

    @property
    def named(self) -> tuple[str, list[int]]:
        return self.verdict["kind"], [culprit["rank"] for culprit in self.verdict["culprits"]]


def write(folder: Path, text: str, *, name: str = "train.py", preamble: bool = True) -> Path:
    """Write a script, dedented, with the usual imports on top."""
    path = folder / name
    path.write_text((PREAMBLE if preamble else "") + textwrap.dedent(text))
    return path


def ours(mark: str) -> list[int]:
    """Processes that carry the mark of a job in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{MARKER}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def end_all(mark: str) -> None:
    for _ in range(50):
        left = ours(mark)
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


def run(
    command: list[str],
    folder: Path,
    *,
    interrupt_after: str | None = None,
    interrupt_with: int = signal.SIGINT,
    orphans: bool = False,
    **environ: str,
) -> Result:
    """Run a command in a session of its own; ``interrupt_with`` goes to it once its output holds ``interrupt_after``.

    Nothing may be left when it has ended, unless ``orphans``.
    """
    mark = uuid.uuid4().hex
    env = {**os.environ, "OMP_NUM_THREADS": "1", MARKER: mark, **environ}
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        root = subprocess.Popen(
            command, cwd=folder, env=env, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            deadline = time.monotonic() + LIMIT_S
            while root.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
                if interrupt_after is not None and interrupt_after in out.read_text(errors="replace"):
                    interrupt_after = None
                    root.send_signal(interrupt_with)
        finally:
            late = ours(mark) if root.poll() is not None else []
            time.sleep(0.2 if late else 0)
            left = ours(mark) if late else []
            end_all(mark)
            root.wait()
    assert orphans or not left, f"processes left behind: {left}"
    text = [path.read_text(errors="replace") for path in (out, err)]
    return Result(root.returncode, text[0], text[1], folder / "run")


def distdbg(
    script: Path | list[str],
    *options: str,
    nproc: int = 2,
    args: tuple[str, ...] = (),
    interrupt_after: str | None = None,
    interrupt_with: int = signal.SIGINT,
    orphans: bool = False,
    **environ: str,
) -> Result:
    """`distdbg run` of a script (or of ["-m", module]) with the run directory RUN beside it."""
    folder = script.parent if isinstance(script, Path) else Path(environ.pop("folder"))
    target = [str(script)] if isinstance(script, Path) else script
    command = [sys.executable, "-m", "distdbg", "run", "--run-dir", str(folder / "run"), "--standalone"]
    command += ["--nproc-per-node", str(nproc), *options, *target, *args]
    return run(
        command, folder, interrupt_after=interrupt_after, interrupt_with=interrupt_with, orphans=orphans, **environ
    )


def torchrun(script: Path, *options: str, nproc: int = 2, args: tuple[str, ...] = ()) -> Result:
    """The same job under plain torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return run([*command, *options, str(script), *args], script.parent)
