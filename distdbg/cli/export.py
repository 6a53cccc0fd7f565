"""`distdbg export RUN_DIR --perfetto`: the run as a trace for the Perfetto UI and chrome://tracing."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from distdbg import schema
from distdbg.errors import DistdbgError
from distdbg.files import read_verdict

DIAGNOSE_BYTES = 1 << 30  # above that a verdict is only marked where there is one already


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="distdbg export",
        description="Write a run as a trace that ui.perfetto.dev and chrome://tracing open: a process per rank.",
    )
    parser.add_argument("run_dir", type=Path, help="the run directory that `distdbg run` printed first")
    parser.add_argument("--perfetto", action="store_true", help="Chrome trace event JSON (the only format so far)")
    parser.add_argument("-o", "--output", type=Path, help="a .json or .json.gz file (default: RUN_DIR/trace.json.gz)")
    parser.add_argument("--ranks", metavar="0,4-7", help="only these ranks")
    parser.add_argument("--steps", metavar="10:20", help="only these steps, as Python slices count: 10 to 19")
    args = parser.parse_args(argv)
    if not args.perfetto:
        parser.error("say which format to write: --perfetto")

    from distdbg.export.perfetto import parse_ranks, parse_steps, write_perfetto

    output = args.output or args.run_dir / "trace.json.gz"
    began = time.monotonic()

    def progress(rank: int) -> None:
        if sys.stderr.isatty() and time.monotonic() - began > 1:
            print(f"distdbg: writing rank {rank}", file=sys.stderr)

    try:
        summary = write_perfetto(
            args.run_dir,
            output,
            ranks=parse_ranks(args.ranks) if args.ranks else None,
            steps=parse_steps(args.steps) if args.steps else None,
            verdict=verdict_of(args.run_dir),
            on_rank=progress,
        )
    except OSError as error:
        raise DistdbgError(f"{output} cannot be written ({error}); give another place with -o") from error
    for problem in summary.problems:
        print(f"distdbg: {problem}", file=sys.stderr)
    print(f"{summary.spans:,} spans of {summary.ranks} ranks, {summary.flows:,} flows, "
          f"{summary.markers} markers: {output}")  # fmt: skip
    print("open it at https://ui.perfetto.dev (the file stays in your browser) or in chrome://tracing")
    return 0


def verdict_of(run_dir: Path) -> dict[str, Any] | None:
    """The verdict that lies in the run directory; else one made now, unless the run is too large to hold."""
    found = read_verdict(run_dir)
    if found.get("schema") == schema.VERDICT_SCHEMA:
        culprits = found.get("culprits")
        return {
            **found,
            "culprits": [c for c in culprits if isinstance(c, dict)] if isinstance(culprits, list) else [],
        }
    segments = run_dir.glob(f"{schema.RANKS_FOLDER}/*/seg-*{schema.SEGMENT_SUFFIX}")
    if sum(path.stat().st_size for path in segments) > DIAGNOSE_BYTES:
        print("distdbg: no verdict is marked; `distdbg diagnose --write` makes one first", file=sys.stderr)
        return None
    from distdbg.analyze.verdict import diagnose

    return diagnose(run_dir)
