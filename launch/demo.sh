#!/usr/bin/env bash
# The main job: four ranks, one of which fails in a backward node. Ends with the verdict; exits 0 if it named the rank.
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
runs="${DISTDBG_DEMO_DIR:-distdbg-runs/demo-$(date +%Y%m%d-%H%M%S)}"

echo "\$ distdbg run --run-dir $runs --standalone --nproc-per-node 4 launch/demo.py"
distdbg run --run-dir "$runs" --standalone --nproc-per-node 4 "$here/demo.py"
echo "(exit code $?, as torchrun's)"

echo
echo "The last events of rank 2 in $runs/timeline.csv: a prehook without its posthook is where it failed"
python - "$runs" <<'PY'
import json
import sys

import distdbg

run = sys.argv[1]
events = distdbg.load(run)
rank2 = events[(events["rank"] == 2) & events["event"].isin(["prehook", "posthook", "backward_raised"])]
rank2 = rank2.assign(detail=rank2["detail"].astype(str).str.slice(0, 60))
print(rank2[["time_s", "step", "event", "node", "node_index", "module", "detail"]].tail(5).to_string(index=False))
verdict = json.load(open(f"{run}/verdict.json"))
right = verdict["kind"] == "exception" and [c["rank"] for c in verdict["culprits"]] == [2]
sys.exit(0 if right else 1)
PY
