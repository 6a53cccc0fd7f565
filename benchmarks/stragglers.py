"""How small a delay on one rank is found, and how often a healthy job is blamed.

    python benchmarks/stragglers.py [--healthy 10] [--delays 5 20 200] [--ranks 2 4] [--wrappers ddp fsdp2 pipeline]
                                    [--places ...] [--json FILE]

Each job is real: `distdbg run` of a small training of 24 steps, in which one rank is late by so many ms a step from
step 8 on. A verdict is right that names that rank and phase. The share is that of the median step of the same job
without the delay. Jobs of more ranks than cores share these, and their noise is part of the answer.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS, BEGIN = 24, 8
PLACES = {"node": "backward", "function": "backward", "forward": "forward", "data": "data", "optimizer": "optimizer"}

SCRIPT = """
import os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
rank, world = dist.get_rank(), dist.get_world_size()
PLACE, DELAY, WRAP = os.environ["PLACE"], float(os.environ["DELAY_MS"]) / 1e3, os.environ["WRAP"]
late = {"on": False}


def lose():
    if late["on"]:
        end = time.perf_counter() + DELAY
        while time.perf_counter() < end:
            torch.zeros(1)


class Lose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        lose()
        return grad


PART = torch.randn(192, 192) / 14


def parts():
    begin = time.perf_counter()
    for _ in range(30):
        PART @ PART
    return max(1, round(DELAY / 2 / ((time.perf_counter() - begin) / 30)))


class Place(nn.Module):
    count = parts() if PLACE == "node" else 0

    def forward(self, x):
        if PLACE == "forward":
            lose()
        if PLACE == "function":
            x = Lose.apply(x)
        if PLACE == "node" and late["on"]:
            y = x[:1].expand(192, -1)
            for _ in range(self.count):
                y = PART @ y
            x = x + 0 * y[:1]
        return x


class Data(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        if PLACE == "data" and index % 8 == 0:
            lose()
        return torch.randn(192, generator=torch.Generator().manual_seed(index))


def block():
    return nn.Sequential(nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(6))
        self.place = Place()

    def forward(self, x):
        for number, part in enumerate(self.blocks):
            x = x + part(x)
            if number == 2:
                x = self.place(x)
        return x


net = Net()
model = net
if WRAP == "ddp":
    model = nn.parallel.DistributedDataParallel(net)
elif WRAP == "fsdp2":
    from torch.distributed.fsdp import fully_shard
    for part in net.blocks:
        fully_shard(part)
    fully_shard(net)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
if PLACE == "optimizer":
    optimizer.register_step_pre_hook(lambda *a: lose())
batches = iter(DataLoader(Data(), batch_size=8))
times = []
for step in range(int(os.environ["STEPS"])):
    late["on"] = DELAY > 0 and rank == world - 1 and step >= int(os.environ["BEGIN"])
    begin = time.perf_counter()
    optimizer.zero_grad()
    if WRAP != "pipeline":
        model(next(batches)).square().mean().backward()
    elif rank == 0:
        out = model(next(batches))
        dist.send(out.detach(), 1)
        grad = torch.empty_like(out)
        dist.recv(grad, 1)
        out.backward(grad)
    else:
        x = torch.empty(8, 192)
        dist.recv(x, 0)
        x.requires_grad_()
        model(x).square().mean().backward()
        dist.send(x.grad, 0)
    optimizer.step()
    times.append(time.perf_counter() - begin)
if rank == 0:
    print("STEP_MS", sorted(times[2:])[len(times[2:]) // 2] * 1e3)
dist.barrier()
dist.destroy_process_group()
time.sleep(0.2)
"""


def run_job(wrap: str, ranks: int, place: str, delay_ms: float) -> tuple[dict[str, Any], float]:
    """The verdict of a job and the median of its steps (ms)."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        environ = {
            **os.environ, "PLACE": place, "DELAY_MS": str(delay_ms), "WRAP": wrap, "OMP_NUM_THREADS": "1",
            "STEPS": str(STEPS), "BEGIN": str(BEGIN),
        }  # fmt: skip
        command = [sys.executable, "-m", "distdbg", "run", "--run-dir", f"{folder}/run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(script)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180)
        if done.returncode:
            raise SystemExit(f"a job failed:\n{done.stderr[-3000:]}")
        verdict = json.loads((Path(folder) / "run" / "verdict.json").read_text())
        step = next(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("STEP_MS"))
        return verdict, step


def right(verdict: dict[str, Any], ranks: int, place: str) -> str:
    """ "right", "rank" (the phase is another), "missed" or "WRONG" (another rank)."""
    if verdict["kind"] == "healthy":
        return "missed"
    named = [culprit["rank"] for culprit in verdict["culprits"]]
    if verdict["kind"] != "straggler" or named != [ranks - 1]:
        return "WRONG"
    phases = {PLACES[place]} | ({"forward"} if place == "node" else set())
    return "right" if verdict["culprits"][0]["phase"] in phases else "rank"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--healthy", type=int, default=4, help="healthy jobs per setup")
    parser.add_argument("--delays", type=float, nargs="+", default=[5, 20, 200], help="ms a step")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--wrappers", nargs="+", default=["ddp"], choices=["ddp", "fsdp2", "pipeline"])
    parser.add_argument("--places", nargs="+", default=["node", "forward"], choices=list(PLACES))
    parser.add_argument("--json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    alarms = jobs = 0
    for wrap in options.wrappers:
        for ranks in [2] if wrap == "pipeline" else options.ranks:
            steps = []
            for _ in range(options.healthy):
                verdict, step = run_job(wrap, ranks, "forward", 0)
                steps.append(step)
                jobs += 1
                alarms += verdict["kind"] != "healthy"
            usual = statistics.median(steps) if steps else 0.0
            print(f"{wrap}, {ranks} ranks: {usual:.0f} ms a step ({min(steps):.0f}..{max(steps):.0f})", flush=True)
            for place in options.places:
                for delay in options.delays:
                    verdict, _ = run_job(wrap, ranks, place, delay)
                    found = right(verdict, ranks, place)
                    share = delay / usual if usual else 0.0
                    rows.append({"wrapper": wrap, "ranks": ranks, "place": place, "delay_ms": delay, "share": share,
                                 "found": found})  # fmt: skip
                    print(f"  {place:10s} +{delay:g} ms ({share:4.0%} of a step): {found}", flush=True)
    print(f"healthy jobs blamed: {alarms} of {jobs}")
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows, "healthy": jobs, "blamed": alarms}, indent=1))


if __name__ == "__main__":
    main()
