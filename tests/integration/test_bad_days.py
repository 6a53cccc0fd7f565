"""Jobs as they go wrong, or are merely unusual: the user's run is theirs, and the answer is clear."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import distdbg
from tests.integration import jobs

pytestmark = pytest.mark.integration

TRAIN = """
dist.init_process_group("gloo")
model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(scale=1.0):
    loss = (model(torch.ones(2, 4)) * scale).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_syntax_error(tmp_path: Path) -> None:
    """A script that does not compile fails as under torchrun, with Python's own words."""
    script = jobs.write(tmp_path, "print('x'\n", preamble=False)
    result = jobs.distdbg(script)
    assert result.code == 1
    assert "SyntaxError" in result.err
    kind, ranks = result.named  # torchrun ends the second rank as soon as the first has failed
    assert kind == "exception"
    assert ranks in ([0], [1], [0, 1])


def test_no_torch_no_distributed_no_backward(tmp_path: Path) -> None:
    """Scripts that use little of torch, or none, run as ever and end healthy."""
    plain = jobs.write(tmp_path, "print('plain', __name__, __file__.endswith('train.py'))", preamble=False)
    result = jobs.distdbg(plain)
    assert (result.code, result.named) == (0, ("healthy", []))
    assert result.out.count("plain __main__ True") == 2
    (tmp_path / "b").mkdir()
    forward = jobs.write(tmp_path / "b", "print(nn.Linear(2, 2)(torch.ones(1, 2)).shape)")
    result = jobs.distdbg(forward, nproc=1)
    assert (result.code, result.named) == (0, ("healthy", []))


def test_exit_codes_and_the_frame_of_the_script(tmp_path: Path) -> None:
    """sys.exit in a rank ends the run as torchrun does; argv, excepthook and atexit are the script's."""
    script = jobs.write(
        tmp_path,
        """
        import atexit, sys
        print("argv", sys.argv[1:])
        atexit.register(lambda: print("bye"))
        def hook(kind, error, trace):
            print("hooked", kind.__name__, trace.tb_frame.f_code.co_filename.endswith("train.py"))
        sys.excepthook = hook
        class Broken(Exception):
            def __str__(self):
                raise RuntimeError("no words")
        raise Broken()
        """,
        preamble=False,
    )
    result = jobs.distdbg(script, nproc=1, args=("--keep", "3", "--run-dir", "x"))
    assert result.code == 1
    assert "argv ['--keep', '3', '--run-dir', 'x']" in result.out
    assert "hooked Broken True" in result.out
    assert "bye" in result.out
    assert result.named == ("exception", [0])
    assert "Broken" in result.verdict["culprits"][0]["error"]


def test_the_traceback_is_in_torchruns_summary(tmp_path: Path) -> None:
    """torchrun's own summary shows the failed rank's traceback, as with @record."""
    script = jobs.write(tmp_path, "raise ValueError('völlig kaputt ' + 'x' * 2000)", preamble=False)
    result = jobs.distdbg(script, nproc=1)
    summary = result.err[result.err.index("Root Cause") :]
    assert "ValueError: völlig kaputt" in summary
    assert result.named == ("exception", [0])


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The job runs without recording, with its own exit code, and one line says so."""
    script = jobs.write(tmp_path, "import sys; print('ran'); sys.exit(0)", preamble=False)
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "distdbg", "run", "--run-dir", str(tmp_path / "file" / "run"), "--standalone"]
    result = jobs.run([*command, "--nproc-per-node", "2", str(script)], tmp_path)
    assert result.code == 0
    assert result.out.count("ran") == 2
    assert result.err.count("not recording") == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 14 MB: room for the first segments of two ranks, and little more."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=14m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


FILLS = """
    x = torch.ones(2, requires_grad=True)
    for i in range(200):
        y = x
        for _ in range(1000):
            y = y * 1.0
        y.sum().backward()
    os.write(1, f"trained {x.grad.tolist()}\\n".encode())
"""


def test_a_full_disk_in_the_middle(tmp_path: Path, small_disk: Path) -> None:
    """When the disk fills up recording stops with one line a rank, and training goes on to its end."""
    script = jobs.write(tmp_path, FILLS)
    command = [sys.executable, "-m", "distdbg", "run", "--run-dir", str(small_disk / "run"), "--standalone"]
    result = jobs.run([*command, "--nproc-per-node", "2", "--keep", "all", str(script)], tmp_path)
    assert result.code == 0, result.err
    assert result.out.count("trained [200.0, 200.0]") == 2
    said = [line for line in result.err.splitlines() if "no space left" in line and "training goes on" in line]
    assert len(said) == 2, result.err
    assert "Traceback" not in result.err
    verdict = json.loads((small_disk / "run" / "verdict.json").read_text())
    assert (verdict["kind"], verdict["culprits"]) == ("healthy", [])
    assert sum("recording stopped" in sentence for sentence in verdict["evidence"]) == 2


def test_a_full_disk_is_no_stall(tmp_path: Path, small_disk: Path) -> None:
    """A rank whose record has stopped is not taken for one that stalls, and its job not ended for it."""
    script = jobs.write(tmp_path, FILLS + "    time.sleep(6)\n")
    command = [sys.executable, "-m", "distdbg", "run", "--run-dir", str(small_disk / "run"), "--standalone"]
    command += ["--stall-timeout", "2", "--on-stall", "kill", "--nproc-per-node", "1", "--keep", "all"]
    result = jobs.run([*command, str(script)], tmp_path)
    assert (result.code, result.out) == (0, "trained [200.0, 200.0]\n"), result.err
    assert "nothing has moved" not in result.err


def test_a_disk_that_was_full_before(tmp_path: Path, small_disk: Path) -> None:
    """On a disk with no room at all the job runs with its own exit code, and each process says it once."""
    script = jobs.write(tmp_path, "import sys; print('ran'); sys.exit(3)", preamble=False)
    with open(small_disk / "filler", "wb") as file:
        while True:
            try:
                file.write(b"x" * (1 << 16))
                file.flush()
            except OSError:
                break
    command = [sys.executable, "-m", "distdbg", "run", "--run-dir", str(small_disk / "run"), "--standalone"]
    result = jobs.run([*command, "--nproc-per-node", "1", str(script)], tmp_path)
    assert (result.code, result.out) == (1, "ran\n")
    assert "exitcode  : 3" in result.err
    assert result.err.count("not recording") == 1, result.err
    assert "distdbg/cli" not in result.err


def test_interrupting_a_run_that_hangs(tmp_path: Path) -> None:
    """Ctrl-C ends the job soon, leaves no process, and the verdict tells who it hung on."""
    script = jobs.write(
        tmp_path,
        TRAIN
        + """
for i in range(4):
    step()
if RANK == 1:
    time.sleep(5)
    print("hanging")
    while True:
        time.sleep(600)
step()
""",
    )
    result = jobs.distdbg(script, interrupt_after="hanging")
    assert result.code != 0
    assert result.named == ("stalled", [1])
    assert result.verdict["culprits"][0]["phase"] == "loop"
    (log,) = result.run.glob("launcher-*.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    (interrupted,) = [event["t_unix_ns"] for event in events if event["event"] == "interrupted"]
    # The file is written again at the end, so this holds for the first time it was written, too.
    assert (result.run / "verdict.json").stat().st_mtime_ns - interrupted < 10e9
    assert events[-1]["event"] == "end"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_ranks_that_save_at_an_interruption_may_finish(tmp_path: Path, name: str) -> None:
    """A handler that saves for longer than a stuck rank would be given, while the others wait for it, is left alone."""
    script = jobs.write(
        tmp_path,
        TRAIN
        + f"""
import signal
def save(*_):
    begun = time.monotonic()
    if RANK == 0:
        while time.monotonic() - begun < 6:
            torch.save(model.state_dict(), "model.pt")
    dist.barrier()
    os.write(1, b"saved ")
    os._exit(0)
signal.signal(signal.{name}, save)
for i in range(3):
    step()
os.write(1, b"ready ")
while True:
    time.sleep(0.05)
""",
    )
    result = jobs.distdbg(script, interrupt_after="ready ready", interrupt_with=getattr(signal, name))
    assert result.out.count("saved") == 2, result.err
    assert result.code != 0


def test_a_stopped_rank_is_killed_and_nothing_is_left(tmp_path: Path) -> None:
    """--on-stall kill ends a job with a SIGSTOPped rank, with a non-zero exit code."""
    script = jobs.write(
        tmp_path,
        TRAIN
        + """
import signal
for i in range(6):
    if RANK == 0 and i == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    step()
""",
    )
    result = jobs.distdbg(script, "--stall-timeout", "4", "--on-stall", "kill")
    assert result.code != 0
    assert result.named == ("stalled", [0])
    assert "SIGSTOP" in result.verdict["cause"]


def test_a_stall_that_recovers(tmp_path: Path) -> None:
    """With --on-stall report a job that hangs for a while is reported, goes on, and ends healthy."""
    script = jobs.write(
        tmp_path,
        TRAIN
        + """
for i in range(6):
    if RANK == 1 and i == 3:
        time.sleep(8)
    step()
dist.destroy_process_group()
time.sleep(0.2)
""",
    )
    result = jobs.distdbg(script, "--stall-timeout", "4")
    assert result.code == 0
    assert "nothing has moved" in result.err
    assert "the job moves again" in result.err
    assert result.named == ("healthy", [])
    assert any("recovered" in sentence for sentence in result.verdict["evidence"])


def test_restarts(tmp_path: Path) -> None:
    """A second attempt that succeeds ends healthy and tells of the first; the attempts' shards are apart."""
    script = jobs.write(
        tmp_path,
        """
        import os
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            raise RuntimeError("first try")
        """,
        preamble=False,
    )
    result = jobs.distdbg(script, "--max-restarts", "1")
    assert result.code == 0
    assert result.named == ("healthy", [])
    assert result.verdict["attempt"] == 1
    assert any("attempt 0 failed" in sentence for sentence in result.verdict["evidence"])
    assert len(list((result.run / "ranks").iterdir())) == 4


def test_restarts_that_all_fail(tmp_path: Path) -> None:
    """Where the last attempt fails like the first the verdict is about the last, and tells how many there were."""
    script = jobs.write(
        tmp_path,
        """
        import os
        if os.environ["RANK"] == "1":
            raise RuntimeError("try " + os.environ["TORCHELASTIC_RESTART_COUNT"])
        import time
        time.sleep(30)
        """,
        preamble=False,
    )
    result = jobs.distdbg(script, "--max-restarts", "1")
    assert result.code == 1
    assert result.named == ("exception", [1])
    assert result.verdict["attempt"] == 1
    assert result.verdict["culprits"][0]["error"] == "RuntimeError: try 1"
    assert any("attempt 0 failed" in sentence for sentence in result.verdict["evidence"])


def test_an_exit_that_python_does_not_see(tmp_path: Path) -> None:
    """os._exit in the middle of training is a rank that died, with its code; the other only waited."""
    script = jobs.write(
        tmp_path,
        TRAIN
        + """
for i in range(5):
    if RANK == 1 and i == 3:
        os._exit(7)
    step()
""",
    )
    result = jobs.distdbg(script)
    assert result.code == 1
    assert result.named == ("died", [1])
    assert "7" in result.verdict["cause"] + result.verdict["summary"]
    assert result.verdict["culprits"][0]["step"] == 3


def test_a_huge_message_in_any_script(tmp_path: Path) -> None:
    """Megabytes of text, lone surrogates and escapes in an exception: a short verdict, also where output is ASCII."""
    script = jobs.write(
        tmp_path,
        """
        raise ValueError("völlig \\x1b[31m \\ud800 kaputt\\n" + "x" * 3_000_000)
        """,
        preamble=False,
    )
    result = jobs.distdbg(script, nproc=1, PYTHONIOENCODING="ascii:backslashreplace", LC_ALL="C", PYTHONUTF8="0")
    assert result.code == 1
    assert result.named == ("exception", [0]), result.err[-2000:]
    assert result.verdict["culprits"][0]["error"].startswith("ValueError: v")
    assert len(json.dumps(result.verdict)) < 20_000
    last = result.err[result.err.rindex("distdbg: ") :]
    assert "ValueError: v" in last
    assert "\x1b" not in last
    assert len(last) < 5_000


def test_a_run_directory_that_is_removed_meanwhile(tmp_path: Path) -> None:
    """A script that sweeps away the run directory keeps its exit code, and nothing of ours shows a traceback."""
    script = jobs.write(
        tmp_path,
        """
        import shutil
        for i in range(3):
            torch.ones(2, requires_grad=True).exp().sum().backward()
        shutil.rmtree("run")
        time.sleep(1.5)
        for i in range(3):
            torch.ones(2, requires_grad=True).exp().sum().backward()
        print("ran")
        """,
    )
    result = jobs.distdbg(script, nproc=1)
    assert (result.code, result.out) == (0, "ran\n")
    assert "Traceback" not in result.err


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    """`distdbg run ... 2>&1 | head -1` ends with the job's own exit code, and the verdict is written."""
    script = jobs.write(tmp_path, "import sys, time; time.sleep(1); sys.exit(4)", preamble=False)
    inner = f"{sys.executable} -m distdbg run --run-dir run --standalone --nproc-per-node 1 {script}"
    pipe = f"set -o pipefail; {{ {inner}; echo code $? > code.txt; }} 2>&1 | head -1"
    jobs.run(["bash", "-c", pipe], tmp_path)
    assert (tmp_path / "code.txt").read_text() == "code 1\n"
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert verdict["kind"] == "exception"


def test_a_module_and_torchruns_other_options(tmp_path: Path) -> None:
    """-m, --log-dir, --tee and a static rendezvous work as under torchrun."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "side.py").write_text("VALUE = 7")
    (package / "main.py").write_text(
        "import sys\nfrom .side import VALUE\nprint('module', VALUE, sys.argv[1:], __package__)"
    )
    result = jobs.distdbg(
        ["-m", "pkg.main", "a"], "--log-dir", str(tmp_path / "logs"), "--tee", "3", folder=str(tmp_path)
    )
    assert result.code == 0
    assert result.out.count("module 7 ['a'] pkg") == 2
    assert list((tmp_path / "logs").rglob("stdout.log"))


def test_processes_that_the_script_starts(tmp_path: Path) -> None:
    """DataLoader workers, spawn and fork pools and subprocesses work, and write nothing into the shards."""
    script = jobs.write(
        tmp_path,
        """
        import multiprocessing, pickle, subprocess
        from torch.utils.data import DataLoader
        class Thing:
            pass
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    assert pool.map(double, [1, 2]) == [2, 4]
            assert len(list(DataLoader(list(range(8)), num_workers=2, batch_size=2))) == 4
            assert subprocess.run([sys.executable, "-c", "print('child')"], check=True).returncode == 0
            torch.ones(1, requires_grad=True).sum().backward()
            print("done")
        """,
    )
    result = jobs.distdbg(script, nproc=1)
    assert result.code == 0, result.err
    assert "done" in result.out
    assert result.named == ("healthy", [])
    assert len(list((result.run / "ranks").iterdir())) == 1


def test_start_inside_a_launched_job(tmp_path: Path) -> None:
    """distdbg.start() in a job that is recorded already is an error that says so, and the job is unharmed."""
    script = jobs.write(
        tmp_path,
        """
        import distdbg
        try:
            distdbg.start("elsewhere")
        except distdbg.DistdbgError as error:
            print("refused:", error)
        try:
            distdbg.start()
        except distdbg.DistdbgError:
            print("again")
        torch.ones(1, requires_grad=True).sum().backward()
        """,
    )
    result = jobs.distdbg(script, nproc=1)
    assert result.code == 0
    assert "refused: already recording" in result.out
    assert "again" in result.out
    assert result.named == ("healthy", [])
    assert "prehook" in set(distdbg.load(result.run)["event"])


def test_stopping_in_a_launched_job(tmp_path: Path) -> None:
    """distdbg.stop() in the script ends the record, and the silence that follows is taken for no stall."""
    script = jobs.write(
        tmp_path,
        """
        import distdbg
        torch.ones(1, requires_grad=True).sum().backward()
        distdbg.stop()
        time.sleep(7)
        print("done")
        """,
    )
    result = jobs.distdbg(script, "--stall-timeout", "2", "--on-stall", "kill", nproc=1)
    assert (result.code, result.out) == (0, "done\n"), result.err
    assert "nothing has moved" not in result.err
    assert result.verdict["kind"] in ("healthy", "unknown"), result.verdict


def test_the_scripts_own_signal_handlers(tmp_path: Path) -> None:
    """Handlers for SIGTERM and SIGUSR1, and faulthandler's timer, are the script's when it wants them."""
    script = jobs.write(
        tmp_path,
        """
        import faulthandler, os, signal, sys, time
        seen = []
        signal.signal(signal.SIGUSR1, lambda *_: seen.append("usr1"))
        signal.signal(signal.SIGTERM, lambda *_: seen.append("term"))
        faulthandler.dump_traceback_later(1, file=open("trace.txt", "w"))
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2)
        print("seen", seen, "Timeout" in open("trace.txt").read())
        """,
        preamble=False,
    )
    result = jobs.distdbg(script, nproc=1)
    assert result.code == 0
    assert "seen ['usr1', 'term'] True" in result.out


def test_without_the_launcher(tmp_path: Path) -> None:
    """The worker alone records under any launcher; the command then reads what a killed rank left."""
    script = jobs.write(
        tmp_path,
        """
        import signal
        for i in range(3):
            (torch.ones(2, requires_grad=True) * 2).sum().backward()
        x = torch.ones(2, requires_grad=True)
        y = (x * 2).exp()
        y.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL))
        y.sum().backward()
        """,
    )
    env = {"DISTDBG_RUN_DIR": str(tmp_path / "run"), "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    result = jobs.run([sys.executable, "-m", "distdbg.worker", str(script)], tmp_path, **env)
    assert result.code == -signal.SIGKILL
    verdict = distdbg.diagnose(tmp_path / "run")
    assert (verdict["kind"], [c["rank"] for c in verdict["culprits"]]) == ("died", [0])
    assert verdict["culprits"][0]["phase"] == "backward"


def test_a_place_that_the_worker_cannot_write(tmp_path: Path) -> None:
    """A worker with no place to record runs the script all the same."""
    script = jobs.write(tmp_path, "print('ran')", preamble=False)
    result = jobs.run([sys.executable, "-m", "distdbg.worker", str(script)], tmp_path, DISTDBG_RUN_DIR="/proc/nowhere")
    assert result.code == 0
    assert result.out.strip() == "ran"
    assert result.err.count("not recording") == 1


def test_environment_set_before_torch_counts(tmp_path: Path) -> None:
    """torch is not imported before the script does so: what it sets up first still has its effect."""
    script = jobs.write(
        tmp_path,
        """
        import os, sys
        assert "torch" not in sys.modules
        os.environ["OMP_NUM_THREADS"] = "2"
        import torch
        print("threads", torch.get_num_threads())
        """,
        preamble=False,
    )
    result = jobs.distdbg(script, nproc=1)
    assert "threads 2" in result.out


def test_a_killed_launcher_leaves_readable_shards(tmp_path: Path) -> None:
    """If the launcher itself is killed, the shards still give an answer."""
    script = jobs.write(
        tmp_path,
        TRAIN
        + """
import signal
for i in range(4):
    step()
if RANK == 0:
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(0.5)
""",
    )
    result = jobs.distdbg(script, orphans=True)
    assert result.code == -signal.SIGKILL
    verdict = distdbg.diagnose(result.run)
    assert verdict["kind"] in ("healthy", "unknown", "died")
    assert json.loads((result.run / "run.json").read_text())["nproc_per_node"] == "2"
