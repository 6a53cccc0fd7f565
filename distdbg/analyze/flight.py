"""PyTorch's Flight Recorder: its dumps (pickles, JSON) -> the calls that each rank issued last, and which ended.

Dumps come from NCCL's watchdog (TORCH_FR_DUMP_TEMP_FILE or TORCH_NCCL_DEBUG_INFO_TEMP_FILE, and the rank), from
`torch._C._distributed_c10d._dump_fr_trace()`, and from distdbg's own watchdog (`flight-recorder.json` of a shard).
What the fields mean differs between backends; what this module takes them for is said where it does.
"""

import glob
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distdbg import schema
from distdbg.analyze import flight_pickle
from distdbg.errors import DumpError

MAX_DUMP_BYTES = 256 << 20
MAX_RANKS = 200_000  # a larger number in a name is a date or the like
PREFIX = "flight-recorder"
_RANK = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d+)\D*$")
MAX_DIMENSIONS = 64  # torch's own limit
_SUFFIXES = ("", ".json", ".pickle", ".pkl", ".bin", ".dump", ".trace")
# torch's C++ names of types, where they are not the Python ones in lower case.
_DTYPES = {
    "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Half": "float16",
    "Float": "float32", "Double": "float64", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
_OPERATIONS = (
    ("barrier", "barrier"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("coalesced", "coalesced"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("send", "send"),
    ("recv", "recv"),
)
_PHASES = (
    ("/torch/autograd/", "backward"),
    ("/torch/optim/", "optimizer"),
    ("/torch/distributed/checkpoint/", "checkpoint"),
    ("/torch/utils/data/", "data"),
    ("/torch/nn/modules/module.py", "forward"),
)
_LIBRARY = re.compile(r"site-packages/|dist-packages/|/torch/(distributed|nn|autograd|optim|utils|_)|/lib/python3")


@dataclass(frozen=True, slots=True)
class Call:
    """One entry of a dump. ``seq`` counts the collectives of the group (or its messages, if ``p2p``) from 1.

    ``finished`` is None where it can't be told. ``numel``: elements that the rank put in; None if not told.
    """

    rank: int
    group: str  # torch's name of the group, the same on all of its ranks
    title: str  # as people know the group, and as a shard names it
    seq: int
    op: str  # snake case, without the backend
    p2p: bool
    peer: int | None  # of a message, as the group numbers its ranks
    numel: int | None
    dtypes: tuple[str, ...]
    signature: str
    finished: bool | None
    timed_out: bool
    t: int  # unix ns
    number: int  # of the entry, from 0
    backend: str
    phase: str | None  # as the frames tell; None without frames
    source: str | None

    @property
    def text(self) -> str:
        return f"{self.op} #{self.seq} of {self.title}"


@dataclass
class Dump:
    """What one rank's Flight Recorder held. ``taken``: when the file was written (unix ns), as its file system says."""

    rank: int
    file: Path
    taken: int
    calls: list[Call] = field(default_factory=list)  # collectives, in the order they were issued
    messages: list[Call] = field(default_factory=list)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by the name of a group, where it is told
    enqueued: dict[str, int] = field(default_factory=dict)  # by pg_id: collectives issued, as the group's status says
    pg_ids: dict[str, str] = field(default_factory=dict)  # name of a group -> pg_id
    world: int = 1  # at least so many ranks there are
    first: int = 0  # number of the oldest entry that is kept
    messaging: bool = False  # sent or received messages, held or not: gloo's dumps do not hold them
    gaps: bool = False  # only the unfinished entries were written
    problems: list[str] = field(default_factory=list)

    @property
    def backends(self) -> set[str]:
        return {call.backend for call in (*self.calls, *self.messages) if call.backend}

    @property
    def last_t(self) -> int:
        """When the rank issued its last call (unix ns), 0 if it issued none."""
        return max((call.t for call in (*self.calls, *self.messages)), default=0)


# ---- files


def own_files(run_dir: Path) -> dict[Path, list[Path]]:
    """Dumps that lie in a run directory, by their folder: a shard's for those of distdbg's own watchdog."""
    found: dict[Path, list[Path]] = {}
    for file in sorted((run_dir / schema.RANKS_FOLDER).glob("*/" + schema.FLIGHT_RECORDER_FILE)):
        found[file.parent] = [file]
    others = [file for path in sorted(run_dir.glob(PREFIX + "*")) for file in _files_of(path)]
    if others:
        found[run_dir] = others
    return found


def files_at(path: Path) -> list[Path]:
    """The dumps that a path stands for: a file, a folder, or the prefix before the ranks.

    Raises DumpError where there is none.
    """
    found = _files_of(path)
    if not found and not path.exists():
        candidates = sorted(Path(p) for p in glob.glob(glob.escape(str(path)) + "*"))
        found = [file for file in candidates if file.is_file() and rank_of(file) is not None]
    if not found:
        raise DumpError(
            f"{path}: no Flight Recorder dump there; give a dump, a folder of dumps, or what stands before the rank "
            "in their names (TORCH_FR_DUMP_TEMP_FILE)"
        )
    return found


def files_in(folder: Path) -> list[Path]:
    """The files of a folder that may be dumps: by their names, which tell a rank, and their first bytes."""
    return _files_of(folder)


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    files = [
        file for file in path.iterdir() if file.is_file() and (file.suffix in _SUFFIXES or file.suffix[1:].isdigit())
    ]
    return sorted(file for file in files if rank_of(file) is not None and _looks_like_a_dump(file))


def _looks_like_a_dump(file: Path) -> bool:
    """By the first bytes: a pickle of protocol 2 or newer, or a JSON object."""
    try:
        with open(file, "rb") as opened:
            head = opened.read(64).lstrip()
    except OSError:
        return True  # reading it will say what is wrong
    return head[:1] in (b"\x80", b"{", b"")


def rank_of(file: Path) -> int | None:
    """The rank that a file's name tells: after "rank", else its last number; for a shard's file the folder's."""
    for text in (file.name, file.parent.name if file.name == schema.FLIGHT_RECORDER_FILE else ""):
        found = _RANK.search(text) or _LAST_NUMBER.search(text.removesuffix(".json"))
        if found and int(found.group(1)) < MAX_RANKS:
            return int(found.group(1))
    return None


def read_all(files: Sequence[Path], problems: list[str]) -> dict[int, Dump]:
    """By rank its dump; of two of one rank the one that was written later. What can't be read is a problem."""
    found: dict[int, Dump] = {}
    for file in files:
        try:
            dump = read_dump(file)
        except DumpError as error:
            problems.append(str(error))
            continue
        known = found.get(dump.rank)
        # The same dump as JSON has no stacks.
        if known is None or (dump.taken // 10**9, file.suffix != ".json") > (
            known.taken // 10**9,
            known.file.suffix != ".json",
        ):
            found[dump.rank] = dump
    for dump in found.values():
        problems += dump.problems
    return dict(sorted(found.items()))


def read_dump(file: Path) -> Dump:
    """Read one dump, pickled or JSON; nothing in it is executed. Raises DumpError."""
    rank = rank_of(file)
    who = f"{file}{f' (rank {rank})' if rank is not None else ''}"
    found = _load(file, who)
    if not isinstance(found, dict) or not isinstance(found.get("entries", [] if "pg_status" in found else None), list):
        raise DumpError(
            f"{who} is no Flight Recorder dump (no list of entries); leave it out, or give the dumps' prefix"
        )
    told = found.get("rank")
    dump = Dump(-1, file, file.stat().st_mtime_ns)
    if isinstance(told, int) and not isinstance(told, bool) and 0 <= told < MAX_RANKS:
        if rank is not None and rank != told:
            dump.problems.append(f"{file}: it says that it is of rank {told}, its name says {rank}; taken for {told}")
        rank = told
    if rank is None:
        raise DumpError(f"{file}: the rank is neither in the dump nor in its name; name it so that it ends in the rank")
    dump.rank = rank
    _fill(dump, found)
    return dump


def _load(file: Path, who: str) -> Any:
    try:
        size = file.stat().st_size
        if size > MAX_DUMP_BYTES:
            raise DumpError(
                f"{who} has {size >> 20} MB, more than {MAX_DUMP_BYTES >> 20}; record fewer entries "
                "(TORCH_FR_BUFFER_SIZE) or no C++ stacks"
            )
        data = file.read_bytes()
    except OSError as error:
        raise DumpError(f"{who} cannot be read ({error.strerror}); copy it again from the rank's host") from error
    if not data:
        raise DumpError(f"{who} is empty: the rank ended while it wrote; copy it again, or go on without it")
    try:
        if data[:1] == b"\x80":
            return flight_pickle.loads(data)
        return json.loads(data)
    except flight_pickle.PickleError as error:
        raise DumpError(f"{who} {error}; copy it again from the rank's host, or go on without it") from None
    except (ValueError, RecursionError, MemoryError):
        raise DumpError(f"{who} is neither a pickled dump nor JSON, or is truncated; copy it again") from None


# ---- what it holds


def _fill(dump: Dump, found: dict[Any, Any]) -> None:
    config, status = found.get("pg_config"), found.get("pg_status")
    for key, about in (config if isinstance(config, dict) else {}).items():
        members = _ranks(about.get("ranks")) if isinstance(about, dict) else ()
        dump.world = max([dump.world, *(rank + 1 for rank in members)])
        if members and str(key):  # gloo keeps all groups under "", so that only the last one made is there
            dump.members[str(key)] = members
    for key, about in (status if isinstance(status, dict) else {}).items():
        if isinstance(about, dict):
            dump.enqueued[str(key)] = _int(about.get("last_enqueued_collective"), -1)
    bad = 0
    numbers = []
    for position, entry in enumerate(found.get("entries") or []):
        call = _call(dump.rank, entry, position)
        if call is None:
            bad += 1
            continue
        numbers.append(call.number)
        dump.pg_ids.setdefault(call.group, str(entry.get("pg_id", "")))
        (dump.messages if call.p2p else dump.calls).append(call)
        # `op_id` counts the messages of a group, too; of NCCL's batches it counts each part.
        dump.messaging |= call.p2p or (call.backend == "gloo" and _int(entry.get("op_id")) > call.seq)
    if numbers:
        dump.first = min(numbers)
        dump.gaps = len(numbers) + bad < max(numbers) - dump.first + 1
    else:
        dump.gaps = any(count > 0 for count in dump.enqueued.values())
    _join_coalesced(dump)
    if bad:
        dump.problems.append(f"{dump.file} (rank {dump.rank}): {bad} entries are not as they should be; left out")


def _join_coalesced(dump: Dump) -> None:
    """Parts of a coalesced batch are never marked as ended; the batch's own entry, which follows them, is."""
    following: dict[str, Call] = {}  # by group, the batch that the calls before it may be parts of
    parts: dict[str, bool] = {}  # by group, whether these are messages
    kept: list[Call] = []
    for call in sorted((*dump.calls, *dump.messages), key=lambda call: call.number, reverse=True):
        if call.op == "coalesced":
            following[call.group] = call
            parts.pop(call.group, None)
            continue
        batch = following.get(call.group)
        if batch is not None and parts.setdefault(call.group, call.p2p) != call.p2p:
            del following[call.group]  # a batch has only collectives or only messages
            batch = None
        ended = batch is not None and not call.finished
        kept.append(replace(call, finished=batch.finished, timed_out=batch.timed_out) if batch and ended else call)
    dump.calls = [call for call in reversed(kept) if not call.p2p]
    dump.messages = [call for call in reversed(kept) if call.p2p]


def _call(rank: int, entry: Any, position: int) -> Call | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("profiling_name"), str):
        return None
    backend, _, name = _text(entry["profiling_name"]).rpartition(":")
    group, title = _group(entry.get("process_group"), entry.get("pg_id"))
    op, peer = operation(name)
    p2p = entry.get("is_p2p") is True or op in ("send", "recv")
    seq = _int(entry.get("p2p_seq_id" if p2p else "collective_seq_id", entry.get("seq_id")), -1)
    if seq < 0 or seq > 1 << 62:
        return None
    sizes = _sizes(entry.get("input_sizes"))
    dtypes = _dtypes(entry.get("input_dtypes"))
    phase, source = _where(entry.get("frames"))
    finished, timed_out = _ended(entry, backend)
    return Call(
        rank=rank,
        group=group,
        title=title,
        seq=seq,
        op=op,
        p2p=p2p,
        peer=peer,
        numel=None if sizes is None else sum(math.prod(size) for size in sizes),
        dtypes=tuple(sorted(set(dtypes))),
        signature=_signature(sizes, dtypes) if op != "barrier" else "",
        finished=finished,
        timed_out=timed_out,
        t=max(0, _int(entry.get("time_created_ns"))),
        number=_int(entry.get("record_id"), position),
        backend=backend,
        phase=phase,
        source=source,
    )


def _ended(entry: dict[Any, Any], backend: str) -> tuple[bool | None, bool]:
    """(whether the call ended, whether it timed out).

    NCCL keeps `state`, and gives up (retires) a call that timed out without its being completed. gloo leaves `state`
    at "scheduled" for ever and retires what ended, or failed.
    """
    state, retired = entry.get("state"), entry.get("retired")
    if state == "completed":
        return True, False
    if "nccl" in backend or "rccl" in backend or backend in ("xccl", "hccl", "mccl"):
        return False, retired is True
    if isinstance(retired, bool):
        return retired, False
    return None, False


def operation(name: str) -> tuple[str, int | None]:
    """(operation in snake case, peer) of a name such as "_all_gather_base", "ALLREDUCE", "send 0->1", "recv 1<-0"."""
    word, _, rest = name.strip().partition(" ")
    plain = word.replace("_", "").lower()
    op = next((known for part, known in _OPERATIONS if part in plain and (part != "coalesced" or plain == part)), word)
    ends = re.fullmatch(r"(\d{1,9})(?:->|<-)(\d{1,9})", rest.strip())
    return op, int(ends.group(2)) if ends and op in ("send", "recv") else None


def _group(told: Any, pg_id: Any) -> tuple[str, str]:
    """(name, title) of a process group; the title as a shard has it."""
    parts = [_text(part) for part in told[:2]] if isinstance(told, (list, tuple)) else [_text(told or "")]
    name, desc = [*parts, "", ""][:2]
    name = name or _text(pg_id)
    title = desc if desc not in ("", "undefined") else f"group {name}"
    return name, title if name == "0" or desc == "default_pg" else f"{title}#{name}"


def _ranks(told: Any) -> tuple[int, ...]:
    """A group's ranks: a list, or the text of one; () where it isn't told."""
    if isinstance(told, str):
        told = [int(rank) for rank in re.findall(r"\d{1,9}", told)] if re.fullmatch(r"\[[\d, ]*\]", told) else []
    if not isinstance(told, (list, tuple)) or not all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in told):
        return ()
    return tuple(told)


def _sizes(told: Any) -> list[list[int]] | None:
    if not isinstance(told, (list, tuple)):
        return None
    found = [
        [n for n in s if type(n) is int] for s in told if isinstance(s, (list, tuple)) and len(s) <= MAX_DIMENSIONS
    ]
    return found if len(found) == len(told) else None


def _dtypes(told: Any) -> list[str]:
    names = [_text(name, 50) for name in told if isinstance(name, str)] if isinstance(told, (list, tuple)) else []
    return [_DTYPES.get(name, name.removeprefix("torch.").lower()) for name in names]


def _signature(sizes: list[list[int]] | None, dtypes: list[str]) -> str:
    shown = [f"{dtypes[i] if i < len(dtypes) else ''}{size}" for i, size in enumerate((sizes or [])[:4])]
    more = len(sizes or []) - 4
    return " ".join(shown) + (f" and {more} more" if more > 0 else "")


def _where(frames: Any) -> tuple[str | None, str | None]:
    """(phase, line of the script) of a stack, innermost frame first; (None, None) where there is no Python in it."""
    names = [
        (_text(str(frame.get("filename", ""))[-200:]), frame)
        for frame in (frames[:1000] if isinstance(frames, (list, tuple)) else ())
        if isinstance(frame, dict) and str(frame.get("filename", "")).endswith(".py")
    ]
    if not names:
        return None, None
    phase = next((phase for name, _ in names for part, phase in _PHASES if part in name), "collective")
    user = next(((name, frame) for name, frame in names if not _LIBRARY.search(name)), None)
    return phase, f"{user[0].rpartition('/')[2]}:{_int(user[1].get('line'))}" if user else None


def _text(value: Any, limit: int = 200) -> str:
    """Text that any stream can print; JSON may hold half a surrogate pair."""
    return str(value)[:limit].encode("utf-8", "replace").decode("utf-8")


def _int(value: Any, missing: int = 0) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return missing
