"""The writer of a shard: preallocated memory-mapped segments, and a names table beside them.

What has been stored in a shared file mapping survives the process however it ends, so there is no
flush. A segment's blocks are allocated before it is mapped: a full disk shows as an OSError here and
never as a SIGBUS in training. When writing cannot go on the writer drops events, counts them and says
so once on stderr.
"""

import errno
import itertools
import json
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distdbg import schema
from distdbg.errors import RecordingError, say
from distdbg.files import replace_text
from distdbg.identity import Identity

SEGMENT_BYTES = 4 << 20
KEEP_BYTES = 128 << 20  # some 2.7 million events: minutes of a large model, hours of a small one
MAX_NAMES = 500_000
MAX_STEPS = 1_000_000  # digests of steps: 32 MB

_LAST_RECORDS = 64
_LAST_WORDS = frozenset({schema.EventKind.EXCEPTION, schema.EventKind.EXIT, schema.EventKind.STOP})

_Segment = tuple[mmap.mmap, Callable[[], int], int]  # buffer, next free offset, end
_GAP = 4  # slots left free where the count of free slots changes hands, for threads that have just taken one


def clock_anchor() -> dict[str, int]:
    """A pair of readings of the monotonic and the wall clock, taken as close together as five tries give."""
    best: tuple[int, int, int] | None = None
    for _ in range(5):
        before, unix, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = (after - before, (before + after) // 2, unix)
    assert best is not None
    return {"mono_ns": best[1], "unix_ns": best[2], "error_ns": best[0]}


def _publish(unfinished: Path, path: Path) -> None:
    """Give a file its name; raises FileExistsError where the name is taken."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(path) from None
        os.rename(unfinished, path)


class ShardWriter:
    """Appends events of one process to its shard.

    ``emit`` may be called from any thread, also from a signal handler. ``step`` is stamped on every
    event. ``keep_bytes`` bounds the disk used (None: no bound); the oldest segments are deleted.
    Raises RecordingError where the folder cannot be made or the first segment not be allocated.
    """

    def __init__(
        self,
        run_dir: Path,
        identity: Identity,
        meta: dict[str, Any],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        keep_bytes: int | None = KEEP_BYTES,
    ) -> None:
        self.folder = run_dir / schema.RANKS_FOLDER / identity.folder
        self.identity = identity
        self.step = 0
        self.lost = 0
        self.problem: str | None = None
        self._meta = {"schema": schema.SCHEMA_VERSION, **identity.as_dict(), "anchor": clock_anchor(), **meta}
        self._capacity = max(1, (segment_bytes - schema.SEGMENT_HEADER_SIZE) // schema.RECORD_SIZE)
        self._bytes = schema.SEGMENT_HEADER_SIZE + self._capacity * schema.RECORD_SIZE
        self._keep = None if keep_bytes is None else max(2, keep_bytes // self._bytes)
        self._lock = threading.RLock()  # re-entrant: a signal handler may emit while this thread rotates
        self._ids: dict[tuple[str, str], int] = {}
        self._next_name = itertools.count(1)
        self._threads: dict[int, int] = {threading.main_thread().ident or 0: 0}
        self._number = 0
        self._oldest = 0
        self._spare: tuple[int, _Segment] | None = None
        self._names_fd = -1
        self._steps_fd = -1
        self._steps_left = MAX_STEPS
        self._reserve: Path | None = None
        self._native: Any = None  # the module of the native recorder, and its writer
        self._native_writer: Any = None
        self._segment: _Segment | None = None
        self._last: _Segment | None = None  # what is left to write to when recording had to stop
        try:
            self.folder.mkdir(parents=True)
            self._names_fd = os.open(self.folder / schema.NAMES_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self.write_meta({})
            self._use(self._create(0))
            self._reserve = self._reserve_last()
        except OSError as error:
            raise RecordingError(
                f"rank {identity.rank} cannot record to {self.folder}: {error.strerror or error}; "
                "choose another place with --run-dir or DISTDBG_RUN_DIR"
            ) from error

    # ---- events

    def emit(self, kind: int, name: int = 0, module: int = 0, seq: int = 0, a: int = 0, b: int = 0) -> None:
        """Append one event; see schema.EventKind for what the words hold."""
        segment = self._segment
        while segment is not None:
            offset = segment[1]()
            if offset < segment[2]:
                ident = threading.get_ident()
                thread = self._threads.get(ident)
                if thread is None:
                    thread = self._thread(ident)
                schema.RECORD.pack_into(
                    segment[0], offset, time.monotonic_ns(), seq, a, b, self.step, name, module, thread, kind
                )
                return
            segment = self._rotate(segment)
        last = self._last
        if last is not None and kind in _LAST_WORDS:
            offset = last[1]()
            if offset < last[2]:
                words = (time.monotonic_ns(), seq, a, b, self.step, name, module, 0, kind)
                schema.RECORD.pack_into(last[0], offset, *words)
                return
        self.lost += 1

    def position(self) -> int:
        """How many events have been recorded so far (those lost not counted)."""
        segment = self._segment
        if segment is None:
            return 0
        if self._native is not None:
            offset = int(segment[1].offset)  # type: ignore[attr-defined]
        else:
            offset = int(repr(segment[1].__self__)[len("count(") :].split(",")[0])  # type: ignore[attr-defined]
        used = min(offset, segment[2]) - schema.SEGMENT_HEADER_SIZE
        return self._number * self._capacity + used // schema.RECORD_SIZE

    def advance(self) -> None:
        """The next step begins."""
        self.step += 1
        if self._native_writer is not None:
            self._native_writer.set_step(self.step)

    def use_native(self, module: Any) -> Any:
        """Let the native recorder write into this shard, too; returns its writer. ``emit`` becomes its own."""
        with self._lock:
            segment = self._segment
            if segment is None:
                raise RecordingError("recording has stopped")
            self._native = module
            writer = module.Writer(self.emit, self._thread)
            writer.set_step(self.step)
            start = segment[1]() + _GAP * schema.RECORD_SIZE
            self._native_writer = writer
            self._use((segment[0], module.Segment(segment[0], start), segment[2]))
            self.emit = writer.emitter()  # type: ignore[method-assign]
        return writer

    def _use(self, segment: _Segment | None) -> None:
        if self._native_writer is None:
            self._segment = segment
            return
        if segment is not None and not isinstance(segment[1], self._native.Segment):  # a spare made just before
            segment = (segment[0], self._native.Segment(segment[0], schema.SEGMENT_HEADER_SIZE), segment[2])
        self._segment = segment
        self._native_writer.set_segment(segment[1] if segment is not None else None)

    def _thread(self, ident: int) -> int:
        with self._lock:
            return self._threads.setdefault(ident, min(len(self._threads), 0xFFFF))

    def intern(self, category: str, text: str, extra: dict[str, Any] | None = None) -> int:
        """The id of a name, written to the names table at its first use."""
        key = (category, text)
        known = self._ids.get(key)
        if known is not None:
            return known
        with self._lock:
            if key in self._ids:
                return self._ids[key]
            if len(self._ids) >= MAX_NAMES:
                return 0
            number = next(self._next_name)
            self.amend(number, category, text, extra)
            self._ids[key] = number
            return number

    def text_of(self, number: int) -> str:
        """The name that an id stands for, "" where there is none; searches the table."""
        return next((text for (_, text), known in list(self._ids.items()) if known == number), "")

    def amend(self, number: int, category: str, text: str, extra: dict[str, Any] | None) -> None:
        """Write a name's line; of several with one id the last counts."""
        line = json.dumps([number, category, text, extra], default=str) + "\n"
        with self._lock:
            if self._names_fd >= 0:
                try:
                    os.write(self._names_fd, line.encode("utf-8", "replace"))
                except OSError as error:
                    self._give_up(error, full=False)

    def write_text(self, name: str, text: str) -> None:
        """Replace a text file beside the shard at once; a failure is dropped (it is evidence, not data)."""
        try:
            replace_text(self.folder / name, text)
        except OSError:
            return

    def append_text(self, name: str, line: str) -> None:
        """Append a line to a text file beside the shard; a failure is dropped."""
        try:
            with open(self.folder / name, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError:
            return

    def write_meta(self, changes: dict[str, Any]) -> None:
        """Write meta.json again with some entries changed (rank and world size once the group tells them)."""
        self._meta = {**self._meta, **changes}  # threads may write at once
        self.write_text(schema.META_FILE, json.dumps(self._meta, default=str, indent=1))

    def write_step(self, modules: int, calls: int) -> None:
        """Append the digest of the step that ends; see schema.STEP_RECORD. Nothing once recording has stopped."""
        if self._segment is None or self._steps_left <= 0:
            return
        self._steps_left -= 1
        try:
            if self._steps_fd < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                self._steps_fd = os.open(self.folder / schema.STEPS_FILE, flags, 0o644)
            os.write(self._steps_fd, schema.STEP_RECORD.pack(self.step, 0, modules, calls, time.monotonic_ns()))
        except OSError:
            self._steps_left = 0  # it is evidence for what is no longer kept: recording goes on without

    # ---- segments

    def _create(self, number: int) -> _Segment:
        """Make a segment. It gets its name when it is whole: a reader, or a kill, never meets a half-made one."""
        unfinished = self.folder / f".seg-{number}-{threading.get_ident()}.tmp"
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.posix_fallocate(fd, 0, self._bytes)
            return self._finish(fd, unfinished, number, self._capacity)
        finally:
            os.close(fd)
            unfinished.unlink(missing_ok=True)

    def _finish(self, fd: int, unfinished: Path, number: int, capacity: int) -> _Segment:
        """Write the header of a segment whose blocks are there, map it, and give it its name."""
        text = json.dumps({**self.identity.as_dict(), "anchor": clock_anchor()}).encode()
        header = schema.SEGMENT_HEADER.pack(
            schema.MAGIC,
            schema.SCHEMA_VERSION,
            schema.SEGMENT_HEADER_SIZE,
            schema.RECORD_SIZE,
            capacity,
            number,
            len(text),
        )
        size = schema.SEGMENT_HEADER_SIZE + capacity * schema.RECORD_SIZE
        os.pwrite(fd, header + text, 0)
        buffer = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        _publish(unfinished, self.folder / schema.SEGMENT_PATTERN.format(number))
        if self._native is not None:
            return buffer, self._native.Segment(buffer, schema.SEGMENT_HEADER_SIZE), size
        return buffer, itertools.count(schema.SEGMENT_HEADER_SIZE, schema.RECORD_SIZE).__next__, size

    def _reserve_last(self) -> Path | None:
        """Room for a few events, kept for the day the disk is full: that recording stopped, and how the rank ended."""
        path = self.folder / ".last.tmp"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                os.posix_fallocate(fd, 0, schema.SEGMENT_HEADER_SIZE + _LAST_RECORDS * schema.RECORD_SIZE)
            finally:
                os.close(fd)
        except OSError:
            path.unlink(missing_ok=True)
            return None
        return path

    def _open_last(self) -> None:
        """Put the reserve where the next segment would be."""
        path, self._reserve = self._reserve, None
        if path is None:
            return
        try:
            fd = os.open(path, os.O_RDWR)
            try:
                self._last = self._finish(fd, path, self._number, _LAST_RECORDS)  # _rotate has counted on
            finally:
                os.close(fd)
                path.unlink(missing_ok=True)
        except OSError:
            return

    def _rotate(self, full: _Segment) -> _Segment | None:
        with self._lock:
            if self._segment is not full:
                return self._segment
            self._number += 1
            spare, self._spare = self._spare, None
            if spare is not None and spare[0] == self._number:
                self._use(spare[1])
                return self._segment
            while True:
                try:
                    self._use(self._create(self._number))
                except FileExistsError:
                    self._number += 1  # the watchdog has just prepared that one, and will find it is too late
                    continue
                except OSError as error:
                    self._give_up(error, full=True)
                return self._segment

    def maintain(self) -> None:
        """Prepare the next segment and delete those over the bound; the watchdog calls this, not training."""
        with self._lock:
            number, segment, spare = self._number, self._segment, self._spare
        if segment is None:
            return
        if spare is None:
            try:
                made = self._create(number + 1)
            except FileExistsError:
                return  # the training thread was faster
            except OSError:
                return  # it may fit later; the rotation says so if it does not
            with self._lock:
                if self._number == number and self._segment is not None:
                    self._spare = (number + 1, made)
                    made = None  # type: ignore[assignment]
            if made is not None:
                self._remove(number + 1)
        while self._keep is not None and number - self._oldest >= self._keep:
            self._remove(self._oldest)
            self._oldest += 1

    def _remove(self, number: int) -> None:
        try:
            os.unlink(self.folder / schema.SEGMENT_PATTERN.format(number))
        except OSError:
            pass

    def _give_up(self, error: OSError, *, full: bool) -> None:
        if self.problem is None:
            reason = "no space left on the disk" if error.errno == errno.ENOSPC else (error.strerror or str(error))
            self.problem = f"recording stopped at step {self.step}: {reason} ({self.folder})"
            say(f"distdbg: rank {self.identity.rank}: {self.problem}; training goes on")
            # Where it was the names table that found no room, the segment itself has some left.
            self._last = None if full else self._segment
            self._use(None)
            if full:
                self._open_last()
            self.emit(schema.EventKind.STOP)
            self.write_meta({"stopped": self.problem})
        self._use(None)

    def disable(self) -> None:
        """Write nothing any more, silently: in a forked child, whose mappings are the parent's."""
        self._use(None)
        self._last = self._reserve = None
        self._names_fd = self._steps_fd = -1
        self._lock = threading.RLock()

    def close(self) -> None:
        """Stop writing. What is there stays; an unused prepared segment goes."""
        with self._lock:
            if self._segment is not None and self.lost:
                self.emit(schema.EventKind.LOST, a=self.lost)
            self._use(None)
            self._last = None
            # The native writer refers to this one: a circle that Python's collector does not see.
            self._native_writer = None
            self.__dict__.pop("emit", None)
            if self._reserve is not None:
                self._reserve.unlink(missing_ok=True)
                self._reserve = None
            if self._spare is not None:
                self._remove(self._spare[0])
                self._spare = None
            for fd in (self._names_fd, self._steps_fd):
                if fd >= 0:
                    os.close(fd)
            self._names_fd = self._steps_fd = -1
