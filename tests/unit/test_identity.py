"""Who a process is, from what the launchers export."""

from distdbg.identity import identify


def test_torchrun() -> None:
    """torchrun's variables name rank, world size, attempt and run."""
    found = identify(
        {
            "RANK": "3",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_RUN_ID": "none",
        }
    )
    assert (found.rank, found.world_size, found.local_rank, found.attempt, found.launcher) == (3, 8, 1, 2, "torchrun")


def test_slurm_and_mpi() -> None:
    """Slurm and Open MPI name ranks where torchrun does not."""
    slurm = identify({"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77"})
    assert (slurm.rank, slurm.world_size, slurm.run_id, slurm.launcher) == (5, 6, "77", "slurm")
    mpi = identify({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"})
    assert (mpi.rank, mpi.world_size, mpi.launcher) == (2, 4, "mpi")


def test_nobody_says() -> None:
    """A plain process is rank 0 of 1, also when a variable is nonsense."""
    assert identify({}).world_size == 1
    assert identify({"RANK": "x", "WORLD_SIZE": "9"}).rank == 0


def test_folders_differ() -> None:
    """Two ranks, attempts or processes never share a folder, and a folder's name is harmless."""
    one = identify({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    two = identify({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"})
    assert one.folder != two.folder
    assert "/" not in one.folder
