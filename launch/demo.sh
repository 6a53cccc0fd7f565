#!/usr/bin/env bash
# The demo: a job of four ranks, one of which fails in a backward node. Ends with the verdict.
# Exits with 0 if the verdict names rank 2 and an exception. The files go to DISTDBG_DEMO_DIR or distdbg-runs/demo-<time>.
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
python="${PYTHON:-python3}"
run="${DISTDBG_DEMO_DIR:-distdbg-runs/demo-$(date +%Y%m%d-%H%M%S)}"

if ! "$python" -c 'import distdbg, torch' 2>/dev/null; then
    echo "demo.sh: $python has no distdbg and torch; use 'make demo', or set PYTHON to one that has" >&2
    exit 2
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
echo "\$ distdbg run --run-dir $run --standalone --nproc-per-node 4 launch/demo.py"
"$python" -m distdbg run --run-dir "$run" --standalone --nproc-per-node 4 "$here/demo.py"
echo "(exit code $?, as torchrun's)"

"$python" "$here/demo_check.py" "$run"
