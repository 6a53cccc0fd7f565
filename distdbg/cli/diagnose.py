"""`distdbg diagnose RUN_DIR`: the verdict, for people or as JSON."""

import argparse
import json
import os
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="distdbg diagnose", description="Say what went wrong in a run, and where.")
    parser.add_argument(
        "run_dir",
        type=Path,
        help="the run directory that `distdbg run` printed first, or a folder of Flight Recorder dumps",
    )
    parser.add_argument(
        "--flight-recorder",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="dumps of PyTorch's Flight Recorder to read beside the shards, or in place of them: a file, a folder, or "
        "what stands before the rank in their names; may be repeated (RUN_DIR/flight-recorder* is read anyhow)",
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="read all events of a large run, not just those of the last steps and what else a verdict needs",
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON (as in verdict.json)")
    parser.add_argument("--write", action="store_true", help="also write RUN_DIR/verdict.json")
    parser.add_argument(
        "--lanes",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="draw what each rank did in the last moments (default: on a terminal)",
    )
    args = parser.parse_args(argv)

    from distdbg.analyze import facts, verdict
    from distdbg.report import lanes, terminal

    run = verdict.read_evidence(args.run_dir, args.flight_recorder, whole=args.whole)
    found = verdict.diagnose_run(run)
    if args.write:
        verdict.write(args.run_dir, found)
    print(json.dumps(found, indent=1) if args.json else terminal.render(found, args.run_dir if run.shards else None))
    terminals = sys.stdout.isatty()
    if run.shards and not args.json and (args.lanes or (args.lanes is None and terminals)):
        colour = terminals and not os.environ.get("NO_COLOR")
        print("\n" + lanes.render(facts.gather(run), found, colour=colour))
    return 0
