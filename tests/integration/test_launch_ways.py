"""The ways to start a job: each does what plain Python and torchrun do, to the frame around the script."""

import json
import os
import sys
import threading
import zipfile
from pathlib import Path

import pytest

import distdbg
from tests.integration import jobs

pytestmark = pytest.mark.integration

FRAME = """
import atexit, os, pickle, sys
import beside
class Thing:
    pass
def last():
    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
    print("pickled at exit")
atexit.register(last)
here = os.path.basename
print("frame", here(__file__), os.path.isabs(__file__), here(sys.argv[0]), sys.argv[1:], here(sys.path[0]),
      __name__, __package__, type(__loader__).__name__, beside.VALUE, sys.modules["__main__"].Thing is Thing)
"""


def worker(target: list[str], folder: Path, **environ: str) -> jobs.Result:
    """The worker alone, recording to RUN below the folder; much quicker than a whole job."""
    command = [sys.executable, "-m", "distdbg.worker", *target]
    return jobs.run(command, folder, DISTDBG_RUN_DIR=str(folder / "run"), **environ)


def place(folder: Path) -> None:
    """A script, a link to it, a package and an archive, each beside what it imports."""
    inner = folder / "sub dir ü"
    inner.mkdir()
    (inner / "beside.py").write_text("VALUE = 7")
    (inner / "train.py").write_text(FRAME)
    (folder / "link.py").symlink_to(inner / "train.py")
    for package in ("pkg", "main_pkg"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("")
        (folder / package / "beside.py").write_text("VALUE = 8")
    (folder / "pkg" / "train.py").write_text(FRAME.replace("import beside", "from . import beside"))
    (folder / "main_pkg" / "__main__.py").write_text(FRAME.replace("import beside", "from . import beside"))
    with zipfile.ZipFile(folder / "job.zip", "w") as archive:
        archive.writestr("__main__.py", "import beside, sys\nprint('zip', beside.VALUE, sys.argv[1:])")
        archive.writestr("beside.py", "VALUE = 9")


@pytest.mark.parametrize(
    "target",
    [["sub dir ü/train.py"], ["link.py"], ["-m", "pkg.train"], ["-m", "main_pkg"], ["job.zip"]],
    ids=["relative", "link", "module", "package", "archive"],
)
def test_the_frame_is_that_of_plain_python(tmp_path: Path, target: list[str]) -> None:
    """__file__, sys.argv, sys.path, __package__, __loader__ and __main__ are as `python SCRIPT` has them."""
    place(tmp_path)
    plain = jobs.run([sys.executable, *target, "a", "--keep"], tmp_path)
    recorded = worker([*target, "a", "--keep"], tmp_path)
    assert plain.code == recorded.code == 0, recorded.err
    assert plain.out
    assert recorded.out == plain.out
    assert (tmp_path / "run" / "ranks").is_dir()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (["-m", "no.such"], "No module named 'no'"),
        (["-m", "nothing"], "nothing"),
        (["broken.py"], "'(' was never closed"),
    ],
)
def test_what_cannot_be_run_says_so_in_pythons_words(tmp_path: Path, target: list[str], words: str) -> None:
    """A module that is not there and a script that does not compile end with 1 and Python's own words."""
    (tmp_path / "broken.py").write_text("print('x'\n")
    plain = jobs.run([sys.executable, *target], tmp_path)
    recorded = worker(target, tmp_path)
    assert plain.code == recorded.code == 1
    for result in (plain, recorded):
        assert words in result.err.splitlines()[-1]


@pytest.mark.parametrize("how", ["7", "'words'", "None", "True", "300", "-1"])
def test_sys_exit_has_pythons_code(tmp_path: Path, how: str) -> None:
    """sys.exit ends the process with the code, and the words, that Python gives it."""
    (tmp_path / "train.py").write_text(f"import sys\nsys.exit({how})")
    plain = jobs.run([sys.executable, "train.py"], tmp_path)
    recorded = worker(["train.py"], tmp_path)
    assert (recorded.code, recorded.err) == (plain.code, plain.err)


def test_looking_for_torch_before_importing_it(tmp_path: Path) -> None:
    """importlib.util.find_spec("torch"), as many libraries do first, loses no hook; its loader answers as ever."""
    script = jobs.write(
        tmp_path,
        """
        import importlib.util, os
        assert "torch" not in __import__("sys").modules
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        assert importlib.util.find_spec("torch").loader.get_filename("torch").endswith("__init__.py")
        assert importlib.util.find_spec("torch") is not None
        import torch
        assert type(torch.__loader__).__name__ == type(torch.__spec__.loader).__name__ == "SourceFileLoader"
        torch.ones(1, requires_grad=True).sum().backward()
        """,
        preamble=False,
    )
    result = worker([str(script)], tmp_path)
    assert result.code == 0, result.err
    assert set(distdbg.load(result.run)["event"]) >= {"prehook", "posthook"}


def test_what_cannot_be_recorded_runs_all_the_same(tmp_path: Path) -> None:
    """A nonsensical setting, a removed current directory, no thread to be had: one line at most, and the job runs."""
    script = jobs.write(tmp_path, "print('ran')", preamble=False)
    result = worker([str(script)], tmp_path, DISTDBG_KEEP="inf")
    assert (result.code, result.out, result.err.count("not recording")) == (0, "ran\n", 1)
    gone = "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); "
    gone += f"import distdbg.worker; distdbg.worker.main([{str(script)!r}])"
    result = jobs.run([sys.executable, "-c", gone], tmp_path, DISTDBG_RUN_DIR=str(tmp_path / "run"))
    assert (result.code, result.out) == (0, "ran\n"), result.err
    gone = (
        'import threading\ndef no(self): raise RuntimeError("can\'t start new thread")\nthreading.Thread.start = no\n'
    )
    (tmp_path / "sitecustomize.py").write_text(gone)
    result = worker([str(script)], tmp_path, PYTHONPATH=str(tmp_path))
    assert (result.code, result.out, result.err.count("not recording")) == (0, "ran\n", 1)


def test_a_script_that_closes_its_streams(tmp_path: Path) -> None:
    """Recording that has to stop says so on stderr; where that is closed training still goes on."""
    script = jobs.write(
        tmp_path,
        """
        import errno
        sys.stderr.close()
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")
        os.posix_fallocate = full
        import distdbg.record.session as session
        writer = session.current().writer
        writer.maintain()
        while writer.problem is None:
            torch.ones(3, requires_grad=True).exp().sum().backward()
            writer.emit(1)
            for _ in range(2000):
                writer.emit(1)
        torch.ones(3, requires_grad=True).exp().sum().backward()
        os.write(1, b"trained")
        """,
    )
    result = worker([str(script)], tmp_path)
    assert result.out == "trained"


@pytest.mark.parametrize(
    "options",
    [
        ["--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", "29611"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "job ü"],
        ["--standalone", "--run-path", "--redirects", "0:3", "--tee", "1:1", "--log-dir", "logs"],
    ],
    ids=["static", "c10d", "standalone"],
)
def test_rendezvous_and_logs(tmp_path: Path, options: list[str]) -> None:
    """Static, c10d and standalone rendezvous, redirected and teed output: the job runs and is recorded."""
    script = jobs.write(
        tmp_path,
        """
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        os.write(1, f"sum {x.item()}\\n".encode())
        dist.destroy_process_group()
        """,
    )
    command = [sys.executable, "-m", "distdbg", "run", "--run-dir", "run", "--nproc-per-node", "2", *options]
    result = jobs.run([*command, str(script)], tmp_path)
    assert result.code == 0, result.err
    text = result.out + "".join(path.read_text() for path in tmp_path.glob("logs/**/std*.log"))
    assert text.count("sum 2.0") >= 2
    assert result.named == ("healthy", [])
    assert result.verdict["world_size"] == 2


def test_two_nodes_share_a_run_directory(tmp_path: Path) -> None:
    """Two launchers, as on two nodes, record into one directory; the verdict knows all ranks."""
    script = jobs.write(
        tmp_path,
        """
        dist.init_process_group("gloo")
        for _ in range(3):
            x = torch.ones(2, requires_grad=True)
            (x * 2).sum().backward()
            dist.all_reduce(x.grad)
        if RANK == 3:
            raise ValueError("of node 1")
        dist.barrier()
        """,
    )
    results: dict[int, jobs.Result] = {}

    def node(number: int) -> None:
        (tmp_path / str(number)).mkdir()
        command = [sys.executable, "-m", "distdbg", "run", "--run-dir", str(tmp_path / "run"), "--nproc-per-node", "2"]
        command += ["--nnodes", "2", "--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", "29612"]
        results[number] = jobs.run([*command, str(script)], tmp_path / str(number))

    threads = [threading.Thread(target=node, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[number].code for number in range(2)] == [1, 1]
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (verdict["kind"], [c["rank"] for c in verdict["culprits"]]) == ("exception", [3])
    assert (verdict["world_size"], verdict["missing_ranks"]) == (4, [])
    assert len(list((tmp_path / "run").glob("launcher-*.jsonl"))) == 2


def test_a_directory_in_use_stops_before_anything_starts(tmp_path: Path) -> None:
    """--run-dir that holds something is refused with exit code 2 and what to do, and left as it was."""
    script = jobs.write(tmp_path, "print('ran')", preamble=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "theirs").write_text("x")
    result = jobs.distdbg(script)
    assert result.code == 2
    assert "is not empty; give --run-dir a new directory" in result.err
    assert "Traceback" not in result.err
    assert "ran" not in result.out
    assert os.listdir(tmp_path / "run") == ["theirs"]


def test_a_shadowing_module_in_the_current_directory(tmp_path: Path) -> None:
    """A random.py of the user's beside which a job is started is not taken for Python's by the verdict."""
    (tmp_path / "src").mkdir()
    script = jobs.write(tmp_path / "src", "print('ran')", preamble=False)
    for name in ("random", "statistics", "secrets"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is not the library')")
    code = "import sys; sys.path = [p for p in sys.path if p]; from distdbg.cli import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        code,
        "run",
        "--run-dir",
        "run",
        "--nproc-per-node",
        "1",
        "--standalone",
        str(script),
    ]
    result = jobs.run(command, tmp_path)
    assert (result.code, result.out) == (0, "ran\n"), result.err
    assert result.named == ("healthy", []), result.err
    assert (tmp_path / "run" / "timeline.csv").exists()
