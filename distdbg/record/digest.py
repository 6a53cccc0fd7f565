"""A digest of each step: hashes of the modules entered and of the collectives issued, in order.

The events themselves are kept for a while only. Where ranks parted before, these tell in which step.
"""

import zlib

from distdbg.shard import ShardWriter

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15


class StepDigest:
    """Rolling hashes, equal on ranks that did the same; ``step_ended`` writes them and begins anew."""

    __slots__ = ("_calls", "_marks", "_modules", "_writer")

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self._marks: dict[object, int] = {}
        self._modules = 0
        self._calls = 0

    def entered(self, key: int, text: str) -> None:
        """A module was entered; ``key`` stands for ``text`` in this process."""
        mark = self._marks.get(key)
        if mark is None:
            mark = self._marks[key] = zlib.crc32(text.encode("utf-8", "replace"))
        self._modules = (self._modules * _FACTOR + mark + 1) & _MASK

    def issued(self, operation: str, members: int) -> None:
        """A collective was issued in a group of so many members (sizes may differ: batches do)."""
        key = (operation, members)
        mark = self._marks.get(key)
        if mark is None:
            mark = self._marks[key] = zlib.crc32(f"{operation} {members}".encode())
        self._calls = (self._calls * _FACTOR + mark + 1) & _MASK

    def step_ended(self) -> None:
        self._writer.write_step(self._modules, self._calls)
        self._modules = self._calls = 0
