"""The run as Chrome trace event JSON, for the Perfetto UI (ui.perfetto.dev) and chrome://tracing.

A process per rank (pid is the rank), its threads, a span for everything begun and ended, flows that join
the same collective across ranks, the verdict's culprits as markers. Shards are read segment by segment and
written as they are read, so memory is bounded by one segment and by 32 bytes a collective.

As in a trace of torch.profiler, ``baseTimeNanoseconds + 1000 * ts`` is unix time in ns.
"""

from __future__ import annotations  # array is not subscriptable at run time before Python 3.12

import gzip
import io
import json
import os
from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from distdbg import __version__
from distdbg.analyze.read import ShardStream, stream_run
from distdbg.errors import DistdbgError, RunDirError
from distdbg.export.perfetto_rank import RankTrace

OLDER_ATTEMPT = 1_000_000  # added to the pid of a rank for each attempt before the newest


@dataclass
class Summary:
    """What was written: numbers of spans, of flows (collectives seen on two or more ranks) and of markers."""

    ranks: int = 0
    spans: int = 0
    flows: int = 0
    markers: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class Flows:
    """Where each collective was issued: parallel columns, packed, until all ranks have been read."""

    key: array[int] = field(default_factory=lambda: array("q"))
    seq: array[int] = field(default_factory=lambda: array("q"))
    t: array[int] = field(default_factory=lambda: array("q"))
    place: array[int] = field(default_factory=lambda: array("q"))  # pid << 20 | tid
    keys: dict[str, int] = field(default_factory=dict)

    def add(self, group: str, seq: int, t: int, pid: int, tid: int) -> None:
        """One rank issued a call of a group; ``t``: unix ns within its span."""
        self.key.append(self.keys.setdefault(group, len(self.keys)))
        self.seq.append(seq)
        self.t.append(t)
        self.place.append(pid << 20 | tid)

    def joined(self) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
        """(number, [(t, pid, tid), ...] in order of time) of each collective that two or more ranks issued."""
        key, seq, t, place = (np.frombuffer(c, dtype=np.int64) for c in (self.key, self.seq, self.t, self.place))
        if not len(key):
            return
        order = np.lexsort((t, seq, key))
        key, seq, t, place = key[order], seq[order], t[order], place[order]
        starts = np.flatnonzero(np.r_[True, (key[1:] != key[:-1]) | (seq[1:] != seq[:-1])])
        for number, (begin, end) in enumerate(zip(starts, np.r_[starts[1:], len(key)], strict=True), 1):
            if end - begin > 1:
                rows = zip(t[begin:end].tolist(), place[begin:end].tolist(), strict=True)
                yield number, [(when, where >> 20, where & 0xFFFFF) for when, where in rows]


class TraceFile:
    """Writes trace events one after the other; takes times in unix ns."""

    def __init__(self, file: TextIO, base_ns: int) -> None:
        self._file, self._base, self._first = file, base_ns, True

    def head(self, facts: dict[str, Any]) -> None:
        """Everything beside the events, in front of them."""
        self._file.write(json.dumps(facts)[:-1] + ',\n"traceEvents": [\n')

    def ts(self, t: int) -> str:
        """us since the base, exactly."""
        us, ns = divmod(t - self._base, 1000)
        return f"{us}.{ns:03d}"

    def write(self, text: str) -> None:
        """One event, as JSON text."""
        if self._first:
            self._first = False
            self._file.write(text)
        else:
            self._file.write(",\n" + text)

    def end(self) -> None:
        self._file.write("\n]}\n")


def write_perfetto(
    run_dir: Path,
    path: Path,
    *,
    ranks: Collection[int] | None = None,
    steps: range | None = None,
    verdict: dict[str, Any] | None = None,
    on_rank: Callable[[int], None] | None = None,
) -> Summary:
    """Write the trace to ``path`` (gzipped where it ends in .gz), all at once in place of what is there.

    ``ranks`` and ``steps`` choose what is written (default: all). ``verdict`` adds markers. ``on_rank`` is called
    with each rank's number when it is about to be written. Raises DistdbgError where the run cannot be read or
    none of the chosen ranks is in it, OSError where the file cannot be written.
    """
    streams, problems = stream_run(run_dir)
    chosen = [s for s in streams if ranks is None or s.rank in ranks]
    if not chosen:
        there = ", ".join(map(str, sorted({s.rank for s in streams})[:20]))
        raise RunDirError(f"{run_dir} holds none of the ranks asked for; it has {there}")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with _open(temporary, gzipped=path.suffix == ".gz") as file:
            summary = _write(file, chosen, steps, verdict, on_rank)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    summary.problems = [*problems, *(p for s in chosen for p in s.problems)]
    return summary


def _open(path: Path, *, gzipped: bool) -> TextIO:
    if gzipped:
        return io.TextIOWrapper(gzip.open(path, "wb", compresslevel=4), encoding="utf-8")
    return open(path, "w", encoding="utf-8", buffering=1 << 20)


def _write(
    file: TextIO,
    streams: list[ShardStream],
    steps: range | None,
    verdict: dict[str, Any] | None,
    on_rank: Callable[[int], None] | None,
) -> Summary:
    newest = max(s.attempt for s in streams)
    base = min(s.anchor_unix_ns for s in streams) // 1_000_000_000 * 1_000_000_000
    trace, summary, flows = TraceFile(file, base), Summary(ranks=len(streams)), Flows()
    trace.head(_head(streams, base))
    culprits = (verdict or {}).get("culprits", [])
    for stream in streams:
        if on_rank is not None:
            on_rank(stream.rank)
        pid = stream.rank + OLDER_ATTEMPT * (newest - stream.attempt)
        mine = [c for c in culprits if c.get("rank") == stream.rank] if stream.attempt == newest else []
        written = RankTrace(stream, pid, trace, flows, steps)
        written.write(mine, verdict or {})
        summary.spans += written.spans
        summary.markers += written.markers
    for number, calls in flows.joined():
        for place, (t, pid, tid) in enumerate(calls):
            phase = "s" if place == 0 else "f" if place == len(calls) - 1 else "t"
            bound = ', "bp": "e"' if phase == "f" else ""
            trace.write(
                f'{{"ph": "{phase}", "id": {number}, "name": "collective", "cat": "collective", '
                f'"pid": {pid}, "tid": {tid}, "ts": {trace.ts(t)}{bound}}}'
            )
        summary.flows += 1
    trace.end()
    return summary


def _head(streams: list[ShardStream], base: int) -> dict[str, Any]:
    first = streams[0]
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "distributedInfo": {"backend": first.backend, "rank": first.rank, "world_size": first.world_size},
        "host_name": first.host,
        "distdbg": {
            "version": __version__,
            "ranks": [s.rank for s in streams],
            "clock": "corrected unix time",
            "clock_error_ns": [s.clock_error_ns for s in streams],
        },
    }


def parse_ranks(text: str) -> set[int]:
    """ "0,1,4-7" -> ranks. Raises DistdbgError."""
    found: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise DistdbgError(f"--ranks {text}: give numbers and ranges, such as 0,1,4-7") from None
    return found


def parse_steps(text: str) -> range:
    """ "10:20" -> steps 10 to 19, "10:" -> all from 10 on, "10" -> only this one. Raises DistdbgError."""
    first, colon, last = text.partition(":")
    try:
        begin = int(first or 0)
        end = (int(last) if last else 1 << 32) if colon else begin + 1
    except ValueError:
        raise DistdbgError(f"--steps {text}: give FIRST:LAST as Python slices do, such as 10:20") from None
    if end <= begin:
        raise DistdbgError(f"--steps {text}: this holds no step; 10:20 means steps 10 to 19")
    return range(begin, end)
