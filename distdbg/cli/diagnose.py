"""`distdbg diagnose RUN_DIR`: the verdict, for people or as JSON."""

import argparse
import json
from pathlib import Path


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="distdbg diagnose", description="Say what went wrong in a run, and where.")
    parser.add_argument("run_dir", type=Path, help="the run directory that `distdbg run` printed first")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON (as in verdict.json)")
    parser.add_argument("--write", action="store_true", help="also write RUN_DIR/verdict.json")
    args = parser.parse_args(argv)

    from distdbg.analyze import verdict
    from distdbg.report import terminal

    found = verdict.diagnose(args.run_dir)
    if args.write:
        verdict.write(args.run_dir, found)
    print(json.dumps(found, indent=1) if args.json else terminal.render(found, args.run_dir))
    return 0
