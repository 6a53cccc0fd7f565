"""The ranks as the launcher's operating system sees them: which are there, how each ended, what each uses.

torchrun starts and reaps the ranks; nothing here takes an exit status away from it.
"""

import os
import select
import signal
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Worker:
    """A rank's process; ``status`` is (exit code or None, signal name or None) once it has ended."""

    pid: int
    rank: int
    local_rank: int
    attempt: int
    pidfd: int = -1
    status: tuple[int | None, str | None] | None = None


def importable_anywhere() -> bool:
    """Whether distdbg is found without the entry that Python puts first (the current directory, say)."""
    root = Path(__file__).resolve().parent.parent
    return any(Path(place).resolve() == root for place in sys.path[1:] if place)


def children() -> list[int]:
    """Direct children of this process."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found.extend(int(pid) for pid in (task / "children").read_text().split())
        except (OSError, ValueError):
            return _children_by_parent()
    return found


def _children_by_parent() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            if parent == os.getpid():
                found.append(int(entry.name))
    return found


def worker_of(pid: int, run_dir: str) -> Worker | None:
    """The rank that runs in a process, from its environment; None if it is no rank of ours."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    env = dict(item.partition(b"=")[::2] for item in raw.split(b"\0") if item)
    if os.fsdecode(env.get(b"DISTDBG_RUN_DIR", b"")) != run_dir or b"RANK" not in env:
        return None
    try:
        worker = Worker(
            pid, int(env[b"RANK"]), int(env.get(b"LOCAL_RANK", b"0")), int(env.get(b"TORCHELASTIC_RESTART_COUNT", b"0"))
        )
    except ValueError:
        return None
    try:
        worker.pidfd = os.pidfd_open(pid)
    except (OSError, AttributeError):
        worker.pidfd = -1
    return worker


def wait_any(workers: list[Worker], seconds: float, wakeup: int) -> None:
    """Sleep until one of the processes ends, ``wakeup`` (a file descriptor) can be read, or the time is over."""
    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    for worker in workers:
        if worker.pidfd >= 0:
            poll.register(worker.pidfd, select.POLLIN)
    poll.poll(seconds * 1000)


def peek(worker: Worker) -> tuple[int | None, str | None] | None:
    """How a process ended, without reaping it: (exit code, signal); None while it runs; (None, None) if reaped."""
    try:
        found = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None, None
    if found is None:
        return None
    if found.si_code == os.CLD_EXITED:
        return found.si_status, None
    try:
        return None, signal.Signals(found.si_status).name
    except ValueError:
        return None, f"signal {found.si_status}"


def state(pid: int) -> str:
    """The kernel's letter for a process's state (T: stopped), "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def run_delay_ns(pid: int) -> int:
    """ns for which a process's main thread was ready to run and had no core, as Linux counts them; 0 if it does not."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def usage(pid: int) -> tuple[float, int]:
    """(seconds it had a core or its main thread waited for one, bytes read and written) of a process so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        cpu = 0.0
    cpu += run_delay_ns(pid) / 1e9  # where more processes than cores want to run, work shows as waiting
    moved = 0
    try:
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            if line.startswith(("rchar", "wchar")):
                moved += int(line.split()[1])
    except (OSError, ValueError, IndexError):
        moved = 0
    return cpu, moved


def end(worker: Worker, how: int) -> None:
    """Send a signal to a rank that is still ours; a stopped one is continued so that it can end."""
    if worker.status is not None:
        return
    try:
        if worker.pidfd >= 0:
            signal.pidfd_send_signal(worker.pidfd, how)
            signal.pidfd_send_signal(worker.pidfd, signal.SIGCONT)
        else:
            os.kill(worker.pid, how)
            os.kill(worker.pid, signal.SIGCONT)
    except (ProcessLookupError, PermissionError):
        return
