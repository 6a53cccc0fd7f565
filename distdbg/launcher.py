"""`distdbg run`: torchrun's own parser and agent in this process, with ears.

torchrun's options, output and exit code are torchrun's. Around them: a run directory, the worker that
records on each rank, a monitor thread, and at the end the verdict and the timeline.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from distdbg import processes, schema
from distdbg.errors import BuildError, LaunchError, say
from distdbg.monitor import EventLog, Monitor, _plain_environ, diagnose
from distdbg.native import build
from distdbg.pace import Pace

MERGE_LIMIT_BYTES = 400 << 20


def build_parser() -> ArgumentParser:
    """torchrun's parser with our options added; they come before SCRIPT, like torchrun's."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "distdbg run"
    parser.description = "Launch a job as torchrun does (all of its options hold), recorded; ends with the verdict."
    ours = parser.add_argument_group("distdbg")
    ours.add_argument("--run-dir", type=Path, help="where to record (default: distdbg-runs/<time>-<script>)")
    ours.add_argument(
        "--stall-timeout",
        type=_seconds,
        metavar="S",
        help="seconds without an event on any rank that are a stall (default: from the job's own pace)",
    )
    ours.add_argument("--on-stall", choices=("report", "kill"), default="report", help="default: report")
    ours.add_argument("--numerics", action="store_true", help="look for non-finite values and parting replicas")
    ours.add_argument(
        "--describe", action="store_true", help="note shapes and dtypes of what each node's hooks receive"
    )
    ours.add_argument(
        "--capture",
        metavar="NODE|MODULE[@STEP][#RANK]",
        type=_capture,
        action="append",
        default=[],
        help="write a bundle of a node (or a module's nodes) that does not fail, too; see `distdbg replay`",
    )
    ours.add_argument("--no-capture", action="store_true", help="keep nothing of a node that fails, run none again")
    ours.add_argument("--capture-mb", type=_seconds, metavar="MB", help="most that a bundle may hold (default: 64)")
    ours.add_argument(
        "--recorder",
        choices=("auto", "python", "native"),
        default="auto",
        help="how backward nodes are recorded: natively where `distdbg build-native` was run (default: auto)",
    )
    ours.add_argument("--keep", metavar="MB", type=_keep, help="disk a rank's record may take, or 'all' (default: 128)")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def _capture(text: str) -> str:
    if not re.fullmatch(r"[^@#\s]+(@\d+)?(#\d+)?", text):
        raise ValueError(text)
    return text


def _keep(text: str) -> str:
    if text != "all" and not 0 < float(text) < math.inf:
        raise ValueError(text)
    return text


def main(argv: list[str]) -> int:
    """Run a job; returns the exit code that torchrun would give."""
    args = build_parser().parse_args(argv)
    if args.no_python:
        raise LaunchError(
            "--no-python starts a program that is not Python, and there is nothing to record in one; "
            "use torchrun for it"
        )
    if not args.module and not _runnable(args.training_script):
        raise LaunchError(f"no such script: {args.training_script}; give the path of a Python file, or -m and a module")
    if args.recorder == "native" and build.find() is None:
        raise BuildError("--recorder native: not built for this torch and Python; run `distdbg build-native` first")
    run_dir = prepare(args)
    if run_dir is None:
        return run_torchrun(args)[0]
    _environment(args, run_dir)
    _through_worker(args)
    events = EventLog(run_dir)
    events.write("launch", argv=argv)
    monitor = Monitor(run_dir, events, Pace(args.stall_timeout), args.on_stall)
    monitor.start()
    code, failures = run_torchrun(args)
    monitor.finish()
    if monitor.killed and code == 0:
        code = 1
    events.write("end", exit_code=code, failures=failures)
    events.close()
    try:
        conclude(run_dir)
    except KeyboardInterrupt:
        say(f"distdbg: interrupted; for the verdict: distdbg diagnose {run_dir}")
    except Exception as error:  # the job is over, and its exit code is its own
        say(f"distdbg: no verdict ({error!r}); try: distdbg diagnose {run_dir}")
    return code


# ---- before


def _runnable(script: str) -> bool:
    return os.path.isfile(script) or os.path.isfile(os.path.join(script, "__main__.py"))


def prepare(args: Namespace) -> Path | None:
    """Make the run directory and write run.json; None (and one line) where that can't be done."""
    given = args.run_dir is not None
    run_dir = args.run_dir.absolute() if given else _default_dir(args.training_script)
    several = not re.fullmatch(r"1(:1)?", str(args.nnodes))
    if given and run_dir.exists():
        if not run_dir.is_dir():
            raise LaunchError(f"{run_dir} is a file; give --run-dir another name")
        if any(run_dir.iterdir()) and not several:
            raise LaunchError(f"{run_dir} is not empty; give --run-dir a new directory, or remove this one")
    try:
        (run_dir / schema.RANKS_FOLDER).mkdir(parents=True, exist_ok=True)
        if not (run_dir / schema.RUN_FILE).exists():
            (run_dir / schema.RUN_FILE).write_text(json.dumps(_about(args), indent=1, default=str) + "\n")
    except OSError as error:
        say(f"distdbg: not recording: {run_dir} cannot be written ({error.strerror}); the job runs without")
        return None
    say(f"distdbg: recording to {run_dir}")
    return run_dir


def _default_dir(script: str) -> Path:
    stem = re.sub(r"[^\w.-]", "_", Path(script).stem)
    base = Path("distdbg-runs").absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def _about(args: Namespace) -> dict[str, Any]:
    import torch

    from distdbg import __version__

    return {
        "schema": schema.SCHEMA_VERSION,
        "script": args.training_script,
        "script_args": args.training_script_args,
        "nnodes": args.nnodes,
        "nproc_per_node": args.nproc_per_node,
        "start_unix_ns": time.time_ns(),
        "host": os.uname().nodename,
        "cwd": os.getcwd(),
        "stall_timeout": args.stall_timeout,
        "versions": {"distdbg": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
    }


def _environment(args: Namespace, run_dir: Path) -> None:
    """What the workers, which inherit it, are told."""
    env = os.environ
    env["DISTDBG_RUN_DIR"] = str(run_dir)
    env.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    for name, value in (("DISTDBG_NUMERICS", args.numerics), ("DISTDBG_DESCRIBE", args.describe)):
        if value:
            env[name] = "1"
    if args.no_capture:
        env["DISTDBG_CAPTURE"] = "0"
    elif args.capture:
        env["DISTDBG_CAPTURE"] = " ".join(args.capture)
    if args.capture_mb is not None:
        env["DISTDBG_CAPTURE_MB"] = str(args.capture_mb)
    if args.keep is not None:
        env["DISTDBG_KEEP"] = args.keep
    if args.recorder != "auto":
        env["DISTDBG_RECORDER"] = args.recorder
    if args.stall_timeout is not None:
        env["DISTDBG_STALL_TIMEOUT"] = str(args.stall_timeout)


def _through_worker(args: Namespace) -> None:
    """Have torchrun start distdbg's worker, and that the script."""
    script = ["-m", args.training_script] if args.module else [args.training_script]
    args.training_script_args = [*script, *args.training_script_args]
    args.run_path = False
    if processes.importable_anywhere():
        # By its path, not by -m: that would search the current directory for Python's own modules, too.
        args.training_script, args.module = str(Path(__file__).with_name("worker.py")), False
    else:
        args.training_script, args.module = "distdbg.worker", True


# ---- torchrun


def run_torchrun(args: Namespace) -> tuple[int, list[dict[str, Any]]]:
    """torchrun's main, from its parsed arguments on: (exit code, what it says of failed ranks)."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.run import run

    try:
        record(run)(args)
    except SystemExit as error:
        return (error.code if isinstance(error.code, int) else 1), []
    except ChildFailedError as error:
        say(traceback.format_exc().rstrip())
        return 1, [
            {"rank": rank, "local_rank": failure.local_rank, "exit_code": failure.exitcode, "pid": failure.pid}
            for rank, failure in error.failures.items()
        ]
    except BaseException as error:  # torchrun's own: a signal it was sent, a rendezvous that failed; it ends with 1
        if type(error).__name__ == "SignalException":
            say(f"distdbg: the job was ended: {error}")
        else:
            say(traceback.format_exc().rstrip())
        return 1, []
    return 0, []


# ---- after


def conclude(run_dir: Path) -> None:
    """Write verdict.json and timeline.csv, and print the verdict last."""
    size = sum(path.stat().st_size for path in (run_dir / schema.RANKS_FOLDER).glob("*/seg-*"))
    merge = [sys.executable, "-m", "distdbg", "merge", str(run_dir)]
    merging = None
    if size <= MERGE_LIMIT_BYTES:
        merging = subprocess.Popen(
            merge,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=_plain_environ(),
        )
    text = diagnose(run_dir)
    if merging is not None:
        try:
            _, problem = merging.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            merging.kill()
            merging.communicate()
            problem = f"distdbg: the timeline takes long; make it with: distdbg merge {run_dir}"
        if merging.returncode and problem.strip():
            say(problem.strip().splitlines()[-1])
    else:
        say(f"distdbg: the record is large; make its timeline with: distdbg merge {run_dir}")
    say(text)
