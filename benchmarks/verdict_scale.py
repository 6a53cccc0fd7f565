"""How long a verdict over a large run takes, and how much memory.

    python benchmarks/verdict_scale.py [--runs straggler:256 stall:256 straggler:1024] [--events 100000] [--json FILE]

Writes synthetic runs with the real writer, one after the other, into a folder that is deleted again (1,024 ranks with
100,000 events each are 5 GB), and diagnoses each some times, every time in a process of its own: its whole time, the
imports included, and its peak memory. Whether the verdict is right is checked.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.synthetic import write_run

LAYERS = 8
A_STEP = 16 + 4 * 3 * LAYERS  # events that a rank writes in a step, about


def diagnose(run_dir: Path, *options: str) -> tuple[float, float, dict[str, Any]]:
    """(seconds, peak memory in MB, verdict) of one diagnosis."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "distdbg", "diagnose", "--json", *options, str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return time.perf_counter() - began, usage.ru_maxrss / 1024, found


def measure(fault: str, ranks: int, events: int, repeats: int, options: list[str]) -> dict[str, Any]:
    """One row of the table. Raises SystemExit where the verdict is wrong."""
    steps, culprit = events // A_STEP, ranks * 2 // 5
    at = {"straggler": steps // 3, "stall": steps - 2}[fault]
    with tempfile.TemporaryDirectory() as place:
        run_dir = Path(place) / "run"
        began = time.perf_counter()
        total = write_run(
            run_dir, ranks=ranks, steps=steps, layers=LAYERS, at_step=at, delay_ms=15, workers=os.cpu_count() or 1,
            **{fault: culprit},
        )  # fmt: skip
        wrote = time.perf_counter() - began
        found = [diagnose(run_dir, *options) for _ in range(repeats)]
    kind = {"straggler": "straggler", "stall": "stalled"}[fault]
    for _, _, verdict in found:
        named = [(c["rank"], c["step"]) for c in verdict["culprits"]]
        if verdict["kind"] != kind or len(named) != 1 or named[0][0] != culprit or abs(named[0][1] - at) > 2:
            raise SystemExit(f"wrong: {verdict['summary']}; right is {kind}, rank {culprit}, step {at}")
    seconds = sorted(s for s, _, _ in found)
    return {
        "fault": fault,
        "ranks": ranks,
        "events": total,
        "write_s": round(wrote, 1),
        "seconds": [round(s, 2) for s in (seconds[0], statistics.median(seconds), seconds[-1])],
        "peak_mb": round(max(mb for _, mb, _ in found)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long a verdict over a large run takes.")
    parser.add_argument(
        "--runs",
        nargs="+",
        default=["straggler:256", "stall:256", "straggler:1024"],
        metavar="FAULT:RANKS",
        help="straggler or stall, and the number of ranks",
    )
    parser.add_argument("--events", type=int, default=100_000, help="of each rank")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--whole", action="store_true", help="let it read all events")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    args = parser.parse_args()
    rows = []
    print(f"{'fault':10}{'ranks':>7}{'events':>14}{'verdict, s':>24}{'peak, MB':>10}", flush=True)
    for run in args.runs:
        fault, _, ranks = run.partition(":")
        row = measure(fault, int(ranks), args.events, args.repeats, ["--whole"] if args.whole else [])
        rows.append(row)
        low, middle, high = row["seconds"]
        timing = f"{middle:.1f} ({low:.1f}..{high:.1f})"
        print(f"{fault:10}{ranks:>7}{row['events']:>14,}{timing:>24}{row['peak_mb']:>10,}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
