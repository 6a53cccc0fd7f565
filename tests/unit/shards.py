"""Builds run directories event by event, through the real writer with a clock of its own."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from distdbg import shard
from distdbg.identity import Identity
from distdbg.schema import EventKind as K
from distdbg.schema import pack, pack_counts
from distdbg.shard import ShardWriter

SECOND = 1_000_000_000
START = 1_000 * SECOND  # monotonic ns of a run's start
UNIX = 1_700_000_000 * SECOND  # wall time of that moment


def identity(rank: int = 0, world: int = 1, attempt: int = 0, run_id: str = "run", host: str = "host") -> Identity:
    return Identity(rank, world, rank, attempt, run_id, host, 100 + rank + 50 * attempt, "test")


class Rank:
    """Writes one rank's events; ``now`` is its clock in ns and moves on by 1 us an event."""

    def __init__(self, run_dir: Path, rank: int, world: int, **about: Any) -> None:
        self.now = START
        self._skew = int(about.pop("skew_ns", 0))
        size = int(about.pop("segment_bytes", shard.SEGMENT_BYTES))
        with self._clock():
            who = identity(rank, world, **about)
            self.writer = ShardWriter(run_dir, who, {"argv": ["train.py"]}, segment_bytes=size)
        self.rank, self.world = rank, world
        self.backwards = 0
        self._seqs: dict[str, int] = {}
        self.event(K.START)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        unix = UNIX + self.now - START
        with (
            mock.patch.object(shard.time, "monotonic_ns", return_value=self.now + self._skew),
            mock.patch.object(shard.time, "time_ns", return_value=unix),
        ):
            yield

    def event(self, kind: K, name: int = 0, module: int = 0, seq: int = 0, a: int = 0, b: int = 0) -> "Rank":
        self.now += 1_000
        with self._clock():
            self.writer.emit(kind, name, module, seq, a, b)
        return self

    def sleep(self, seconds: float) -> "Rank":
        self.now += int(seconds * SECOND)
        return self

    def module(self, name: str) -> int:
        return self.writer.intern("module", name, {"class": "Linear", "model": "Net", "source": None})

    def parameter(self, name: str, shape: tuple[int, ...] = (2, 2)) -> int:
        return self.writer.intern("parameter", name, {"shape": list(shape), "dtype": "float32"})

    def forward(self, *names: str) -> "Rank":
        """Enter and leave modules one after the other."""
        for name in names:
            self.event(K.FORWARD_BEGIN, module=self.module(name), a=1).event(K.FORWARD_END, module=self.module(name))
        return self

    def backward(self, *nodes: str, module: str = "layer", leave: bool = True) -> "Rank":
        """Run a backward of the nodes; without ``leave`` the last is entered and not left."""
        number, self.backwards = self.backwards, self.backwards + 1
        self.event(K.BACKWARD_BEGIN, seq=number, a=len(nodes))
        for index, node in enumerate(nodes):
            words = (self.writer.intern("node", node), self.module(module), index, number, pack_counts(1, 0, 0))
            self.event(K.PREHOOK, *words)
            if not leave and index == len(nodes) - 1:
                return self
            self.event(K.POSTHOOK, *words)
        return self.event(K.BACKWARD_FINAL, seq=number).event(K.BACKWARD_END, seq=number)

    def call(
        self,
        op: str = "all_reduce",
        size: int = 8,
        *,
        group: str = "world",
        ranks: tuple[int, ...] | None = None,
        source: str = "train.py:1",
        issuer: str = "script",
        dtype: str = "float32",
        **about: Any,
    ) -> "Rank":
        """Issue a collective or a message."""
        members = list(range(self.world)) if ranks is None else list(ranks)
        group_id = self.writer.intern("group", group, {"ranks": members, "desc": group, "key": group})
        facts = {"dtypes": [dtype], "numel": size, **about}
        text = f"{dtype}[{size}]" + "".join(f" {k} {v}" for k, v in about.items())
        signature = self.writer.intern("signature", text, facts)
        key = f"{group} {op} {about.get('peer')} {about.get('tag')}" if op in ("send", "recv") else group
        self._seqs[key] = seq = self._seqs.get(key, 0) + 1
        line = source if issuer == "script" else f"{source} by {issuer}"
        where = self.writer.intern("source", line, {"issuer": issuer})
        words = (self.writer.intern("operation", op), 0, pack(seq, where), pack(group_id, signature), size * 4)
        return self.event(K.COLLECTIVE, *words).event(K.COLLECTIVE_END, *words)

    def wait(self) -> "Rank":
        return self.event(K.WAIT_BEGIN)

    def step(self) -> "Rank":
        self.event(K.STEP)
        self.writer.step += 1
        return self

    def beat(self) -> "Rank":
        return self.event(K.HEARTBEAT, name=self.writer.intern("source", "train.py:9"))

    def raised(self, text: str, *, peer: bool = False, kind: str = "ValueError", caught: bool = False) -> "Rank":
        """An exception leaves the script; of a peer's kind if ``peer``."""
        where = "/lib/site-packages/torch/autograd/graph.py:9 in run" if peer else "train.py:7 in step"
        error = self.writer.intern(
            "error", f"{kind}: {text}", {"type": kind, "where": where, "origin": "", "causes": []}
        )
        if caught:
            return self.event(K.FORWARD_RAISED, name=error, module=self.module("layer"))
        return self.event(K.EXCEPTION, name=error).event(K.EXIT, seq=1, name=self.writer.intern("text", "exception"))

    def leave(self, code: int = 0) -> "Rank":
        return self.event(K.EXIT, seq=code, name=self.writer.intern("text", "end of script"))


def job(run_dir: Path, world: int, **about: Any) -> list[Rank]:
    """A job's ranks, none of which has done anything yet."""
    return [Rank(run_dir, rank, world, **about) for rank in range(world)]


def launcher(run_dir: Path, *events: dict[str, Any]) -> None:
    """Write a launcher's events; each needs "event", may have "at" (seconds from the start)."""
    lines = []
    for event in events:
        at = event.pop("at", 0.0)
        lines.append(json.dumps({"t_unix_ns": UNIX + int(at * SECOND), "t_mono_ns": START + int(at * SECOND), **event}))
    (run_dir / "launcher-host-1.jsonl").write_text("\n".join(lines) + "\n")


def train(ranks: list[Rank], steps: int = 3) -> None:
    """Steps in which all ranks do the same."""
    for rank in ranks:
        rank.parameter("layer.weight")
        for _ in range(steps):
            rank.forward("", "layer", "head").backward("AddBackward0", "AddmmBackward0").call().step()
