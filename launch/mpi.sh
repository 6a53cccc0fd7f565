#!/usr/bin/env bash
# mpirun (Open MPI) starts the ranks. The directory must be on a file system that all hosts see.
#   NP=4 launch/mpi.sh train.py --lr 1e-3
#   NP=16 MPI_OPTIONS="--hostfile hosts" MASTER_ADDR=node01 launch/mpi.sh train.py
# MPIRUN names another command than mpirun.
set -uo pipefail
python="${PYTHON:-python3}"
export DISTDBG_RUN_DIR="${DISTDBG_RUN_DIR:-$PWD/distdbg-runs/mpi-$(date +%Y%m%d-%H%M%S)}"
export MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
export MASTER_PORT="${MASTER_PORT:-29500}"
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}"
export python

# MPI_OPTIONS holds several words on purpose.
# shellcheck disable=SC2086
"${MPIRUN:-mpirun}" -np "${NP:-2}" ${MPI_OPTIONS:-} \
    -x DISTDBG_RUN_DIR -x MASTER_ADDR -x MASTER_PORT -x TORCH_FR_BUFFER_SIZE -x python \
    bash -c '
    export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK
    exec "$python" -m distdbg.worker "$@"' distdbg "$@"
code=$?

"$python" -m distdbg diagnose "$DISTDBG_RUN_DIR" --write
exit $code
