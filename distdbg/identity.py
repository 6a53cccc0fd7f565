"""Which process this is: rank, world size, attempt, run, host, from what the launchers export.

torchrun, Slurm and Open MPI each have their own variables; the first launcher that names a rank wins.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass

_LAUNCHERS = (  # (launcher, rank, world size, local rank)
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class Identity:
    """Who writes a shard. ``world_size`` is 1 and ``rank`` 0 where no launcher says otherwise."""

    rank: int
    world_size: int
    local_rank: int
    attempt: int
    run_id: str
    host: str
    pid: int
    launcher: str

    @property
    def folder(self) -> str:
        """Name of the shard's folder; unique for a rank, an attempt, a host and a process."""
        host = "".join(c if c.isalnum() or c in "-." else "_" for c in self.host)
        return f"rank{self.rank:05d}-attempt{self.attempt:03d}-{host}-{self.pid}"

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def _number(text: str | None, default: int) -> int:
    try:
        return int(text) if text is not None else default
    except ValueError:
        return default


def identify(environ: Mapping[str, str] | None = None) -> Identity:
    """Read the identity of this process from ``environ`` (default: ``os.environ``)."""
    env = os.environ if environ is None else environ
    launcher, rank, world, local = "none", 0, 1, 0
    for name, rank_key, world_key, local_key in _LAUNCHERS:
        if env.get(rank_key, "").isdigit():
            launcher, rank = name, int(env[rank_key])
            world, local = _number(env.get(world_key), 1), _number(env.get(local_key), 0)
            break
    attempt = _number(env.get("TORCHELASTIC_RESTART_COUNT", env.get("SLURM_RESTART_COUNT")), 0)
    run_id = env.get("TORCHELASTIC_RUN_ID") or env.get("SLURM_JOB_ID") or "none"
    return Identity(rank, world, local, attempt, run_id, socket.gethostname(), os.getpid(), launcher)
