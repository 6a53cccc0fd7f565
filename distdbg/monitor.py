"""Watches a job while torchrun runs it: starts and ends of ranks, their pace, stalls; tells the verdict's reasoning.

A thread of the launcher. It reads live shards and the operating system; torchrun itself it leaves alone.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from distdbg import nativestacks, processes, schema
from distdbg.errors import say
from distdbg.files import read_verdict
from distdbg.pace import Pace, RankPace
from distdbg.processes import Worker
from distdbg.tail import Tail

TICK_S = 0.05
PACE_S = 0.5
GRACE_S = 2.0
BUSY_BYTES_PER_S = 1 << 20


class EventLog:
    """launcher-<host>-<pid>.jsonl: one JSON object a line, written through at once."""

    def __init__(self, run_dir: Path) -> None:
        name = f"{schema.LAUNCHER_PREFIX}{os.uname().nodename}-{os.getpid()}.jsonl"
        self._file = open(run_dir / name, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the job runs
        self._lock = threading.Lock()

    def write(self, event: str, **fields: Any) -> None:
        line = {"event": event, "t_unix_ns": time.time_ns(), "t_mono_ns": time.monotonic_ns(), **fields}
        with self._lock:
            try:
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()
            except (OSError, ValueError):
                return  # a full disk must not end the job

    def close(self) -> None:
        self._file.close()


def diagnose(run_dir: Path, *, timeout: float = 120.0) -> str:
    """Write verdict.json and return the verdict's text; in a process of its own, so that it can't harm the agent."""
    command = [sys.executable, "-m", "distdbg", "diagnose", str(run_dir), "--write"]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout, env=_plain_environ()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"distdbg: no verdict ({type(error).__name__}); try: distdbg diagnose {run_dir}"
    return done.stdout.strip() or done.stderr.strip()


def _plain_environ() -> dict[str, str]:
    """For our own commands: nothing of the job's recording, and no modules of the current directory."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DISTDBG_")}
    if processes.importable_anywhere():
        environ["PYTHONSAFEPATH"] = "1"  # from Python 3.11 on
    environ["PYTHONIOENCODING"] = "utf-8"  # whatever the job's own is: we read what they print
    return environ


class Monitor:
    """Start with ``start``, end with ``finish``. ``on_stall``: "report" or "kill"."""

    def __init__(self, run_dir: Path, events: EventLog, pace: Pace, on_stall: str) -> None:
        self._run_dir = run_dir
        self._events = events
        self._pace = pace
        self._on_stall = on_stall
        self._workers: dict[int, Worker] = {}  # by pid
        self._strangers: set[int] = set()
        self._tails: dict[int, Tail] = {}  # by pid
        self._ranks: dict[int, RankPace] = {}  # by pid
        self._usage: dict[int, tuple[float, int]] = {}
        self._stopped: set[int] = set()
        self._order = 0
        self._stalled = False
        self._circling: tuple[int, tuple[int, int]] | None = None  # pid and counts of a rank that goes in circles
        self._next_question = 0.0
        self._kill_at: float | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distdbg-monitor", daemon=True)
        self._helpers: list[threading.Thread] = []
        self._signals_read, self._signals_write = os.pipe()
        self.killed = False
        self.interrupted = False

    def start(self) -> None:
        """Call on the main thread: it also has the interpreter tell of signals, without replacing a handler."""
        os.set_blocking(self._signals_read, False)
        os.set_blocking(self._signals_write, False)
        self._old_wakeup = signal.set_wakeup_fd(self._signals_write, warn_on_full_buffer=False)
        self._thread.start()

    def finish(self) -> None:
        """The job is over: note what ended last and stop."""
        self._look_for_exits()
        self._done.set()
        self._thread.join(timeout=10)
        for helper in self._helpers:
            helper.join(timeout=130)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._signals_read)
        os.close(self._signals_write)
        for tail in self._tails.values():
            tail.close()
        for worker in self._workers.values():
            if worker.pidfd >= 0:
                os.close(worker.pidfd)

    # ---- the thread

    def _run(self) -> None:
        next_pace = 0.0
        while not self._done.is_set():
            try:
                self._look_for_signals()
                self._look_for_workers()
                self._look_for_exits()
                now = time.monotonic()
                if now >= next_pace:
                    next_pace = now + PACE_S
                    self._look_at_pace(now)
                if self._kill_at is not None and now >= self._kill_at:
                    self._kill_at = None
                    if self.interrupted and self._winding_up(now):
                        self._kill_at = now + 2 * PACE_S
                        continue
                    for worker in self._alive():
                        processes.end(worker, signal.SIGKILL)
            except Exception as error:  # a fault of ours, in a thread of ours: never into the job
                say(f"distdbg: monitor: {error!r}; the job goes on")
                return
            processes.wait_any(self._alive(), TICK_S, self._signals_read)

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.status is None]

    def _look_for_signals(self) -> None:
        try:
            data = os.read(self._signals_read, 64)
        except BlockingIOError:
            return
        fatal = [n for n in data if n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)]
        if not fatal or self.killed or self.interrupted:
            return
        self.interrupted = True
        self._events.write("interrupted", signal=signal.Signals(fatal[0]).name)
        # Ranks that are stuck do not heed torchrun's signal; whoever presses Ctrl-C does not wait for its 30 s. Other
        # signals come from a scheduler, which leaves ranks time to save: torchrun's time is theirs.
        if fatal[0] == signal.SIGINT:
            self._kill_at = time.monotonic() + 1.5 * GRACE_S
        self._help(lambda: diagnose(self._run_dir))

    def _winding_up(self, now: float) -> bool:
        """Whether an interrupted rank still does something (saves, say); the others may well wait for it."""
        for worker in self._alive():
            pace, tail = self._ranks[worker.pid], self._tails.get(worker.pid)
            if tail is None or pace.busy or pace.phase == "checkpoint" or now - pace.last_progress < 2 * PACE_S:
                return True
        return False

    def _help(self, work: Any) -> None:
        helper = threading.Thread(target=work, daemon=True)
        self._helpers.append(helper)
        helper.start()

    def _look_for_workers(self) -> None:
        for pid in processes.children():
            if pid in self._workers or pid in self._strangers:
                continue
            worker = processes.worker_of(pid, str(self._run_dir))
            if worker is None:
                if processes.state(pid) not in ("", "Z") and self._exec_done(pid):
                    self._strangers.add(pid)
                continue
            self._workers[pid] = worker
            self._ranks[pid] = RankPace(time.monotonic())
            self._events.write(
                "worker_start", rank=worker.rank, local_rank=worker.local_rank, attempt=worker.attempt, pid=pid
            )

    @staticmethod
    def _exec_done(pid: int) -> bool:
        """A child between fork and exec still has our command line; it may yet become a rank."""
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes() != Path("/proc/self/cmdline").read_bytes()
        except OSError:
            return False

    def _look_for_exits(self) -> None:
        for worker in self._alive():
            status = processes.peek(worker)
            if status is None:
                continue
            worker.status = status
            self._ranks[worker.pid].exited = True
            self._order += 1
            code, name = status
            extra = {"status": "reaped"} if status == (None, None) else {}
            self._events.write(
                "worker_exit",
                rank=worker.rank,
                attempt=worker.attempt,
                pid=worker.pid,
                exit_code=code,
                signal=name,
                order=self._order,
                **extra,
            )

    # ---- pace

    def _look_at_pace(self, now: float) -> None:
        attempt = max((worker.attempt for worker in self._workers.values()), default=0)
        current = {p: w for p, w in self._workers.items() if w.attempt == attempt}
        moved = False
        for _pid, worker in current.items():
            if worker.status is None:
                moved = self._look_at(worker, now) or moved
        ranks = {pid: self._ranks[pid] for pid in current}
        if self._stalled:
            if moved if self._circling is None else self._left_circle():
                self._stalled, self._circling = False, None
                self._events.write("recovered")
                say("distdbg: the job moves again")
            return
        if self.killed or self.interrupted:
            return
        silence = self._pace.stalled(ranks, now)
        circling = self._pace.circling(ranks, now) if silence is None else None
        if circling is not None and now >= self._next_question:
            limit = self._pace.limit(ranks)
            self._next_question = now + limit
            counts = self._ranks[circling].counts
            self._help(lambda: self._ask_about(circling, counts, now - self._ranks[circling].counts_t, limit))
        if silence is not None:
            self._stalled = True
            self._events.write("stall", silence_s=round(silence, 1), limit_s=round(self._pace.limit(ranks), 1))
            self._help(lambda: self._report_stall(silence))

    def _look_at(self, worker: Worker, now: float) -> bool:
        pace = self._ranks[worker.pid]
        tail = self._tails.get(worker.pid)
        if tail is None:
            folders = list((self._run_dir / schema.RANKS_FOLDER).glob(f"rank*-{worker.pid}"))
            if not folders:
                return False  # it has not begun to record: importing, say
            tail = self._tails[worker.pid] = Tail(folders[0])
        steps = tail.steps
        moved = tail.poll()
        if moved:
            moved = not tail.overdue(time.monotonic_ns(), self._pace.limit(self._ranks))
        elif tail.stopped:
            moved = True  # nobody knows; a job must not be ended because its disk is full
        if moved:
            self._pace.saw_progress(worker.rank, pace.last_progress, now)
            pace.last_progress = now
        if tail.steps > steps:
            if steps:
                self._pace.saw_step((now - pace.step_t) / (tail.steps - steps))
            else:
                self._pace.saw_step(0.0)
            pace.step, pace.step_t = tail.steps, now
        pace.phase, pace.called = tail.phase, tail.called
        if pace.counts != (tail.collectives, tail.steps):
            pace.counts, pace.counts_t = (tail.collectives, tail.steps), now
        cpu, moved_bytes = processes.usage(worker.pid)
        before = self._usage.get(worker.pid, (cpu, moved_bytes))
        self._usage[worker.pid] = (cpu, moved_bytes)
        pace.busy = cpu - before[0] > PACE_S / 2 or moved_bytes - before[1] > BUSY_BYTES_PER_S * PACE_S
        if processes.state(worker.pid) == "T" and worker.pid not in self._stopped:
            self._stopped.add(worker.pid)
            self._events.write("stopped", rank=worker.rank, attempt=worker.attempt, pid=worker.pid)
        elif worker.pid in self._stopped and moved:
            self._stopped.discard(worker.pid)
            self._events.write("continued", rank=worker.rank, attempt=worker.attempt, pid=worker.pid)
        return moved

    def _ask_about(self, pid: int, counts: tuple[int, int], seconds: float, limit: float) -> None:
        """A rank keeps the others waiting and moves: a stall if the verdict says that it goes round in circles."""
        text = diagnose(self._run_dir)
        if read_verdict(self._run_dir).get("kind") != "stalled" or self._stalled or self._ranks[pid].counts != counts:
            return
        self._circling, self._stalled = (pid, counts), True
        self._events.write("stall", silence_s=round(seconds, 1), limit_s=round(limit, 1))
        self._tell_stall(f"distdbg: the job has got nowhere for {seconds:.0f} s\n{text}")

    def _left_circle(self) -> bool:
        assert self._circling is not None
        pid, counts = self._circling
        return self._ranks[pid].exited or self._ranks[pid].counts != counts

    def _report_stall(self, silence: float) -> None:
        text = diagnose(self._run_dir)
        if self._take_native_stacks():
            text = diagnose(self._run_dir)
        self._tell_stall(f"distdbg: nothing has moved for {silence:.0f} s\n{text}")

    def _tell_stall(self, text: str) -> None:
        say(text)
        if self._on_stall != "kill" or not self._stalled:
            return
        self.killed = True
        self._events.write("kill", reason="stall")
        say("distdbg: ending the job (--on-stall kill)")
        self._kill_at = time.monotonic() + GRACE_S
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun's agent then ends its ranks and does not restart them

    def _take_native_stacks(self) -> bool:
        """Of the ranks here that the verdict names as standing; whether there are any."""
        taken = False
        standing = nativestacks.culprits(self._run_dir)
        for worker in [worker for worker in self._alive() if worker.rank in standing]:
            folders = list((self._run_dir / schema.RANKS_FOLDER).glob(f"rank*-{worker.pid}"))
            if not folders or not self._stalled or self.interrupted or self._done.is_set():
                continue
            why = nativestacks.take(worker.pid, folders[0], lambda: self._stalled)
            taken = taken or not why
            about = {"rank": worker.rank, "attempt": worker.attempt, "pid": worker.pid, "problem": why or None}
            self._events.write("native_stacks", **about)
        return taken
