"""Follows a live shard cheaply: what a rank last did, without reading it again from the start."""

import mmap
import os
from pathlib import Path

import numpy as np

from distdbg import schema
from distdbg.schema import EventKind as K

_WATCHDOG = {K.HEARTBEAT, K.STALL, K.LOST, K.GC_BEGIN, K.GC_END, K.CLOCK}
_BEGIN = {
    K.BACKWARD_BEGIN: "backward",
    K.FORWARD_BEGIN: "forward",
    K.DATA_BEGIN: "data",
    K.OPTIMIZER_BEGIN: "optimizer",
    K.CHECKPOINT_BEGIN: "checkpoint",
    K.COLLECTIVE: "call",
    K.WAIT_BEGIN: "call",
    K.SETUP_BEGIN: "call",
}
_END = {
    K.BACKWARD_END: "backward",
    K.BACKWARD_RAISED: "backward",
    K.FORWARD_END: "forward",
    K.FORWARD_RAISED: "forward",
    K.DATA_END: "data",
    K.DATA_RAISED: "data",
    K.OPTIMIZER_END: "optimizer",
    K.OPTIMIZER_RAISED: "optimizer",
    K.CHECKPOINT_END: "checkpoint",
    K.CHECKPOINT_RAISED: "checkpoint",
    K.COLLECTIVE_END: "call",
    K.WAIT_END: "call",
    K.SETUP_END: "call",
    K.CALL_RAISED: "call",
}
_KIND_AT = schema.RECORD_SIZE - 2
_SIZE = 1 << 16
_TOLD = np.zeros(_SIZE, dtype=bool)  # kinds that say where a rank is
_TOLD[[*_BEGIN, *_END, K.STEP, K.EXIT, K.STOP]] = True
_PROGRESS = np.ones(_SIZE, dtype=bool)
_PROGRESS[[0, *_WATCHDOG]] = False


class Tail:
    """One rank's newest segments. ``poll`` returns whether the rank made progress since the last one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = 0
        self.collectives = 0
        self.last_event_ns = 0
        self.exited = False
        self.stopped = False  # recording ended (distdbg.stop(), a full disk) before the script did
        self._open: list[str] = []
        self._begun_ns = 0  # of the outermost thing open
        self._longest_ns: dict[str, int] = {}  # by what was outermost: the longest that ended so far
        self._number = 0
        self._position = 0
        self._map: mmap.mmap | None = None
        self._hole = (-1, -1)  # segment and slot of the first empty slot before a used one

    @property
    def phase(self) -> str:
        return next((what for what in reversed(self._open) if what != "call"), "loop")

    @property
    def called(self) -> bool:
        return bool(self._open) and self._open[-1] == "call"

    def overdue(self, now_ns: int, limit_s: float) -> bool:
        """In one forward, backward, ... for longer than the limit and ten times as long as any before it.

        What goes round in circles in there records events without getting anywhere.
        """
        if not self._open:
            return False
        elapsed = now_ns - self._begun_ns
        usual = self._longest_ns.get(self._open[0], 0)
        return 0 < 10 * usual < elapsed and elapsed > limit_s * 1e9

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None

    def poll(self) -> bool:
        moved = False
        for _ in range(64):  # segments
            if self._map is None and not self._map_segment():
                break
            moved = self._scan() or moved
            if self._map is not None and not self._full():
                break
            self.close()
            self._number += 1
            self._position = 0
        return moved

    def _map_segment(self) -> bool:
        path = self.folder / schema.SEGMENT_PATTERN.format(self._number)
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            return self._skip_deleted()
        try:
            size = os.fstat(fd).st_size
            if size <= schema.SEGMENT_HEADER_SIZE:
                return False
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return False
        finally:
            os.close(fd)
        return True

    def _skip_deleted(self) -> bool:
        """The writer deletes its oldest segments; go on with the oldest that is there and newer than ours."""
        numbers = [
            int(path.stem[4:]) for path in self.folder.glob("seg-*" + schema.SEGMENT_SUFFIX) if path.stem[4:].isdigit()
        ]
        newer = [number for number in numbers if number > self._number]
        if not newer:
            return False
        self._number, self._position = min(newer), 0
        return self._map_segment()

    def _capacity(self) -> int:
        assert self._map is not None
        return (len(self._map) - schema.SEGMENT_HEADER_SIZE) // schema.RECORD_SIZE

    def _full(self) -> bool:
        return self._position >= self._capacity()

    def _scan(self) -> bool:
        """Go through the records that are new; most of them are hooks of nodes, of which nothing is kept."""
        data, capacity = self._map, self._capacity()
        assert data is not None
        start = schema.SEGMENT_HEADER_SIZE + self._position * schema.RECORD_SIZE
        kinds = np.ndarray(
            (capacity - self._position,), "<u2", data, start + _KIND_AT, (schema.RECORD_SIZE,)
        ).copy()  # at once, since they are being written; and no view keeps the mapping
        used = np.flatnonzero(kinds)
        kinds = kinds[: used[-1] + 1] if len(used) else kinds[:0]
        holes = np.flatnonzero(kinds == 0)
        if len(holes):
            # A slot that another thread is about to fill; or, where it is still empty the next time, never will.
            hole = (self._number, self._position + int(holes[0]))
            if hole != self._hole:
                self._hole = hole
                kinds = kinds[: holes[0]]
        for index in np.flatnonzero(_TOLD[kinds]).tolist():
            self._note(int(kinds[index]), data, start + index * schema.RECORD_SIZE)
        progress = np.flatnonzero(_PROGRESS[kinds])
        if len(progress):
            last = start + int(progress[-1]) * schema.RECORD_SIZE
            self.last_event_ns = schema.RECORD.unpack_from(data, last)[0]
        self._position += len(kinds)
        return bool(len(progress))

    def _note(self, kind: int, data: mmap.mmap, offset: int) -> None:
        what = _BEGIN.get(kind)  # type: ignore[call-overload]
        if what is not None:
            if not self._open:
                self._begun_ns = schema.RECORD.unpack_from(data, offset)[0]
            self._open.append(what)
            if kind == K.COLLECTIVE:
                self.collectives += 1
            return
        what = _END.get(kind)  # type: ignore[call-overload]
        if what is not None:
            for index in range(len(self._open) - 1, -1, -1):
                if self._open[index] == what:
                    del self._open[index:]
                    break
            if not self._open:
                elapsed = schema.RECORD.unpack_from(data, offset)[0] - self._begun_ns
                # The first of a kind warms up; it says little of those that follow.
                before = self._longest_ns.get(what)
                self._longest_ns[what] = 0 if before is None else max(before, elapsed)
        elif kind == K.STEP:
            self.steps += 1
            self._open = [w for w in self._open if w == "optimizer"]
        elif kind in (K.EXIT, K.STOP):
            self.stopped = kind == K.STOP and not self.exited
            self.exited = True
            self._open = []
