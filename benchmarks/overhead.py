"""What recording costs a training step: ratios to the same steps without it, taken in turn in one process a way.

    python benchmarks/overhead.py [--repeats 3] [--json] [--only gpt dense residual]

Workloads: a small GPT (4 layers, width 256, batch 4 x 128), a dense chain of 5,003 tiny nodes, and a residual
network of 18 blocks, on one thread. Ways: `none`; `python` (Python's hooks); `native` (where `distdbg build-native`
was run), both also with `+numerics`; `profiler`
(torch.profiler, CPU); `anomaly` (detect_anomaly); `print` (a recursive walk that prints in a pair of hooks on each
node, with a visited set) and `print, no set` (the same without one, which takes every path through a residual
add: stopped after 200,000 visits). Time is CPU time of the training thread, so that a noisy neighbour counts less.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

WORKLOADS = {"gpt": 3, "dense": 5, "residual": 20}  # steps in a block
BLOCKS = 4
WAYS = (
    "none",
    "python",
    "native",
    "python+numerics",
    "native+numerics",
    "profiler",
    "anomaly",
    "print",
    "print, no set",
)
VISITS = 200_000


def build(name: str) -> Callable[[], Any]:
    """A function that runs a forward and gives the loss."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "gpt":
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        embed, head = nn.Embedding(512, 256), nn.Linear(256, 512)
        ids = torch.randint(512, (4, 128))
        return lambda: nn.functional.cross_entropy(head(body(embed(ids))).flatten(0, 1), ids.flatten())
    if name == "dense":
        x = torch.ones(4, requires_grad=True)

        def chain() -> Any:
            y = x
            for _ in range(2500):
                y = (y * 1.0001) + 0.0
            return y.sum()

        return chain
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(18))
    data = torch.randn(8, 32)

    def residual() -> Any:
        y = data
        for block in blocks:
            y = y + block(y)
        return y.sum()

    return residual


def print_hooks(loss: Any, *, visited: bool, out: Any) -> int:
    """The way people begin with: walk the graph recursively and print in hooks. Returns the number of visits."""
    seen: set[Any] = set()
    visits = 0

    def walk(node: Any) -> None:
        nonlocal visits
        visits += 1
        if visits > VISITS or (visited and node in seen):
            return
        seen.add(node)
        name = node.name()
        node.register_prehook(lambda grads: print("enter", name, len(grads), file=out))
        node.register_hook(lambda results, grads: print("leave", name, len(results), file=out))
        for following, _ in node.next_functions:
            if following is not None:
                walk(following)

    sys.setrecursionlimit(100_000)
    walk(loss.grad_fn)
    return visits


def recording(way: str, place: str) -> Any:
    """A context in which steps run the given way."""
    import torch

    if way.startswith(("python", "native")):
        return Recording(place, recorder=way.partition("+")[0], numerics=way.endswith("numerics"))
    if way == "profiler":
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    return torch.autograd.detect_anomaly(check_nan=True) if way == "anomaly" else nullcontext()


class Recording:
    """distdbg.start() and stop() around steps; each time in a directory of its own."""

    started_ms: ClassVar[list[float]] = []

    def __init__(self, place: str, *, recorder: str, numerics: bool) -> None:
        self.place, self.recorder, self.numerics = place, recorder, numerics

    def __enter__(self) -> None:
        began = time.thread_time_ns()
        import distdbg

        os.environ["DISTDBG_RECORDER"] = self.recorder
        os.environ["DISTDBG_NUMERICS"] = "1" if self.numerics else ""
        distdbg.start(f"{self.place}/{len(self.started_ms)}")
        self.started_ms.append((time.thread_time_ns() - began) / 1e6)

    def __exit__(self, *_: object) -> None:
        import distdbg

        distdbg.stop()


def measure(workload: str, way: str) -> dict[str, Any]:
    """CPU ms of a forward and backward, without and with, in turn in this process; nodes, peak memory."""
    import torch

    torch.set_num_threads(1)
    forward = build(workload)
    base: list[float] = []
    times: list[float] = []
    visits = 0
    # Without a visited set a step takes so long that one of them tells enough.
    blocks, steps = (1, 1) if way == "print, no set" else (BLOCKS, WORKLOADS[workload])
    with tempfile.TemporaryDirectory() as place, open(os.devnull, "w") as out:
        for block in range(blocks):
            base += [step(forward) for _ in range(steps + 3)][3:]
            with recording(way, place):
                if way.startswith("print"):
                    for _ in range(steps):
                        found = step(forward, lambda loss: print_hooks(loss, visited=way == "print", out=out))
                        times.append(found)
                    visits = print_hooks(forward(), visited=way == "print", out=out) if block == 0 else visits
                else:
                    times += [step(forward) for _ in range(steps + 2)][2:]
    nodes = count_nodes(forward())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start_ms = Recording.started_ms[0] if Recording.started_ms else 0.0
    return {
        "base_ms": statistics.median(base), "ms": statistics.median(times), "nodes": nodes, "peak_mb": peak,
        "visits": visits, "start_ms": start_ms,
    }  # fmt: skip


def step(forward: Callable[[], Any], before: Callable[[Any], Any] | None = None) -> float:
    """CPU ms of the training thread for a forward and a backward."""
    began = time.thread_time_ns()
    loss = forward()
    if before is not None:
        before(loss)
    loss.backward()
    return (time.thread_time_ns() - began) / 1e6


def count_nodes(loss: Any) -> int:
    seen, stack = {loss.grad_fn}, [loss.grad_fn]
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return len(seen)


def in_a_process(workload: str, way: str) -> dict[str, Any] | None:
    command = [sys.executable, "-W", "ignore", __file__, "--measure", workload, way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        print(f"{workload}, {way}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):6.2f} ({min(values):.2f}..{max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs=2, metavar=("WORKLOAD", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return 0
    rng = random.Random(0)
    rows = []
    for workload in args.only:
        ways = [way for way in WAYS if workload == "residual" or not way.startswith("print")]
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for _ in range(args.repeats):
            for way in rng.sample(ways, len(ways)):
                result = in_a_process(workload, way)
                if result is not None:
                    found[way].append(result)
        rows += summarise(workload, found)
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(rows)
    return 0


def summarise(workload: str, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for way, results in found.items():
        rows.append(
            {
                "workload": workload, "way": way, "nodes": results[0]["nodes"] if results else 0,
                "ratio": [r["ms"] / r["base_ms"] for r in results],
                "us_a_node": [(r["ms"] - r["base_ms"]) * 1e3 / r["nodes"] for r in results],
                "base_ms": [r["base_ms"] for r in results], "start_ms": [r["start_ms"] for r in results],
                "peak_ratio": [r["peak_mb"] / b["peak_mb"] for r, b in zip(results, found["none"], strict=False)],
                "visits": results[0]["visits"] if results else 0,
            }
        )  # fmt: skip
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'workload':9} {'way':17} {'nodes':>6} {'ratio: median (min..max)':>26} {'us a node':>26} {'peak memory':>12}"
    )
    for row in rows:
        if not row["ratio"]:
            continue
        visits = f"  {row['visits']:,} visits a step" if row["visits"] else ""
        print(f"{row['workload']:9} {row['way']:17} {row['nodes']:6} {spread(row['ratio']):>26} "
              f"{spread(row['us_a_node']):>26} {statistics.median(row['peak_ratio']):12.3f}{visits}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
