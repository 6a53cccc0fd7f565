"""Builds dumps of the Flight Recorder entry by entry, in the shape that NCCL's watchdog or gloo gives them."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

SECOND = 1_000_000_000
BEGIN = 1_700_000_000 * SECOND  # unix ns
TAKEN = BEGIN + 600 * SECOND  # when the dumps are written

_FRAMES = [
    {"name": "all_reduce", "filename": "/env/site-packages/torch/distributed/distributed_c10d.py", "line": 3245},
    {"name": "wrapper", "filename": "/env/site-packages/torch/distributed/c10d_logger.py", "line": 83},
]


class Recorder:
    """One rank's Flight Recorder. ``groups``: name -> (description, members)."""

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        backend: str = "nccl",
        groups: dict[str, tuple[str, tuple[int, ...]]] | None = None,
        frames: bool = True,
        gap_ns: int = 1_000_000,
    ) -> None:
        self.rank, self.backend, self.frames = rank, backend, frames
        self.groups = {"0": ("default_pg", tuple(range(world))), **(groups or {})}
        self.entries: list[dict[str, Any]] = []
        self._seqs: dict[str, int] = {}
        self.now, self.gap_ns = BEGIN, gap_ns
        self.unseen = 0  # messages that the dump does not hold

    def call(
        self,
        op: str = "all_reduce",
        size: int = 8,
        *,
        group: str = "0",
        ended: bool = True,
        timed_out: bool = False,
        dtype: str = "Float",
        line: int = 12,
        inside: str = "",
        p2p: bool = False,
        marked: bool = True,
    ) -> "Recorder":
        """Issue a call; ``ended``: it ended, too. ``inside``: a file of torch's around the script's line."""
        self.now += self.gap_ns
        key = f"{group} p2p" if p2p else group
        self._seqs[key] = self._seqs.get(key, 0) + 1
        gloo = self.backend == "gloo"
        around = [{"name": "f", "filename": inside, "line": 1}] if inside else []
        user = [{"name": "step", "filename": "/home/user/train.py", "line": line}]
        entry: dict[str, Any] = {
            "record_id": len(self.entries),
            "pg_id": list(self.groups).index(group),
            "process_group": (group, self.groups[group][0]),
            "collective_seq_id": self._seqs.get(group, 0),
            "p2p_seq_id": self._seqs.get(f"{group} p2p", 0),
            "op_id": self._seqs.get(group, 0) + self.unseen,
            "profiling_name": f"{self.backend}:{op}",
            "time_created_ns": self.now,
            "input_sizes": [[size]] if op != "barrier" else [],
            "input_dtypes": [dtype] if op != "barrier" else [],
            "output_sizes": [[size]] if op != "barrier" else [],
            "output_dtypes": [dtype] if op != "barrier" else [],
            "state": "completed" if ended and not gloo else "scheduled" if gloo or not marked else "started",
            "time_discovered_started_ns": None if gloo else self.now,
            "time_discovered_completed_ns": self.now if ended and not gloo else None,
            "retired": ended or timed_out,
            "timeout_ms": 600000,
            "is_p2p": p2p,
        }
        if self.frames:
            entry["frames"] = _FRAMES + around + user
        self.entries.append(entry)
        return self

    def dump(self) -> dict[str, Any]:
        told = {
            name: {"name": name, "desc": desc, "ranks": str(list(ranks))} for name, (desc, ranks) in self.groups.items()
        }
        return {
            "version": "2.10",
            "entries": self.entries,
            "pg_config": told if self.backend != "gloo" else {"": {"name": "", "desc": "", "ranks": "[]"}},
            # What torch says here was seen to be wrong; nothing may rest on it.
            "pg_status": {"0": {"last_enqueued_collective": 99, "last_completed_collective": 99}},
            "comm_lib_version": "2.27.5",
        }

    def write(self, prefix: Path, *, as_json: bool = False, protocol: int = 2, taken: int = TAKEN) -> Path:
        """Write PREFIX<rank>, as the watchdog names it."""
        file = prefix.with_name(f"{prefix.name}{self.rank}{'.json' if as_json else ''}")
        data = json.dumps(self.dump()).encode() if as_json else pickle.dumps(self.dump(), protocol)
        file.write_bytes(data)
        os.utime(file, ns=(taken, taken))
        return file


def job(world: int, **about: Any) -> list[Recorder]:
    """The recorders of a job's ranks, none of which has issued anything."""
    return [Recorder(rank, world, **about) for rank in range(world)]


def train(ranks: list[Recorder], calls: int) -> None:
    """Calls that all ranks issue alike, and that end."""
    for rank in ranks:
        for _ in range(calls):
            rank.call()
