"""Shows what the demo left: its files, and the last rows of the failed rank. Exits with 0 if the verdict is right."""

import json
import sys
from pathlib import Path

import pandas as pd

COLUMNS = ["time_s", "step", "event", "node", "node_index", "module", "parameter"]


def main(run_dir: Path) -> int:
    if not (run_dir / "verdict.json").is_file():
        print(f"demo: there is no verdict.json in {run_dir}", file=sys.stderr)
        return 1
    verdict = json.loads((run_dir / "verdict.json").read_text())
    print(f"\nThe files in {run_dir}:")
    for path in sorted(path for path in run_dir.iterdir() if path.is_file()):
        print(f"  {path.name:<40} {path.stat().st_size / 1024:7,.0f} kB")
    print(f"  {'ranks/':<40} {len(list((run_dir / 'ranks').iterdir()))} shards, one for each rank")

    events = pd.read_csv(run_dir / "timeline.csv", dtype={"node_index": "Int64"}, low_memory=False)
    last = events[(events["rank"] == 2) & events["event"].isin(["prehook", "posthook", "backward_raised"])]
    print("\nThe end of backward on rank 2, from timeline.csv. A prehook without its posthook is the open node:")
    print(last[COLUMNS].tail(6).to_string(index=False, na_rep=""))

    named = verdict["kind"], [culprit["rank"] for culprit in verdict["culprits"]]
    if named != ("exception", [2]):
        print(f"demo: the verdict should be an exception of rank 2, it is {named}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
