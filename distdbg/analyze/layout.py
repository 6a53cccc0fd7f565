"""Where the events of a shard lie, found by looking at a few of them: what lets a reader begin at a step."""

from bisect import bisect_left
from pathlib import Path

import numpy as np

from distdbg import schema
from distdbg.analyze import read
from distdbg.errors import ShardError
from distdbg.schema import EventKind as K

_BLOCK = 64  # slots in a row among which one at least is taken, up to where a segment has been written
_HEAD = 1024  # first events of a shard that are looked through for what holds for all that follow
_KEPT = [int(kind) for kind in (K.REPLICATE, K.JOIN_BEGIN, K.JOIN_END)]  # of these


class Layout:
    """Where the events of a shard lie, found by looking at a few of them.

    ``count``: slots up to the last one that was written. ``usable``: whether steps can be looked up at all.
    """

    def __init__(self, folder: Path) -> None:
        self.parts: list[tuple[Path, int]] = []  # segments that hold events, and how many slots of them are written
        self.starts = [0]  # of each segment, and the end
        self.last_step = 0
        self.usable = False
        paths = sorted(folder.glob("seg-*" + schema.SEGMENT_SUFFIX))
        try:
            found = [(path, _written(path)) for path in paths]
            self.parts = [(path, count) for path, count in found if count]
            for _, count in self.parts:
                self.starts.append(self.starts[-1] + count)
            firsts = [self.step_at(start) for start in self.starts[:-1]]
            self.last_step = max(0, self.step_at(self.count - 1)) if self.parts else 0
        except (OSError, ShardError):
            return
        # A process that began anew to count steps has none that could be looked up by halving.
        self.usable = bool(self.parts) and firsts == sorted(firsts) and firsts[-1] <= self.last_step

    @property
    def count(self) -> int:
        return self.starts[-1]

    def step_at(self, index: int) -> int:
        """The step of an event, or of the next one before it that is there; -1 where there is none."""
        part = min(bisect_left(self.starts, index + 1) - 1, len(self.parts) - 1)
        at = index - self.starts[part]
        found = read.slots(self.parts[part][0], max(0, at + 1 - _BLOCK), at + 1)
        found = found[found["kind"] != 0]
        return int(found["step"][-1]) if len(found) else -1

    def position(self, step: int) -> int:
        """The index of the first event of a step, or of a later one."""
        return bisect_left(range(self.count), step, key=self.step_at)

    def records(self, step: int) -> tuple[np.ndarray, bool]:
        """The events from the end of the step before on, and whether these are all.

        Among them are the few earlier ones that hold for all that follow. Raises OSError.
        """
        position = self.position(step)
        begin = max(0, position - _BLOCK)  # threads may have written a little out of order
        found = []
        for (path, count), start in zip(self.parts, self.starts, strict=False):
            if start + count > begin:
                part = read.slots(path, max(0, begin - start), count)
                ended = (part["step"] + 1 == step) & (part["kind"] == K.STEP)
                found.append(part[(part["kind"] != 0) & ((part["step"] >= step) | ended)])
        head = read.slots(self.parts[0][0], 0, min(_HEAD, begin))
        return np.concatenate([head[np.isin(head["kind"], _KEPT)], *found]), position == 0


def _written(path: Path) -> int:
    """The number of slots of a segment up to the last one that was written. Raises OSError, ShardError."""
    blocks = -(-read.capacity(path) // _BLOCK)

    def empty(block: int) -> bool:
        return not read.slots(path, block * _BLOCK, (block + 1) * _BLOCK)["kind"].any()

    if blocks and empty(blocks - 1):
        blocks = bisect_left(range(blocks), True, key=empty)
    if not blocks:
        return 0
    last = read.slots(path, (blocks - 1) * _BLOCK, blocks * _BLOCK)["kind"]
    return int((blocks - 1) * _BLOCK + np.flatnonzero(last)[-1] + 1)
