"""`distdbg report RUN_DIR -o FILE.html`: the verdict and pictures of the run in one HTML file."""

import argparse
import sys
import time
from pathlib import Path

from distdbg.errors import DistdbgError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="distdbg report", description="Write one self-contained HTML file that says and shows what went wrong."
    )
    parser.add_argument("run_dir", type=Path, help="the run directory that `distdbg run` printed first")
    parser.add_argument("-o", "--output", type=Path, help="the file to write (default: RUN_DIR/report.html)")
    parser.add_argument("--whole", action="store_true", help="read all events of a large run, not just the last steps")
    args = parser.parse_args(argv)

    from distdbg.analyze import facts, read, verdict, window
    from distdbg.report import html

    began = time.monotonic()
    output = args.output or args.run_dir / "report.html"
    run = read.read_run(args.run_dir, None if args.whole else window.plan(args.run_dir))
    for problem in run.problems:
        print(f"distdbg: {problem}", file=sys.stderr)
    found = verdict.diagnose_run(run)
    text = html.render(facts.gather(run), found)
    try:
        output.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise DistdbgError(f"{output} cannot be written ({error}); give another place with -o") from error
    print(f"distdbg: {found['summary']}")
    print(f"{len(text.encode('utf-8', 'replace')) / 1024:,.0f} kB in {time.monotonic() - began:.1f} s: {output}")
    return 0
