"""Synthetic runs of any size, written by the real writer: a transformer under DDP, with a straggler or a stall.

    python benchmarks/synthetic.py DIR --ranks 256 --steps 30 --straggler 100 --from-step 10 --delay-ms 12
    python benchmarks/synthetic.py DIR --ranks 64 --stall 7 --at-step 20

Each rank works for a while with some noise; the gradients' all_reduce ends when the last rank has come. The
clock is the generator's own, so a run of an hour takes as long as its events take to write.
"""

import argparse
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from distdbg import schema, shard
from distdbg.identity import Identity
from distdbg.schema import EventKind as K
from distdbg.schema import pack, pack_counts
from distdbg.shard import ShardWriter

MS = 1_000_000
START, UNIX = 1_000_000 * MS, 1_760_000_000_000 * MS
PARTS = (("norm", "NativeLayerNormBackward0", 1), ("attn", "AddmmBackward0", 6), ("mlp", "AddmmBackward0", 8))
SILENCE_MS = 12_000  # how long a stalled run is watched


class Clock:
    """Stands in for the module `time` in the writer."""

    def __init__(self) -> None:
        self.now = START

    def monotonic_ns(self) -> int:
        return self.now

    def time_ns(self) -> int:
        return UNIX + self.now - START


@contextmanager
def _clock() -> Iterator[Clock]:
    clock, real = Clock(), shard.time
    shard.time = SimpleNamespace(monotonic_ns=clock.monotonic_ns, time_ns=clock.time_ns)  # type: ignore[assignment]
    try:
        yield clock
    finally:
        shard.time = real


def write_run(
    run_dir: Path,
    *,
    ranks: int,
    steps: int,
    layers: int = 4,
    straggler: int | None = None,
    stall: int | None = None,
    at_step: int = 10,
    delay_ms: float = 10.0,
    slower: float = 1.0,
    noise: float = 0.02,
    ranks_per_host: int = 8,
    seed: int = 0,
    workers: int = 1,
) -> int:
    """Write a run; returns the number of events.

    ``straggler`` is late by ``delay_ms`` in forward of the last layer's mlp from ``at_step`` on; ``stall`` stands still
    there for good, in backward. ``slower`` multiplies the work of every mlp (for comparisons of two runs). The ranks
    are shared out to ``workers`` processes.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    # How long each rank works in each step, relative to the plan; known first, since all wait for the slowest.
    factors = [[max(0.5, rng.gauss(1.0, noise)) for _ in range(steps)] for _ in range(ranks)]
    job = _Job(ranks, steps, layers, straggler, stall, at_step, delay_ms, slower)
    began, now = [], START + 50 * MS
    for step in range(steps):
        began.append(now)
        work = max(job.work_ns(rank, step, factors[rank][step]) for rank in range(ranks))
        now += work + 3 * MS
    ends = [*began[1:], now]
    plans = [(job, run_dir, rank, ranks_per_host, factors[rank], began, ends) for rank in range(ranks)]
    if workers > 1:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            total = sum(pool.imap_unordered(_write_rank, plans, chunksize=4))
    else:
        total = sum(map(_write_rank, plans))
    _launcher(run_dir, ranks, ranks_per_host, began, now, job)
    return total


def _write_rank(plan: "tuple[_Job, Path, int, int, list[float], list[int], list[int]]") -> int:
    job, run_dir, rank, per_host, factors, began, ends = plan
    host = f"node{rank // per_host:03d}"
    identity = Identity(rank, job.ranks, rank % per_host, 0, "synthetic", host, 1000 + rank, "torchrun")
    with _clock() as clock:
        return job.write_rank(run_dir, identity, clock, factors, began, ends)


class _Job:
    def __init__(
        self,
        ranks: int,
        steps: int,
        layers: int,
        straggler: int | None,
        stall: int | None,
        at_step: int,
        delay_ms: float,
        slower: float,
    ) -> None:
        self.ranks, self.steps, self.layers = ranks, steps, layers
        self.straggler, self.stall, self.at_step = straggler, stall, at_step
        self.delay, self.slower = int(delay_ms * MS), slower
        self.modules = [(f"blocks.{i}.{part}", node, ms) for i in range(layers) for part, node, ms in PARTS]
        self.late_module = f"blocks.{layers - 1}.mlp"

    def _ms(self, module: str, ms: float) -> float:
        return ms * (self.slower if module.endswith("mlp") else 1.0) * 0.2

    def _extra(self, rank: int, step: int) -> int:
        return self.delay if rank == self.straggler and step >= self.at_step else 0

    def work_ns(self, rank: int, step: int, factor: float) -> int:
        plan = sum(self._ms(module, ms) for module, _, ms in self.modules)
        return int((1 + 3 * plan + 2) * factor * MS) + self._extra(rank, step)

    def write_rank(
        self, run_dir: Path, identity: Identity, clock: Clock, factors: list[float], began: list[int], ends: list[int]
    ) -> int:
        rank = identity.rank
        events = self.steps * (16 + 4 * len(self.modules)) + 64
        size = min(shard.SEGMENT_BYTES, schema.SEGMENT_HEADER_SIZE + events * schema.RECORD_SIZE)
        meta = {"argv": ["train.py"], "versions": {"torch": "2.13.0"}, "backend": "nccl"}
        writer = ShardWriter(run_dir, identity, meta, segment_bytes=size, keep_bytes=None)
        one = _Rank(writer, clock, self)
        one.names()
        writer.emit(K.START)
        for step in range(self.steps):
            clock.now = began[step]
            if not one.step(step, factors[step], ends[step], rank, self._extra(rank, step)):
                break
        else:
            writer.emit(K.EXIT, writer.intern("text", "end of script"))
        recorded = writer.position()
        writer.close()
        return recorded


class _Rank:
    def __init__(self, writer: ShardWriter, clock: Clock, job: _Job) -> None:
        self.writer, self.clock, self.job = writer, clock, job

    def names(self) -> None:
        intern = self.writer.intern
        about = {"class": "Block", "model": "Transformer", "source": "train.py:20"}
        self.root = intern("module", "", about)
        self.blocks = [intern("module", f"blocks.{i}", about) for i in range(self.job.layers)]
        self.modules = [(intern("module", m, about), intern("node", n), m, ms) for m, n, ms in self.job.modules]
        for module, _, _ in self.job.modules:
            intern("parameter", module + ".weight", {"shape": [64, 64], "dtype": "float32"})
        self.group = intern("group", "default_pg", {"ranks": list(range(self.job.ranks)), "key": "0"})
        self.source = intern("source", "train.py:50 by DDP", {"issuer": "DDP"})
        self.signature = intern("signature", "float32[1048576]", {"dtypes": ["float32"], "numel": 1 << 20})
        self.all_reduce = intern("operation", "all_reduce")
        self.loader, self.optimizer = intern("text", "DataLoader"), intern("text", "AdamW")
        self.line = intern("source", "train.py:48")

    def step(self, step: int, factor: float, end: int, rank: int, extra: int) -> bool:
        """One training step; False where the job stands still in it."""
        emit, job, clock = self.writer.emit, self.job, self.clock
        self.writer.step = step
        emit(K.DATA_BEGIN, self.loader)
        clock.now += int(1 * factor * MS)
        emit(K.DATA_END, self.loader)
        self._forward(factor, extra)
        stands = job.stall is not None and step == job.at_step
        emit(K.BACKWARD_BEGIN, self.line, seq=step, a=len(self.modules), b=0)
        for index, (module, node, name, ms) in enumerate(reversed(self.modules)):
            clock.now += 1_000
            words = (node, module, index, pack(step, 0), pack_counts(1, 0, 0))
            emit(K.PREHOOK, *words)
            if stands and rank == job.stall and name == job.late_module:
                return self._silent()
            clock.now += int(2 * job._ms(name, ms) * factor * MS) - 1_000
            emit(K.POSTHOOK, *words)
        words = (self.all_reduce, 0, pack(step + 1, self.source), pack(self.group, self.signature), 4 << 20)
        emit(K.COLLECTIVE, *words)
        clock.now += 20_000
        emit(K.COLLECTIVE_END, *words)
        emit(K.BACKWARD_FINAL, seq=step)
        if stands:
            return self._silent()
        clock.now = max(clock.now, end - 2 * MS)
        emit(K.BACKWARD_END, seq=step)
        emit(K.OPTIMIZER_BEGIN, self.optimizer)
        clock.now += int(1.5 * factor * MS)
        emit(K.STEP)
        emit(K.OPTIMIZER_END, self.optimizer)
        return True

    def _forward(self, factor: float, extra: int) -> None:
        emit, job, clock = self.writer.emit, self.job, self.clock
        emit(K.FORWARD_BEGIN, 0, self.root, 0, 1, 4096)
        parts = len(PARTS)
        for index, (module, _, name, ms) in enumerate(self.modules):
            clock.now += 500
            if index % parts == 0:
                emit(K.FORWARD_BEGIN, 0, self.blocks[index // parts], 0, 2)
            clock.now += 500
            emit(K.FORWARD_BEGIN, 0, module, 0, 3)
            clock.now += int(job._ms(name, ms) * factor * MS) + (extra if name == job.late_module else 0)
            emit(K.FORWARD_END, 0, module)
            if index % parts == parts - 1:
                emit(K.FORWARD_END, 0, self.blocks[index // parts])
        emit(K.FORWARD_END, 0, self.root)

    def _silent(self) -> bool:
        """Only the watchdog's beats from here on."""
        for beat in range(SILENCE_MS // 1000):
            self.clock.now += 1000 * MS
            self.writer.emit(K.HEARTBEAT, self.line, seq=beat)
        return False


def _launcher(run_dir: Path, ranks: int, per_host: int, began: list[int], now: int, job: _Job) -> None:
    """The launcher's account: starts, and exits or a stall."""

    def at(t: int) -> dict[str, int]:
        return {"t_unix_ns": UNIX + t - START, "t_mono_ns": t}

    lines = [
        {
            "event": "worker_start",
            **at(START),
            "rank": r,
            "attempt": 0,
            "pid": 1000 + r,
            "host": f"node{r // per_host:03d}",
        }
        for r in range(ranks)
    ]
    if job.stall is None:
        lines += [
            {"event": "worker_exit", **at(now), "rank": r, "attempt": 0, "exit_code": 0, "signal": None, "order": r + 1}
            for r in range(ranks)
        ]
    else:
        lines.append({"event": "stall", **at(began[job.at_step] + SILENCE_MS * MS)})
    (run_dir / "launcher-node000-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a synthetic run with the real writer.")
    parser.add_argument("run_dir", type=Path, nargs="?", help="default: a folder that is deleted again")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--straggler", type=int, metavar="RANK")
    parser.add_argument("--stall", type=int, metavar="RANK")
    parser.add_argument("--at-step", type=int, default=10)
    parser.add_argument("--delay-ms", type=float, default=10.0)
    parser.add_argument("--slower", type=float, default=1.0, help="factor on the work of every mlp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes that write")
    args = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = args.pop("run_dir") or Path(temporary) / "run"
        began = time.perf_counter()
        events = write_run(run_dir, **args)
        elapsed = time.perf_counter() - began
    print(f"{events:,} events in {elapsed:.1f} s ({events / elapsed:,.0f}/s)")


if __name__ == "__main__":
    main()
