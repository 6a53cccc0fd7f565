"""`distdbg merge RUN_DIR`: one timeline of all ranks, as CSV or Parquet."""

import argparse
import os
import sys
import time
from pathlib import Path

from distdbg import schema
from distdbg.errors import DistdbgError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="distdbg merge", description="Merge the shards of all ranks into one timeline."
    )
    parser.add_argument("run_dir", type=Path, help="the run directory that `distdbg run` printed first")
    parser.add_argument("-o", "--output", type=Path, help="a .csv or .parquet file (default: RUN_DIR/timeline.csv)")
    parser.add_argument("--spans", action="store_true", help="one row a begin/end pair instead of one an event")
    args = parser.parse_args(argv)
    output = args.output or args.run_dir / schema.TIMELINE_FILE
    if output.suffix not in (".csv", ".parquet"):
        raise DistdbgError(f"{output}: a timeline is written as .csv or .parquet; choose one of these endings")

    from distdbg.analyze.merge import merge
    from distdbg.analyze.read import read_run
    from distdbg.analyze.spans import spans_of
    from distdbg.export.csv import write_csv
    from distdbg.export.parquet import write_parquet

    began = time.monotonic()
    run = read_run(args.run_dir)
    for problem in run.problems:
        print(f"distdbg: {problem}", file=sys.stderr)
    if run.clock_sentence:
        print(f"distdbg: {run.clock_sentence}", file=sys.stderr)
    _progress(began, f"merging {sum(len(shard.records) for shard in run.shards):,} events")
    timeline = spans_of(run) if args.spans else merge(run)
    columns = schema.SPAN_COLUMNS if args.spans else schema.COLUMNS
    _progress(began, f"writing {len(timeline):,} rows to {output}")
    write = write_csv if output.suffix == ".csv" else write_parquet
    # Several nodes' launchers may write it at once, and a reader should never see half of it.
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        write(timeline, columns, unfinished)
        os.replace(unfinished, output)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise DistdbgError(f"{output} cannot be written ({error}); give another place with -o") from error
    print(f"{len(timeline):,} rows: {output}")
    return 0


def _progress(began: float, text: str) -> None:
    """What is being done, once it takes longer than a second, on a terminal."""
    if sys.stderr.isatty() and time.monotonic() - began > 1:
        print(f"distdbg: {text}", file=sys.stderr)
