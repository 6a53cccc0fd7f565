"""The native recorder in real jobs: the same events as Python's hooks, the same verdicts, the same bundles."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import distdbg
from distdbg.replay import load_bundle
from tests import native
from tests.integration import jobs

pytestmark = pytest.mark.integration

SCRIPT = (
    jobs.LEVEL
    + """
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    level = 1.0

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + Level.apply(self.down(torch.relu(self.up(x))), self.level)


def main(wrap, bad):
    dist.init_process_group("gloo")
    net = nn.Sequential(Block(), Block(), nn.Linear(8, 2))
    if wrap == "fsdp2":
        for block in net[:2]:
            fully_shard(block)
        model = fully_shard(net)
    else:
        model = DDP(net, static_graph=wrap == "static")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        net[1].level = -1.0 if bad and RANK == 1 and step == 2 else 1.0
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
    total = sum(p.to_local().double().sum() if wrap == "fsdp2" else p.double().sum() for p in net.parameters())
    print("weights", RANK, total.item())
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1], len(sys.argv) > 2)
"""
)
COLUMNS = ["rank", "event", "step", "phase", "node", "node_index", "module", "parameter", "collective", "bytes"]
CHANCE = ["heartbeat", "stall", "gc_begin", "gc_end", "wait_begin", "wait_end", "setup_begin", "setup_end"]


def events(run: Path) -> pd.DataFrame:
    """A run's events rank by rank, without those that come when they come."""
    found = distdbg.load(run)
    found = found[~found["event"].isin(CHANCE)]
    return found.sort_values("rank", kind="stable")[COLUMNS].astype(str).reset_index(drop=True)


@pytest.mark.parametrize("wrap", ["ddp", "static", "fsdp2"])
def test_the_same_events(wrap: str, tmp_path: Path) -> None:
    """Every event of every rank is the same with both recorders, and so are the weights."""
    script = jobs.write(tmp_path, SCRIPT)
    cache = str(native.built().parent)
    python = jobs.distdbg(script, "--recorder", "python", args=(wrap,), DISTDBG_NATIVE_DIR=cache)
    assert python.code == 0, python.err
    (tmp_path / "run").rename(tmp_path / "python")
    found = jobs.distdbg(script, "--recorder", "native", args=(wrap,), DISTDBG_NATIVE_DIR=cache)
    assert found.code == 0, found.err
    assert found.verdict["kind"] == "healthy"
    assert sorted(found.out.splitlines()) == sorted(python.out.splitlines())
    for meta in (tmp_path / "run").glob("ranks/*/meta.json"):
        assert json.loads(meta.read_text())["recorder"] == "native"
    pd.testing.assert_frame_equal(events(tmp_path / "run"), events(tmp_path / "python"))


def test_a_failed_node(tmp_path: Path) -> None:
    """The culprit, its node and its bundle are those of Python's hooks; the job ends as it does without us."""
    script = jobs.write(tmp_path, SCRIPT)
    found = jobs.distdbg(
        script, "--recorder", "native", args=("ddp", "bad"), DISTDBG_NATIVE_DIR=str(native.built().parent)
    )
    assert found.code == 1
    (culprit,) = found.verdict["culprits"]
    assert (found.verdict["kind"], culprit["rank"], culprit["node"]) == ("exception", 1, "LevelBackward")
    assert (culprit["module"], culprit["step"], culprit["phase"]) == ("1", 2, "backward")
    bundle = load_bundle(tmp_path / "run" / "bundles" / "rank1-step2-LevelBackward.bundle")
    assert bundle.about["replay"]["kind"] == "deterministic"
    assert "level must be positive" in bundle.about["error"]["title"]


def test_the_command(tmp_path: Path) -> None:
    """build-native says what is there; --recorder native without it is an error before anything is started."""
    script = jobs.write(tmp_path, "print('ran')", preamble=False)
    command = [sys.executable, "-m", "distdbg", "build-native", "--check"]
    with native.cache():
        native.built()
        done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout[:6]) == (0, "built:")
    empty = str(tmp_path / "nothing")
    found = jobs.distdbg(script, "--recorder", "native", DISTDBG_NATIVE_DIR=empty)
    assert (found.code, found.out) == (2, "")
    assert "distdbg build-native" in found.err
    assert not (tmp_path / "run").exists()
    compiler = jobs.run(
        [sys.executable, "-m", "distdbg", "build-native"],
        tmp_path,
        DISTDBG_NATIVE_DIR=empty,
        PATH="/nonexistent",
        CXX="",
    )
    assert compiler.code == 2
    assert "no C++ compiler" in compiler.err
