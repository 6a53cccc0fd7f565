"""A thread of its own in each rank: the beat, segments prepared ahead, stacks when nothing moves.

Silence of the beat with a living process means that C code holds the interpreter, or that the process is
stopped. For the first, faulthandler's own thread, armed anew at each beat, writes the stacks.
"""

import faulthandler
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import IO, Any

from distdbg import processes, schema
from distdbg.errors import say
from distdbg.record import errors
from distdbg.record.clock import Clock
from distdbg.record.session import Kind, Session

BEAT_S = 0.5
MAX_FRAMES = 60


def stack_of(frame: FrameType | None) -> list[list[Any]]:
    """[file, line, function] from the outermost frame to the innermost, without distdbg's worker."""
    found: list[list[Any]] = []
    for item, line in traceback.walk_stack(frame):
        if len(found) >= MAX_FRAMES:
            break
        if not item.f_code.co_filename.startswith(errors.PACKAGE):
            found.append([item.f_code.co_filename, line, item.f_code.co_name])
    return found[::-1]


def in_library(stack: list[list[Any]]) -> str:
    """Whose library code the innermost frame lies in: "collective", "data", "checkpoint", "" else."""
    for filename, _, function in reversed(stack):
        if function == "_engine_run_backward" or "torch/autograd" in filename:
            return "backward"
        for part, name in (
            ("torch/utils/data/", "data"),
            ("torch/serialization.py", "checkpoint"),
            ("torch/distributed/checkpoint/", "checkpoint"),
            ("torch/distributed/rendezvous", "setup"),
            ("torch/distributed/", "collective"),
            ("torch/nn/parallel/", "collective"),
        ):
            if part in filename:
                return name
        if "site-packages" not in filename and f"{os.sep}lib{os.sep}python" not in filename:
            return ""
    return ""


def dump_flight_recorder(session: Session) -> None:
    """torch's own record of collectives, where it is on: some 50 ms for 2,000 entries, so only when nothing moves."""
    if not os.environ.get("TORCH_FR_BUFFER_SIZE") or "torch.distributed" not in sys.modules:
        return
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None or not sys.modules["torch.distributed"].is_initialized():
        return
    found = dump(includeCollectives=True, onlyActive=False)
    text = found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)
    session.writer.write_text(schema.FLIGHT_RECORDER_FILE, text)


class Watchdog:
    """Started with the recording; ``attach`` begins its thread, ``detach`` ends it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: IO[str] | None = None
        self._own_faulthandler = False
        self._timer_free = True
        self._forking = False
        self._last_count = -1
        self._own = 0  # events of the watchdog itself, which are no progress
        self._quiet_since = time.monotonic()
        self._noticed = 0
        self._clock = Clock(session, self._emit)

    def attach(self) -> None:
        self._arm_fatal()
        self._thread = threading.Thread(target=self._run, name="distdbg-watchdog", daemon=True)
        self._thread.start()

    def detach(self) -> None:
        self._wake.set()
        self._clock.detach()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2)
        self._disarm()

    def before_fork(self) -> None:
        """No timer may be armed while the process forks: the child would wait for its thread, which it has not."""
        self._forking = True
        if self._timer_free and self._file is not None:
            self._cancel()

    def after_fork(self) -> None:
        self._forking = False

    def forget(self) -> None:
        self._thread = None
        self._clock.forget()
        self._timer_free = False
        self._disarm()

    # ---- faulthandler

    def _arm_fatal(self) -> None:
        """Stacks at SIGSEGV, SIGABRT and the like, and at SIGTERM, unless the user has a handler of their own."""
        try:
            self._file = open(self._session.writer.folder / schema.FATAL_STACKS_FILE, "w")  # noqa: SIM115
            if not faulthandler.is_enabled():
                faulthandler.enable(self._file)
                self._own_faulthandler = True
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                faulthandler.register(signal.SIGTERM, self._file, all_threads=True, chain=True)
        except (OSError, ValueError, RuntimeError):
            return  # recording goes on without this evidence
        self._watch_timer()

    def _watch_timer(self) -> None:
        """There is one dump_traceback_later for a process: the user's goes first."""
        original = faulthandler.dump_traceback_later
        cancel = faulthandler.cancel_dump_traceback_later
        self._later, self._cancel = original, cancel

        @functools.wraps(original)
        def dump_traceback_later(*args: Any, **kwargs: Any) -> None:
            self._timer_free = False
            original(*args, **kwargs)

        self._wrapper = dump_traceback_later
        faulthandler.dump_traceback_later = dump_traceback_later

    def _disarm(self) -> None:
        if self._file is None:
            return
        if faulthandler.dump_traceback_later is getattr(self, "_wrapper", None):
            faulthandler.dump_traceback_later = self._later
        if self._timer_free and hasattr(self, "_cancel"):
            self._cancel()
        if self._own_faulthandler:
            faulthandler.disable()
        faulthandler.unregister(signal.SIGTERM)
        self._file.close()
        self._file = None

    # ---- the thread

    def _run(self) -> None:
        while not self._wake.is_set():
            try:
                self._once()
            except Exception as error:  # a fault of ours, in a thread of ours: never into training
                say(f"distdbg: rank {self._session.identity.rank}: watchdog: {error!r}")
                return
            self._wake.wait(BEAT_S)

    def _once(self) -> None:
        session = self._session
        session.writer.maintain()
        self._clock.tick()
        quiet = self._quiet()
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        source = self._source(main)
        delay = processes.run_delay_ns(os.getpid())
        self._emit(Kind.HEARTBEAT, name=source, seq=delay, a=time.process_time_ns(), b=self._main_cpu())
        if quiet >= session.settings.quiet_s:
            # Again at longer and longer intervals, so that the stacks are fresh and the file is one.
            if self._noticed == 0 or quiet >= self._noticed * 2:
                if self._noticed == 0:
                    dump_flight_recorder(session)
                self._noticed = max(1, int(quiet))
                self._emit(Kind.STALL, name=source, a=int(quiet * 1e9))
                self._write_stacks(quiet)
        else:
            self._noticed = 0
        if self._timer_free and not self._forking and self._file is not None:
            self._later(BEAT_S + max(2.0, session.settings.quiet_s), file=self._file)

    def _quiet(self) -> float:
        """Seconds in which this process recorded no event but the watchdog's own."""
        count = self._session.writer.position() - self._own
        now = time.monotonic()
        if count != self._last_count:
            self._quiet_since = now
        self._last_count = count
        return now - self._quiet_since

    def _emit(self, kind: Kind, **words: int) -> None:
        self._own += 1
        self._session.emit(kind, **words)

    def _source(self, frame: FrameType | None) -> int:
        user = errors.user_frame(frame)
        if user is None:
            return 0
        return self._session.intern("source", errors.short_source(user.f_code.co_filename, user.f_lineno))

    def _main_cpu(self) -> int:
        try:
            clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
            return time.clock_gettime_ns(clock)
        except (OSError, AttributeError):
            return 0

    def _write_stacks(self, quiet: float) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        main = threading.main_thread().ident
        threads = []
        for ident, frame in sys._current_frames().items():
            if ident == threading.get_ident() or names.get(ident) == "distdbg-clock":
                continue
            stack = stack_of(frame)
            user = errors.user_frame(frame)
            threads.append(
                {
                    "name": names.get(ident, str(ident)),
                    "main": ident == main,
                    "source": errors.short_source(user.f_code.co_filename, user.f_lineno) if user else None,
                    "in": in_library(stack),
                    "stack": stack,
                }
            )
        about = {
            "t_mono_ns": time.monotonic_ns(),
            "t_unix_ns": time.time_ns(),
            "quiet_s": round(quiet, 3),
            "step": self._session.writer.step,
            "threads": threads,
            "open_nodes": [
                node for part in self._session.parts if hasattr(part, "open_nodes") for node in part.open_nodes()
            ],
        }
        self._session.writer.write_text(schema.STACKS_FILE, json.dumps(about, indent=1))
