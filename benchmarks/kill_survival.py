"""Kills a recording process with SIGKILL at random moments and checks what is left of its record.

    python benchmarks/kill_survival.py [--times 100] [--json]

Each process trains a small network with small segments, so that some kills fall into a rotation. Checked: the
shard can be read, and how long before the death the last event was.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import distdbg
from distdbg import schema, shard
from distdbg.analyze.read import RECORD_DTYPE, read_run

BEAT_S = 0.5


def train(run_dir: Path, steps: int | None = None) -> None:
    """Train under recording, until killed where no number of steps is given."""
    shard.ShardWriter.__init__.__kwdefaults__["segment_bytes"] = 256 << 10
    distdbg.start(run_dir)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while steps is None or step < steps:
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    distdbg.stop()


def kill_one(number: int, rng: random.Random) -> dict[str, float]:
    """Start a process, kill it after a random time of training, and look at its shard."""
    with tempfile.TemporaryDirectory() as place:
        run_dir = Path(place)
        pid = os.fork()
        if pid == 0:
            try:
                train(run_dir)
            finally:
                os._exit(1)
        while not list(run_dir.glob("ranks/*/seg-*")):
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.8))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        death = time.monotonic_ns()
        run = read_run(run_dir)
        records = run.shards[0].records
        torn = sum(torn_records(path) for path in run.shards[0].folder.glob("seg-*"))
        unknown = int((records["name"] >= len(run.shards[0].names)).sum())
        return {
            "events": len(records),
            "segments": len(list(run.shards[0].folder.glob("seg-*"))),
            "before_death_ms": (death - int(records["t"][-1])) / 1e6,
            "torn": torn,
            "unknown_names": unknown,
            "problems": len(run.problems),
        }


def torn_records(path: Path) -> int:
    """Slots that hold something but were not committed."""
    data = np.fromfile(path, dtype=RECORD_DTYPE, offset=schema.SEGMENT_HEADER_SIZE)
    empty = np.zeros(1, dtype=RECORD_DTYPE)[0]
    return int(((data["kind"] == 0) & (data != empty)).sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as place:
        train(Path(place), steps=1)  # imports everything, so that the forked processes train at once
    rows = [kill_one(number, rng) for number in range(args.times)]
    gaps = sorted(row["before_death_ms"] for row in rows)
    summary = {
        "kills": len(rows),
        "readable": sum(row["problems"] == 0 and row["unknown_names"] == 0 for row in rows),
        "within_one_beat": sum(gap <= BEAT_S * 1e3 for gap in gaps),
        "last_event_before_death_ms": {
            "median": round(statistics.median(gaps), 3), "p99": round(gaps[int(0.99 * (len(gaps) - 1))], 3),
            "max": round(gaps[-1], 3),
        },
        "torn_records": sum(row["torn"] for row in rows),
        "events": sum(row["events"] for row in rows),
        "segments": sum(row["segments"] for row in rows),
    }  # fmt: skip
    if args.json:
        print(json.dumps(summary, indent=1))
    else:
        for name, value in summary.items():
            print(f"{name:28} {value}")
    good = summary["readable"] == summary["within_one_beat"] == len(rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
