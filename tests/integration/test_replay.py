"""Nodes that fail in real jobs leave bundles, and the jobs end as they would have."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distdbg.replay import load_bundle
from tests.integration import jobs

pytestmark = pytest.mark.integration

SCRIPT = (
    jobs.LEVEL
    + """

class Gate(nn.Module):
    level = 1.0

    def forward(self, x):
        return Level.apply(x, self.level)


def main(bad):
    dist.init_process_group("gloo")
    gate = Gate()
    model = DDP(nn.Sequential(nn.Linear(4, 8), gate, nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        gate.level = bad if RANK == 1 and step == 2 else 1.0
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    print("weight", RANK, model.module[0].weight.double().sum().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]))
"""
)


def replay(path: Path, *options: str) -> dict[str, Any]:
    """`distdbg replay --json` of a bundle, in a process of its own."""
    command = [sys.executable, "-m", "distdbg", "replay", "--json", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("bad", "error"), [("0", "ValueError: level must be positive"), ("9", "invalid gradient")])
def test_a_failed_node(bad: str, error: str, tmp_path: Path) -> None:
    """The culprit leaves a bundle whose replays, there and here, say the same error; the job ends as it would."""
    script = jobs.write(tmp_path, SCRIPT)
    found = jobs.distdbg(script, args=(bad,))
    plain = jobs.torchrun(script, args=(bad,))
    assert found.code == plain.code == 1
    ends = [
        [line for line in text.splitlines() if error in line and "[rank" in line] for text in (found.err, plain.err)
    ]
    assert ends[0] == ends[1] != []
    (path,) = [path for path in (tmp_path / "run" / "bundles").iterdir() if path.name.startswith("rank1-")]
    bundle = load_bundle(path)
    assert path.name == "rank1-step2-LevelBackward.bundle"
    assert (bundle.about["module"], bundle.about["module_class"]) == ("1", "Gate")
    assert bundle.about["replay"]["kind"] == "deterministic"
    assert error in bundle.about["error"]["title"]
    assert not replay(path)["bundles"][0]["here"]["ran"]
    here = replay(path, "--source", str(script))["bundles"][0]["here"]
    assert (here["ran"], here["same"]) == (True, True)


def test_asked_for_on_both_ranks(tmp_path: Path) -> None:
    """--capture leaves a bundle of the node on each rank, they compare, and training gives the same weights."""
    script = jobs.write(tmp_path, SCRIPT)
    plain = jobs.torchrun(script, args=("1",))
    found = jobs.distdbg(script, "--capture", "AddmmBackward0@1", "--no-capture", args=("1",))
    assert not (tmp_path / "run" / "bundles").exists()
    (tmp_path / "run").rename(tmp_path / "before")
    found = jobs.distdbg(script, "--capture", "2@1", args=("1",))
    assert found.code == 0
    weights = [sorted(re.findall(r"weight \d -?[\d.]+", out)) for out in (found.out, plain.out)]
    assert weights[0] == weights[1]
    assert len(weights[0]) == 2
    names = sorted(path.name for path in (tmp_path / "run" / "bundles").iterdir())
    assert "rank0-step1-AddmmBackward0.bundle" in names
    assert "rank1-step1-AddmmBackward0.bundle" in names
    told = replay(tmp_path / "run" / "bundles" / "rank0-step1-AddmmBackward0.bundle")
    assert (told["bundles"][0]["here"]["ran"], told["bundles"][0]["here"]["same"]) == (True, True)
    assert told["differences"] == []


PEAK = """
import resource


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print("before", before)
        raise ValueError("here")


x = torch.ones(int(sys.argv[1]) << 18, requires_grad=True)
y = torch.ones(1, requires_grad=True)
warm = torch.empty(1 << 20).double().sum()
try:
    (Fails.apply(x) * y).sum().backward()
except ValueError:
    pass
print("after", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize(("size", "limit"), [(96, 32), (16, 32), (8, 32), (16, 64)])
def test_peak_memory(size: int, limit: int, tmp_path: Path) -> None:
    """Whether tensors of some MB fit in --capture-mb or not: the peak grows by no more than that."""
    script = jobs.write(tmp_path, PEAK)
    found = jobs.distdbg(script, "--capture-mb", str(limit), nproc=1, args=(str(size),))
    lines = [line.split() for line in found.out.splitlines() if line.startswith(("before", "after"))]
    assert list((tmp_path / "run" / "bundles").iterdir())
    assert int(lines[-1][1]) - int(lines[0][1]) <= limit << 10


STUCK = """
class Stands(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if RANK == 1:
            time.sleep(600)
        return grad


dist.init_process_group("gloo")
x = torch.ones(3, 4, requires_grad=True)
Stands.apply(x * 2).sum().backward()
dist.all_reduce(x.grad)
"""
PY_SPY = """#!/bin/sh
echo "$5" >> {folder}/asked
echo '[{{"os_thread_id": '$5', "thread_name": null, "owns_gil": false, "frames":
    [{{"name": "clock_nanosleep", "short_filename": "libc.so.6", "line": 0}}]}}]'
"""


def test_a_stuck_node(tmp_path: Path) -> None:
    """Native stacks are taken of the rank that stands and of no other; they and what its node received are evidence."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "py-spy"
    program.write_text(PY_SPY.format(folder=tmp_path))
    program.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    options = ("--stall-timeout", "3", "--on-stall", "kill")
    found = jobs.distdbg(jobs.write(tmp_path, STUCK), *options, PATH=path)
    assert found.named == ("stalled", [1])
    assert "StandsBackward of rank 1 received float32[3, 4]" in found.verdict["evidence"]
    assert "rank 1's main thread stands in clock_nanosleep (libc.so.6)" in found.verdict["evidence"]
    (folder,) = (tmp_path / "run" / "ranks").glob("rank00001-*")
    assert (folder / "stacks-native.json").exists()
    assert (tmp_path / "asked").read_text().split() == [folder.name.rpartition("-")[2]]
