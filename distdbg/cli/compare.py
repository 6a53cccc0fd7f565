"""`distdbg compare RUN_A RUN_B`: what got slower between two runs."""

import argparse
import json
from pathlib import Path

MAX_ROWS = 12


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="distdbg compare",
        description="Say what got slower from one run to another: own time a step, by phase, module and node.",
    )
    parser.add_argument("run_a", type=Path, help="the run directory before")
    parser.add_argument("run_b", type=Path, help="the run directory after")
    parser.add_argument("--json", action="store_true", help="print all rows as JSON")
    parser.add_argument("--all", action="store_true", help="also list places that differ no more than the noise")
    args = parser.parse_args(argv)

    from distdbg.analyze.compare import Comparison, Difference, compare

    def row(one: Difference) -> str:
        title = one.title if len(one.title) <= 46 else "..." + one.title[-43:]
        ratio = f"{one.ms / one.a.ms:+7.0%}" if one.a.ms > 0.0005 else "      -"
        mark = "" if one.beyond_noise else "  (noise)"
        alone = f"  rank{'s' if len(one.ranks) > 1 else ''} {', '.join(map(str, one.ranks[:6]))}" if one.ranks else ""
        return (
            f"  {title:<46}{one.a.ms:9.2f} +-{one.a.spread_ms:5.2f}{one.b.ms:10.2f} +-{one.b.spread_ms:5.2f}"
            f"{one.ms:+10.2f}{ratio}{alone}{mark}"
        )

    def text(found: Comparison) -> str:
        lines = [f"distdbg: {found.summary}"]
        lines += [f"  note: {note}" for note in found.notes]
        lines += ["", f"  {'ms a step':<46}{'before':>17}{'after':>18}{'change':>10}"]
        lines += [row(one) for one in found.rows if one.what != "place"]
        places = [one for one in found.rows if one.what == "place" and (args.all or one.beyond_noise)]
        if places:
            lines += ["", *(row(one) for one in places[: None if args.all else MAX_ROWS])]
        if not args.all and len(places) > MAX_ROWS:
            lines.append(f"  and {len(places) - MAX_ROWS} more places (--all)")
        lines.append(f"\n  medians over {found.ranks[0]} and {found.ranks[1]} ranks, {found.steps[0]} and "
                     f"{found.steps[1]} steps after warm-up; +- is the spread of single steps")  # fmt: skip
        return "\n".join(lines)

    found = compare(args.run_a, args.run_b)
    print(json.dumps(found.as_dict(), indent=1) if args.json else text(found))
    return 0
