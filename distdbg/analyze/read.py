"""A run directory -> shards and the launcher's events. Reads live shards, too; never unpickles or evaluates.

What can be read is read; what cannot is told in ``Run.problems``, each with the file, the rank and the next step.
"""

import json
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distdbg import schema
from distdbg.errors import RunDirError, ShardError

if TYPE_CHECKING:
    from distdbg.analyze.clock import Clocks
    from distdbg.analyze.window import Window

RECORD_DTYPE = np.dtype([(name, kind) for name, kind in schema.RECORD_FIELDS])
_FOLDER = re.compile(r"rank(\d+)-attempt(\d+)-(.*)-(\d+)$")
MAX_TEXT_BYTES = 64 << 20
_KNOWN = np.isin(np.arange(1 << 16), [int(kind) for kind in schema.EventKind])


@dataclass(frozen=True)
class Name:
    """One line of a names table."""

    category: str
    text: str
    extra: dict[str, Any] | None


@dataclass
class Shard:
    """What one process recorded. ``records``: RECORD_DTYPE, shape (events,), sorted by time.

    ``names[i]`` is the name with id i (None where it is unknown). Times of records are monotonic ns of the host;
    ``anchor_*`` is one moment on both clocks.
    """

    folder: Path
    rank: int
    attempt: int
    host: str
    pid: int
    world_size: int
    run_id: str
    anchor_mono_ns: int
    anchor_unix_ns: int
    names: Sequence[Name | None]
    records: np.ndarray
    meta: dict[str, Any]
    exception: dict[str, Any] | None = None
    stacks: dict[str, Any] | None = None
    native_stacks: dict[str, Any] | None = None
    fatal_stacks: Path | None = None
    clock: str = ""  # shards with the same one were written by one clock; "" where it is not known
    clock_error_ns: int | None = 0  # by how much its times may be off on the one timeline; None: not known
    first_step: int | None = None  # the first step that was read, where that is not all there is


@dataclass
class Run:
    """A run directory: shards of all attempts, the launchers' events in order of time, run.json.

    ``flight_recorder``: dumps of torch's Flight Recorder that were given beside it.
    """

    path: Path
    shards: list[Shard] = field(default_factory=list)
    launcher: list[dict[str, Any]] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    flight_recorder: list[Path] = field(default_factory=list)
    clocks: "Clocks | None" = None
    window: "Window | None" = None  # None: all of it was read

    @property
    def clock_sentence(self) -> str:
        """How well the times of different hosts compare; "" where there is one clock."""
        return self.clocks.sentence if self.clocks else ""


def read_run(run_dir: str | Path, window: "Window | None" = None) -> Run:
    """Read a run directory, or of its events those in a window.

    Raises RunDirError where there is no run, ShardError where no shard can be read.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise RunDirError(f"{path} is not a directory; give the run directory that `distdbg run` printed first")
    run = Run(path, window=window)
    run.run = json_file(path / schema.RUN_FILE, run.problems) or {}
    for file in sorted(path.glob(schema.LAUNCHER_PREFIX + "*.jsonl")):
        events = _json_lines(file, run.problems)
        host = file.stem.removeprefix(schema.LAUNCHER_PREFIX).rpartition("-")[0]
        run.launcher.extend({"host": host, **event} for event in events)
    found = folders(path)
    if not found:
        if run.launcher or run.run:
            raise RunDirError(
                f"{path} holds no shard: the job ended before any rank began to record; look at its own output"
            )
        raise RunDirError(f"{path} holds no run (no {schema.RANKS_FOLDER}/ folder); give a run directory of distdbg")
    for folder in found:
        if window is not None and not window.holds(folder):
            continue
        shard = _read_shard(folder, run.problems, window)
        if shard is not None:
            run.shards.append(shard)
    if not run.shards:
        raise ShardError(f"no shard in {path} can be read: " + "; ".join(run.problems[:3]))
    _check_mixed(run)
    from distdbg.analyze.clock import align

    run.clocks = align(run.shards, run.launcher)
    run.launcher.sort(key=lambda event: _int(event.get("t_unix_ns")))
    return run


def folders(run_dir: Path) -> list[Path]:
    """The folders of a run's shards."""
    return sorted(path for path in (run_dir / schema.RANKS_FOLDER).glob("*") if path.is_dir())


def attempt_and_rank(folder: Path) -> tuple[int, int]:
    """Attempt and rank of a shard, as its folder's name tells; 0 where it does not."""
    matched = _FOLDER.match(folder.name)
    return (int(matched.group(2)), int(matched.group(1))) if matched else (0, 0)


class ShardStream:
    """A shard whose records are not held in memory but read segment by segment.

    ``problems`` grows while it is read. ``world_size`` and ``backend`` are as the rank knew them.
    """

    def __init__(self, folder: Path, about: dict[str, Any], problems: list[str]) -> None:
        matched = _FOLDER.match(folder.name)
        found = about.get("anchor")
        anchor: dict[str, Any] = found if isinstance(found, dict) else {}
        self.folder = folder
        self.problems = problems
        self.rank = _int(about.get("rank", matched.group(1) if matched else 0))
        self.attempt = _int(about.get("attempt", matched.group(2) if matched else 0))
        self.host = str(about.get("host", matched.group(3) if matched else ""))
        self.pid = _int(about.get("pid", matched.group(4) if matched else 0))
        self.world_size = max(1, _int(about.get("world_size", 1)))
        self.anchor_unix_ns = _int(anchor.get("unix_ns"))
        self.anchor_mono_ns = _int(anchor.get("mono_ns"))
        self.clock = _clock_id(about)
        self.clocks: Clocks | None = None
        self.clock_error_ns: int | None = 0  # by how much its times may be off; None: not known
        self.offset_ns = self.anchor_unix_ns - self.anchor_mono_ns
        self.names = _read_names(folder, problems)
        groups = (name.extra or {} for name in self.names if name is not None and name.category == "group")
        self.backend = str(about.get("backend") or next((g["backend"] for g in groups if "backend" in g), "unknown"))
        self._groups: dict[int, tuple[str, str]] = {}

    def follow(self, clocks: "Clocks") -> None:
        """Give times on the one timeline of a run from now on."""
        if self.clock:
            self.clocks = clocks
            self.anchor_unix_ns = clocks.moment(self.clock, self.anchor_mono_ns)
            self.offset_ns = self.anchor_unix_ns - self.anchor_mono_ns
            self.clock_error_ns = clocks.error_ns(self.clock)

    def text(self, number: int) -> str:
        """The text of a name, or a stand-in where the table does not have it."""
        name = self.names[number] if 0 < number < len(self.names) else None
        return name.text if name is not None else (f"name {number}" if number else "")

    def group(self, number: int) -> tuple[str, str]:
        """(key, name) of a process group; the key is the same on all of its ranks, "" where it is not known."""
        known = self._groups.get(number)
        if known is None:
            name = self.names[number] if 0 < number < len(self.names) else None
            extra = (name.extra or {}) if name is not None else {}
            members = extra.get("ranks")
            ranks = ",".join(map(str, members)) if isinstance(members, list) else ""
            known = self._groups[number] = (f"{extra.get('key', '')}:{ranks}" if ranks else "", self.text(number))
        return known

    def segments(self) -> Iterator[np.ndarray]:
        """The records, a segment at a time; in order of time thread by thread."""
        for path in sorted(self.folder.glob("seg-*" + schema.SEGMENT_SUFFIX)):
            try:
                records, _ = _read_segment(path)
            except ShardError as error:
                self.problems.append(str(error))
                continue
            records = records[_KNOWN[records["kind"]]]
            if self.clocks is not None and self.clocks.drifts(self.clock):
                records = records.copy()
                records["t"] = self.clocks.to_unix(self.clock, records["t"]) - self.offset_ns
            yield records


def stream_run(run_dir: str | Path) -> tuple[list[ShardStream], list[str]]:
    """The shards of a run, for reading one after the other, and what cannot be read. Raises as `read_run` does."""
    path = Path(run_dir)
    problems: list[str] = []
    if not path.is_dir():
        raise RunDirError(f"{path} is not a directory; give the run directory that `distdbg run` printed first")
    streams = []
    for folder in folders(path):
        about = json_file(folder / schema.META_FILE, problems)
        if about is None:
            problems.append(f"{folder}: no {schema.META_FILE}; the rank is left out, copy its folder again")
            continue
        streams.append(ShardStream(folder, about, []))
    if not streams:
        raise RunDirError(
            f"{path} holds no shard that can be read; give a run directory of distdbg"
            + "".join(f"; {p}" for p in problems[:3])
        )
    streams.sort(key=lambda s: (-s.attempt, s.rank))
    from distdbg.analyze.clock import clocks_of

    clocks = clocks_of(streams)
    for stream in streams:
        stream.follow(clocks)
    return streams, problems


def _check_mixed(run: Run) -> None:
    runs = {(s.attempt, s.run_id) for s in run.shards}
    attempts = {attempt for attempt, _ in runs}
    if len(runs) > len(attempts):
        ids = ", ".join(sorted({run_id for _, run_id in runs}))
        run.problems.append(f"{run.path} mixes shards of several runs ({ids}); use a run directory of its own for each")


def _int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


def _clock_id(about: dict[str, Any]) -> str:
    found = about.get("clock")
    return str(found.get("id", ""))[:64] if isinstance(found, dict) else ""


def json_file(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """A JSON object from a file; None, and a problem where it is there and can't be read."""
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            problems.append(f"{path} is larger than {MAX_TEXT_BYTES >> 20} MB and was left out")
            return None
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path} cannot be read ({type(error).__name__}); it was left out")
        return None
    if not isinstance(found, dict):
        problems.append(f"{path} does not hold what it should (a JSON object); it was left out")
        return None
    return found


def _json_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        problems.append(f"{path} cannot be read ({error.strerror}); the launcher's events are missing")
        return []
    found = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            if number < len(lines):
                problems.append(f"{path}, line {number}: not JSON; left out")
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


def _read_names(folder: Path, problems: list[str]) -> list[Name | None]:
    names: list[Name | None] = [None]
    path = folder / schema.NAMES_FILE
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        problems.append(f"{path} is missing: nodes and modules of {folder.name} have no names; copy the whole folder")
        return names
    bad = 0
    for line in lines:
        try:
            number, category, text, extra = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            bad += 1
            continue
        if not isinstance(number, int) or not 0 < number < 10_000_000 or not isinstance(text, str):
            bad += 1
            continue
        if number >= len(names):
            names.extend([None] * (number + 1 - len(names)))
        names[number] = Name(str(category), text, extra if isinstance(extra, dict) else None)
    if bad > 1:  # the last line of a killed rank may be torn
        problems.append(f"{path}: {bad} lines cannot be read; their names are missing")
    return names


def capacity(path: Path) -> int:
    """The number of slots of a segment. Raises OSError; ShardError where it is none that can be read."""
    with open(path, "rb") as file:
        _header(path, file.read(schema.SEGMENT_HEADER_SIZE))
        return (os.fstat(file.fileno()).st_size - schema.SEGMENT_HEADER_SIZE) // schema.RECORD_SIZE


def slots(path: Path, begin: int, end: int) -> np.ndarray:
    """Some slots of a segment, as far as it has them; RECORD_DTYPE, shape (slots,). Raises OSError."""
    with open(path, "rb") as file:
        file.seek(schema.SEGMENT_HEADER_SIZE + begin * schema.RECORD_SIZE)
        return _decoded(file.read(max(0, end - begin) * schema.RECORD_SIZE))


def _decoded(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=RECORD_DTYPE, count=len(data) // schema.RECORD_SIZE)


def _header(path: Path, head: bytes) -> dict[str, Any]:
    """The JSON in a segment's header. Raises ShardError."""
    try:
        magic, version, header, record, _, _, length = schema.SEGMENT_HEADER.unpack_from(head)
    except struct.error:
        raise ShardError(f"{path} is truncated: no header; the segment is left out") from None
    if magic != schema.MAGIC:
        raise ShardError(f"{path} is not a segment of distdbg; the file is left out")
    if version > schema.SCHEMA_VERSION:
        raise ShardError(
            f"{path} was written by a newer distdbg (schema {version}, this one reads {schema.SCHEMA_VERSION}); "
            "upgrade distdbg to read it"
        )
    if record != schema.RECORD_SIZE or header != schema.SEGMENT_HEADER_SIZE:
        raise ShardError(f"{path} has another record layout ({record} bytes a record); the file is left out")
    try:
        about = json.loads(head[schema.SEGMENT_HEADER.size : schema.SEGMENT_HEADER.size + length])
    except ValueError:
        about = {}
    return about if isinstance(about, dict) else {}


def _read_segment(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """(records, header's JSON). Raises ShardError."""
    try:
        with open(path, "rb") as file:
            about = _header(path, file.read(schema.SEGMENT_HEADER_SIZE))
            records = _decoded(file.read())
    except OSError as error:
        raise ShardError(f"{path} cannot be read ({error.strerror})") from error
    return records[records["kind"] != 0], about


def _segments(folder: Path, problems: list[str]) -> tuple[list[np.ndarray], dict[str, Any]]:
    """(records of each segment, the first header's JSON)."""
    parts: list[np.ndarray] = []
    header: dict[str, Any] = {}
    for path in sorted(folder.glob("seg-*" + schema.SEGMENT_SUFFIX)):
        try:
            records, about = _read_segment(path)
        except ShardError as error:
            problems.append(str(error))
            continue
        header = header or about
        parts.append(records)
    return parts, header


def _windowed(folder: Path, window: "Window", problems: list[str]) -> tuple[list[np.ndarray], int | None]:
    try:
        records, step = window.read(folder)
    except OSError as error:
        problems.append(f"{folder} cannot be read ({error.strerror}); copy it again from the rank's host")
        return [], None
    return [records], step


def _in_order(records: np.ndarray) -> np.ndarray:
    t = np.ascontiguousarray(records["t"])
    return records if (t[1:] >= t[:-1]).all() else records[np.argsort(t, kind="stable")]


def _read_shard(folder: Path, problems: list[str], window: "Window | None") -> Shard | None:
    first_step: int | None = None
    header: dict[str, Any] = {}
    if window is not None:
        parts, first_step = _windowed(folder, window, problems)
    else:
        parts, header = _segments(folder, problems)
    meta = json_file(folder / schema.META_FILE, problems) or {}
    about = {**header, **meta}
    if not parts or not about:
        problems.append(f"{folder}: nothing of this rank can be read; copy the folder again from the rank's host")
        return None
    records = np.concatenate(parts) if len(parts) > 1 else parts[0]
    known = _KNOWN[records["kind"]]
    if not known.all():
        problems.append(f"{folder}: {int((~known).sum())} events of unknown kinds were left out")
        records = records[known]
    records = _in_order(records)
    matched = _FOLDER.match(folder.name)
    found = about.get("anchor")
    anchor: dict[str, Any] = found if isinstance(found, dict) else {}
    if meta.get("stopped"):
        problems.append(f"rank {about.get('rank')}: {meta['stopped']}; what came later is not there")
    fatal = folder / schema.FATAL_STACKS_FILE
    return Shard(
        folder=folder,
        rank=_int(about.get("rank", matched.group(1) if matched else 0)),
        attempt=_int(about.get("attempt", matched.group(2) if matched else 0)),
        host=str(about.get("host", matched.group(3) if matched else "")),
        pid=_int(about.get("pid", matched.group(4) if matched else 0)),
        world_size=max(1, _int(about.get("world_size", 1))),
        run_id=str(about.get("run_id", "")),
        anchor_mono_ns=_int(anchor.get("mono_ns")),
        anchor_unix_ns=_int(anchor.get("unix_ns")),
        names=_read_names(folder, problems),
        records=records,
        meta=about,
        exception=json_file(folder / schema.EXCEPTION_FILE, problems),
        stacks=json_file(folder / schema.STACKS_FILE, problems),
        native_stacks=json_file(folder / schema.NATIVE_STACKS_FILE, problems),
        fatal_stacks=fatal if fatal.exists() else None,
        clock=_clock_id(about),
        first_step=first_step,
    )
