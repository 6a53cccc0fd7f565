"""The recipes of launch/, with stand-ins for srun, scontrol and mpirun that start two processes here."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import Result, run, write

pytestmark = pytest.mark.integration

LAUNCH = Path(__file__).resolve().parents[2] / "launch"

# Rank 1 overwrites what exp() has saved for its backward: an error in a C++ node at step 2.
JOB = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Scale(nn.Module):
    def forward(self, x, spoil):
        y = x.exp()
        if spoil:
            y.mul_(2)
        return y

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale, self.outer = nn.Linear(4, 4), Scale(), nn.Linear(4, 1)

    def forward(self, x, spoil):
        return self.outer(self.scale(self.inner(x), spoil))

def main():
    assert sys.argv[1:] == ["--lr", "0.1"], sys.argv
    dist.init_process_group("gloo", **GROUP)
    rank = dist.get_rank()
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        model(torch.ones(2, 4), rank == 1 and step == 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

main()
"""
# Starts what follows its options twice, with the variables that the real one sets.
STAND_IN = """#!{python}
import os, subprocess, sys
rest = sys.argv[1:]
assert "-np" not in rest or rest[rest.index("-np") + 1] == "2", rest
command = rest[rest.index("bash"):]
names = {names}
ranks = [
    subprocess.Popen(command, env=dict(os.environ, **dict(zip(names, (str(rank), "2", str(rank))))))
    for rank in range(2)
]
sys.exit(max(rank.wait() for rank in ranks))
"""
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def job(folder: Path, group: str = "{}") -> Path:
    return write(folder, JOB.replace("**GROUP", f"**{group}"), preamble=False)


def stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def around(folder: Path, **environ: str) -> dict[str, str]:
    """The environment of a recipe: its run directory, a free port, the stand-ins first on PATH."""
    return {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "DISTDBG_RUN_DIR": str(folder / "run"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        **environ,
    }


def diagnosed(run_dir: Path) -> dict[str, Any]:
    """What `python -m distdbg diagnose` says, after a look at the shards."""
    metas = [json.loads(path.read_text()) for path in run_dir.glob("ranks/*/meta.json")]
    assert sorted((meta["rank"], meta["world_size"]) for meta in metas) == [(0, 2), (1, 2)]
    command = [sys.executable, "-m", "distdbg", "diagnose", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(verdict: dict[str, Any]) -> None:
    assert verdict["kind"] == "exception", verdict["summary"]
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [1]
    culprit = verdict["culprits"][0]
    assert (culprit["node"], culprit["module"], culprit["step"]) == ("ExpBackward0", "scale", 2)
    assert verdict["missing_ranks"] == []


@pytest.mark.parametrize("names", [SLURM, OPEN_MPI], ids=["slurm", "open-mpi"])
def test_ranks_from_the_launchers_own_variables(tmp_path: Path, names: tuple[str, str, str]) -> None:
    """Two workers started by hand know their rank from Slurm's or Open MPI's variables alone."""
    script = job(tmp_path, f"dict(rank=int(os.environ['{names[0]}']), world_size=int(os.environ['{names[1]}']))")
    script.write_text("import os\n" + script.read_text())
    env = {**os.environ, **around(tmp_path), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "distdbg.worker", str(script), "--lr", "0.1"],
            env={**env, names[0]: str(rank), names[1]: "2", names[2]: str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        codes = [worker.wait(timeout=60) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert codes[1] == 1
    check(diagnosed(tmp_path / "run"))


def test_slurm(tmp_path: Path) -> None:
    """The Slurm recipe passes ranks and arguments on, keeps the exit code and prints the verdict."""
    stand_in(tmp_path, "srun", STAND_IN.format(python=sys.executable, names=SLURM))
    stand_in(tmp_path, "scontrol", "#!/bin/sh\necho 127.0.0.1\necho node2\n")
    env = around(tmp_path, SLURM_JOB_ID="77", SLURM_JOB_NODELIST="node[1-2]")
    del env["MASTER_ADDR"]
    done = run(["bash", str(LAUNCH / "slurm.sbatch"), str(job(tmp_path)), "--lr", "0.1"], tmp_path, **env)
    check_recipe(done)


def test_open_mpi(tmp_path: Path) -> None:
    """The Open MPI recipe passes ranks and arguments on, keeps the exit code and prints the verdict."""
    stand_in(tmp_path, "mpirun", STAND_IN.format(python=sys.executable, names=OPEN_MPI))
    done = run(["bash", str(LAUNCH / "mpi.sh"), str(job(tmp_path)), "--lr", "0.1"], tmp_path, **around(tmp_path))
    check_recipe(done)


def check_recipe(done: Result) -> None:
    assert done.code == 1, done.err
    assert "distdbg: rank 1 failed in backward of step 2 (node ExpBackward0" in done.out
    check(done.verdict)
    check(diagnosed(done.run))


def test_kubernetes(tmp_path: Path) -> None:
    """What a pod of the Kubernetes recipe runs, with its variables, makes the shards of an indexed Job."""
    recipe = (LAUNCH / "kubernetes.yaml").read_text()
    lines = re.search(r"args:\n\s+- \|\n((?:\s{14}.*\n)+)", recipe)
    assert lines is not None
    command = re.sub(r"(?m)^\s{14}", "", lines[1]).replace("/app/train.py --lr 1e-3", f"{job(tmp_path)} --lr 0.1")
    values = dict(re.findall(r"\{name: (\w+), value: \"?([^}\"]+)\"?\}", recipe))
    assert values["WORLD_SIZE"] == re.search(r"completions: (\d+)", recipe)[1]  # type: ignore[index]
    stand_in(tmp_path, "kubelet", STAND_IN.format(python=sys.executable, names=("JOB_COMPLETION_INDEX", "WORLD_SIZE")))
    stand_in(tmp_path, "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    run([str(tmp_path / "bin" / "kubelet"), "bash", "-c", command], tmp_path, **{**values, **around(tmp_path)})
    check(diagnosed(tmp_path / "run"))


def test_torchrun_wrapper(tmp_path: Path) -> None:
    """The wrapper takes torchrun's options, and with DISTDBG=0 it is torchrun."""
    command = ["bash", str(LAUNCH / "distdbg-torchrun"), "--standalone", "--nproc-per-node", "2"]
    script = write(tmp_path, "print('rank', RANK, sys.argv[1], os.environ.get('DISTDBG_RUN_DIR', 'plain'))")
    done = run([*command, str(script), "x"], tmp_path, PYTHON=sys.executable, DISTDBG="0")
    assert done.code == 0
    assert sorted(done.out.split("\n"))[-2:] == ["rank 0 x plain", "rank 1 x plain"]
    done = run([*command, "--run-dir", str(tmp_path / "run"), str(script), "x"], tmp_path, PYTHON=sys.executable)
    assert done.code == 0
    assert done.verdict["kind"] == "healthy"
