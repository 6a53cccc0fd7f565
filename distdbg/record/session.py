"""One recording in one process: what is put in place at the start, and taken out again at the stop.

Nothing here may harm training. What can fail for reasons of ours stops the recording with one line;
what is raised by the user's own code (a signal handler, say) while ours runs is never caught.
"""

import atexit
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from distdbg import schema
from distdbg.errors import RecordingError, say
from distdbg.identity import Identity, identify
from distdbg.record import errors
from distdbg.record.digest import StepDigest
from distdbg.shard import KEEP_BYTES, ShardWriter

Kind = schema.EventKind
CAPTURE_BYTES = 64 << 20


@dataclass
class Settings:
    """What the environment asks for (the launcher sets it; see `distdbg run --help`)."""

    run_dir: Path
    numerics: bool = False
    describe: bool = False
    keep_bytes: int | None = KEEP_BYTES
    capture: bool = True  # keep a failed node and run it again
    capture_nodes: str = ""  # what `--capture` asks for, separated by blanks
    capture_bytes: int = CAPTURE_BYTES
    recorder: str = "auto"  # auto, python, native
    quiet_s: float = 3.0  # silence after which stacks are taken

    @classmethod
    def from_environ(cls, run_dir: str | os.PathLike[str] | None = None) -> "Settings":
        place = run_dir or os.environ.get("DISTDBG_RUN_DIR")
        if not place:
            raise RecordingError("no run directory: give run_dir=... or set DISTDBG_RUN_DIR")
        keep = os.environ.get("DISTDBG_KEEP", "")
        keep_bytes: int | None = KEEP_BYTES
        if keep == "all":
            keep_bytes = None
        elif keep:
            try:
                keep_bytes = int(float(keep) * (1 << 20))
            except (ValueError, OverflowError):
                raise RecordingError(f"DISTDBG_KEEP={keep!r} is neither a number of MB nor 'all'") from None
        wanted = os.environ.get("DISTDBG_CAPTURE", "")
        megabytes = os.environ.get("DISTDBG_CAPTURE_MB", "")
        try:
            capture_bytes = int(float(megabytes) * (1 << 20)) if megabytes else CAPTURE_BYTES
        except (ValueError, OverflowError):
            raise RecordingError(f"DISTDBG_CAPTURE_MB={megabytes!r} is no number of MB") from None
        recorder = os.environ.get("DISTDBG_RECORDER", "") or "auto"
        if recorder not in ("auto", "python", "native"):
            raise RecordingError(f"DISTDBG_RECORDER={recorder!r} is none of auto, python, native")
        timeout = os.environ.get("DISTDBG_STALL_TIMEOUT", "")
        quiet = 3.0
        if timeout.replace(".", "", 1).isdigit():
            quiet = min(3.0, max(0.5, float(timeout) / 3))
        return cls(
            run_dir=Path(place).absolute(),
            numerics=os.environ.get("DISTDBG_NUMERICS", "") not in ("", "0"),
            describe=os.environ.get("DISTDBG_DESCRIBE", "") not in ("", "0"),
            keep_bytes=keep_bytes,
            capture=wanted != "0",
            capture_nodes="" if wanted == "0" else wanted,
            capture_bytes=capture_bytes,
            recorder=recorder,
            quiet_s=quiet,
        )


class ThreadState(threading.local):
    """What one thread is in: modules, backward passes, and the module boundaries of its sequence numbers."""

    def __init__(self) -> None:
        self.modules: list[tuple[int, int, int]] = []  # (id of the module, its name's id, id of an exception)
        self.boundary_seqs: list[int] = []
        self.boundary_modules: list[tuple[int, int]] = []  # (name's id, call)
        self.backwards = 0  # depth of nested backward passes


@dataclass
class Session:
    """The recording of this process; ``emit`` and ``intern`` are the writer's."""

    settings: Settings
    identity: Identity
    writer: ShardWriter
    state: ThreadState = field(default_factory=ThreadState)
    parts: list[Any] = field(default_factory=list)
    active: bool = True
    numerics: Any = None  # record.numerics.Numerics, where it is on
    _located: set[int] = field(default_factory=set)  # errors whose place in the script has been written

    def __post_init__(self) -> None:
        self.emit = self.writer.emit
        self.intern = self.writer.intern
        self.digest = StepDigest(self.writer)

    def intern_error(self, error: BaseException) -> int:
        """The name's id of an exception; what is known of it is written again once its traceback tells more."""
        about = errors.describe(error)
        text = errors.title(error)
        number = self.intern("error", text, about)
        if about["source"] and number not in self._located:
            self._located.add(number)
            self.writer.amend(number, "error", text, about)
        return number

    def module_id(self) -> int:
        """The name's id of the innermost module whose forward runs in this thread, or 0."""
        stack = self.state.modules
        return stack[-1][1] if stack else 0

    def source(self, depth: int = 2) -> int:
        text = errors.caller_source(depth)
        return self.intern("source", text) if text else 0

    def failed(self, error: Exception) -> None:
        """Stop because of a fault of our own: said once, and training goes on."""
        if self.active:
            self.writer.problem = f"recording stopped: {errors.title(error)} ({errors.describe(error)['where']})"
            say(f"distdbg: rank {self.identity.rank}: {self.writer.problem}; training goes on")
            self.writer.write_meta({"stopped": self.writer.problem})
            self.stop()

    def attach_torch(self) -> None:
        """Put torch's hooks in place; torch is fully imported by now."""
        import torch

        from distdbg.record import native
        from distdbg.record.collectives import Collectives
        from distdbg.record.engine import Engine
        from distdbg.record.loop import Loop
        from distdbg.record.modules import Modules
        from distdbg.record.numerics import Numerics
        from distdbg.record.replicas import Replicas

        found = native.attach(self)
        versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
        self.writer.write_meta({"versions": versions, "recorder": "python" if found is None else "native"})
        modules = Modules(self)
        numerics = Numerics(self, modules) if self.settings.numerics else None
        parts = [
            modules,
            numerics,
            Engine(self, modules, numerics, found),
            Collectives(self),
            Replicas(self),
            Loop(self, numerics),
        ]
        for part in parts:
            if part is not None:
                part.attach()
                self.parts.append(part)

    def stop(self, reason: str = "stop") -> None:
        """Take every hook out again and close the shard. Safe to call twice."""
        if not self.active:
            return
        self.active = False
        for part in reversed(self.parts):
            part.detach()
        self.parts.clear()
        self.emit(Kind.STOP, name=self.intern("text", reason))
        self.writer.close()

    def forget(self) -> None:
        """In a forked child: the shard, the watchdog and the run are the parent's."""
        global _session
        self.active = False
        self.writer.disable()
        for part in reversed(self.parts):
            part.forget()
        self.parts.clear()
        _session = None


_session: Session | None = None
_atfork_registered = False


def current() -> Session | None:
    """The recording of this process, if there is one."""
    return _session


def _before_fork() -> None:
    if _session is not None:
        for part in _session.parts:
            if hasattr(part, "before_fork"):
                part.before_fork()


def _after_fork_in_parent() -> None:
    if _session is not None:
        for part in _session.parts:
            if hasattr(part, "after_fork"):
                part.after_fork()


def _after_fork() -> None:
    if _session is not None:
        _session.forget()


def open_session(settings: Settings) -> Session:
    """Open the shard and start the watchdog, without torch. Raises RecordingError."""
    global _session, _atfork_registered
    from distdbg.record.watchdog import Watchdog

    if _session is not None and _session.active:
        raise RecordingError(f"already recording to {_session.writer.folder}; call distdbg.stop() first")
    identity = identify()
    meta = {"argv": list(sys.argv), "numerics": settings.numerics, "cwd": errors.current_directory()}
    writer = ShardWriter(settings.run_dir, identity, meta, keep_bytes=settings.keep_bytes)
    session = Session(settings, identity, writer)
    session.emit(Kind.START)
    watchdog = Watchdog(session)
    watchdog.attach()
    session.parts.append(watchdog)
    _session = session
    if not _atfork_registered:
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
        atexit.register(stop)
        _atfork_registered = True
    return session


def start(run_dir: str | os.PathLike[str] | None = None) -> None:
    """Start recording in this process, from the next forward or backward on.

    ``run_dir`` is shared by all ranks of the job (default: DISTDBG_RUN_DIR). Imports torch. Raises
    RecordingError when the folder can't be written or a recording runs already.
    """
    import torch.distributed  # noqa: F401

    session = open_session(Settings.from_environ(run_dir))
    try:
        session.attach_torch()
    except RecordingError:
        stop()
        raise
    _watch_uncaught(session)


def stop() -> None:
    """Stop recording and leave no hook behind. Nothing happens if nothing is recorded."""
    global _session
    if _session is not None:
        _session.stop()
        _session = None


def step() -> None:
    """Say that a training step has ended, for loops without an optimizer (or with several)."""
    if _session is not None and _session.active:
        loop = next((part for part in _session.parts if part.__class__.__name__ == "Loop"), None)
        if loop is not None:
            loop.explicit_step()


def record_exception(session: Session, error: BaseException) -> None:
    """Note that an exception leaves the script, with its traceback beside the shard."""
    import json

    about = errors.report(error)
    source = session.intern("source", about["source"]) if about["source"] else 0
    session.emit(Kind.EXCEPTION, name=session.intern_error(error), a=source)
    session.writer.write_text(schema.EXCEPTION_FILE, json.dumps({"step": session.writer.step, **about}, indent=1))


def _watch_uncaught(session: Session) -> None:
    """Where no worker runs the script, sys.excepthook tells of an exception that leaves it."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if session.active:
            record_exception(session, error)
            session.emit(Kind.EXIT, seq=1, name=session.intern("text", "exception"))
        return previous(kind, error, trace)

    class _Hook:
        def detach(self) -> None:
            if sys.excepthook is hook:
                sys.excepthook = previous

        forget = detach

    sys.excepthook = hook
    session.parts.append(_Hook())


class Patches:
    """Attributes replaced for the time of a recording, and put back as they were."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: ModuleType | type | Any, name: str, value: Any) -> None:
        self._done.append((owner, name, getattr(owner, name), value))
        setattr(owner, name, value)

    def undo(self) -> None:
        for owner, name, old, new in reversed(self._done):
            if getattr(owner, name, None) is new:  # somebody else may have put theirs over ours
                setattr(owner, name, old)
        self._done.clear()
