"""One timeline over hosts: the bounds hold, and what is closer than they allow is not ordered."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from distdbg import schema, shard
from distdbg.analyze.clock import Intervals, Line, clocks_of, exchanges_of, fit
from distdbg.analyze.facts import gather
from distdbg.analyze.merge import merge
from distdbg.analyze.read import Run, read_run, stream_run
from distdbg.analyze.verdict import diagnose_run
from distdbg.export.perfetto import write_perfetto
from distdbg.schema import EventKind as K
from tests.unit.shards import SECOND, START, UNIX, Rank

MS = 1_000_000


class HostRank(Rank):
    """A rank whose host's monotonic clock is ``ahead`` s before the true one and gains ``ppm`` us a second.

    Its wall clock is ``wall`` s before the true one. ``now`` stays the true time.
    """

    def __init__(self, run_dir: Path, rank: int, world: int, *, clock: str, **about: Any) -> None:
        self._ahead = int(about.pop("ahead", 0) * SECOND)
        self._ppm, self._wall = about.pop("ppm", 0), int(about.pop("wall", 0) * SECOND)
        super().__init__(run_dir, rank, world, host=about.pop("host", clock), **about)
        self.writer.write_meta({"clock": {"id": clock}})

    def own(self, true: int) -> int:
        return true + self._ahead + (true - START) * self._ppm // 1_000_000

    @contextmanager
    def _clock(self) -> Iterator[None]:
        unix = UNIX + self.now - START + self._wall
        with (
            mock.patch.object(shard.time, "monotonic_ns", return_value=self.own(self.now)),
            mock.patch.object(shard.time, "time_ns", return_value=unix),
        ):
            yield

    def exchange(self, error: int, wrong: int = 0, reference: int = 0) -> "HostRank":
        """Compare with the true clock, which the reference has; the measurement is off by ``wrong`` ns."""
        own = self.own(self.now)
        line = json.dumps([own, self.now - own + wrong, error, reference])
        self.writer.append_text(schema.CLOCK_FILE, line + "\n")
        return self

    def reduce(self, begin: int, end: int) -> "HostRank":
        """An all_reduce that the script waits for, at true moments."""
        self.now = begin - 1_000
        self.call(backend="gloo")
        self.event(K.WAIT_BEGIN, a=schema.WAIT_OF_CALL)
        self.now = end - 1_000
        return self.event(K.WAIT_END)

    def call(self, *args: Any, **about: Any) -> "HostRank":
        backend = about.pop("backend", None)
        if backend:
            ranks = list(range(self.world))
            self.writer.intern("group", "world", {"ranks": ranks, "desc": "world", "key": "world", "backend": backend})
        super().call(*args, **about)
        return self


def two(run_dir: Path, **about: Any) -> tuple[HostRank, HostRank]:
    """Rank 0 on the host with the true clock, rank 1 on another."""
    return HostRank(run_dir, 0, 2, clock="a"), HostRank(run_dir, 1, 2, clock="b", **about)


def errors(run: Run, rank: int, true: list[int]) -> np.ndarray:
    """By how much the times of a rank's records are off, given the true ones (ns)."""
    found = next(s for s in run.shards if s.rank == rank)
    return found.records["t"] + (found.anchor_unix_ns - found.anchor_mono_ns) - (np.array(true) - START + UNIX)


# ---- the line


@pytest.mark.parametrize("seed", range(20))
def test_true_offset_lies_within_the_bound(seed: int) -> None:
    """Whatever the intervals, the rate and its slow changes, a clock that keeps them all is within the bound."""
    random = np.random.default_rng(seed)
    t = np.sort(random.integers(0, 600 * SECOND, 30)) + START
    moments = np.linspace(START - 5 * SECOND, START + 640 * SECOND, 1000).astype(np.int64)
    rate, slow = random.uniform(-200e-6, 200e-6), random.uniform(0, 5e-6)

    def truth(at: np.ndarray) -> np.ndarray:
        x = (at - START).astype(float)
        wave = slow * 60e9 * np.sin(x / 60e9)  # the rate changes by `slow` either way
        return 5 * SECOND + np.rint(rate * x + wave).astype(np.int64)

    half = random.integers(20_000, 400_000, len(t))
    at = truth(t) + (random.uniform(-1, 1, len(t)) * half).astype(np.int64)
    line = fit(Intervals(t, at - half - 1, at + half + 1))
    assert line is not None
    wrong = np.abs(line.to_reference(moments) - moments - truth(moments))
    assert np.all(wrong <= line.error(moments) + 2)
    assert line.error(t).max() <= half.max() + 1


def test_no_line_where_no_clock_keeps_the_intervals() -> None:
    """Two moments a second apart between which a clock would have jumped by 10 ms have no line, and none has none."""
    known = Intervals.of([(0, 0, 1000), (SECOND, 10 * MS, 10 * MS + 1000), (2 * SECOND, 0, 1000)])
    assert fit(known) is None
    assert fit(Intervals.of([])) is None


def test_the_bound_grows_away_from_a_single_exchange() -> None:
    """With one measurement nothing is known of the drift, so the bound widens by the most that clocks part."""
    line = fit(Intervals.of([(START, -1000, 1000)]))
    assert line is not None
    error = line.error(np.array([START, START + SECOND]))
    assert error[0] == pytest.approx(1000, abs=2)
    assert error[1] == pytest.approx(501_000, abs=2)


def test_reference_is_taken_as_it_is() -> None:
    """The reference's own times stay the same and have no error."""
    t = np.array([1, 2, 3])
    assert Line().to_reference(t).tolist() == [1, 2, 3]
    assert Line().error(t).tolist() == [0, 0, 0]


# ---- shards


def test_exchanges_put_a_drifting_host_on_the_timeline(run_dir: Path) -> None:
    """A host 5 s ahead that gains 50 ppm and whose wall clock is an hour off comes within the stated bound."""
    first, second = two(run_dir, ahead=5, ppm=50, wall=3600)
    true = [second.now]
    for _ in range(12):
        first.sleep(10).event(K.STEP)
        second.sleep(10).exchange(40_000, wrong=25_000).event(K.STEP)
        true.append(second.now)
    run = read_run(run_dir)
    bound = run.shards[1].clock_error_ns
    assert run.shards[0].clock_error_ns == 0
    assert bound is not None
    assert bound < 300_000
    assert np.abs(errors(run, 1, true)).max() <= bound
    assert "comparable to within" in run.clock_sentence
    assert "12 exchanges" in run.clock_sentence
    streams, _ = stream_run(run_dir)
    streamed = np.concatenate(list(streams[1].segments()))["t"] + streams[1].offset_ns
    assert np.array_equal(streamed - UNIX, run.shards[1].records["t"] + run.shards[1].anchor_unix_ns
                          - run.shards[1].anchor_mono_ns - UNIX)  # fmt: skip
    times = merge(run).columns["time_unix_ns"]
    assert times.max() - times.min() == pytest.approx(120 * SECOND, abs=MS)


def test_order_of_collectives_alone_gives_a_bound(run_dir: Path) -> None:
    """Without an exchange, all_reduces that both ranks waited in put the clocks together to within their length."""
    first, second = two(run_dir, ahead=-3, ppm=20, wall=-60)
    for step in range(50):
        at = START + SECOND + step * SECOND // 2
        first.reduce(at, at + 3 * MS)
        second.reduce(at + 2 * MS, at + 3 * MS)
    run = read_run(run_dir)
    bound = run.shards[1].clock_error_ns
    assert bound is not None
    assert bound < 4 * MS
    assert "the order of 50 collectives" in run.clock_sentence
    # Each rank leaves only once the other has come, on the timeline, too, but for the bound.
    ends = errors(run, 1, run_true(run, 1))
    assert np.abs(ends).max() <= bound


def run_true(run: Run, rank: int) -> list[int]:
    """The true times of the records of `test_order_of_collectives_alone_gives_a_bound`, from its own clock."""
    found = next(s for s in run.shards if s.rank == rank)
    raw = np.fromfile(next(found.folder.glob("seg-*")), dtype=np.uint8)[schema.SEGMENT_HEADER_SIZE :]
    records = raw[: len(raw) // schema.RECORD_SIZE * schema.RECORD_SIZE].view(list(schema.RECORD_FIELDS))
    own = records["t"][records["kind"] != 0].astype(np.int64)
    return [round((t + 3 * SECOND - START) / (1 + 20e-6)) + START for t in own.tolist()]


def test_a_contradiction_leaves_no_bound(run_dir: Path) -> None:
    """Exchanges that no order of collectives agrees with are told of, and the bound is unknown."""
    first, second = two(run_dir, ahead=1)
    for step in range(5):
        second.exchange(1_000, wrong=50 * MS)
        at = START + SECOND + step * SECOND
        first.reduce(at, at + MS)
        second.reduce(at, at + MS)
    run = read_run(run_dir)
    assert run.shards[1].clock_error_ns is None
    assert "5 of 5 collectives contradict" in run.clock_sentence


@pytest.mark.parametrize("op", ["broadcast", "gather", "all_to_all", "send"])
def test_what_need_not_wait_for_all_tells_nothing(run_dir: Path, op: str) -> None:
    """The root of a broadcast is through before others come; that is no statement about clocks."""
    first, second = two(run_dir)
    for rank in (first, second):
        rank.sleep(1 + rank.rank).call(op, backend="gloo")
        rank.event(K.WAIT_BEGIN, a=schema.WAIT_OF_CALL).event(K.WAIT_END)
    assert clocks_of(read_run(run_dir).shards).collectives == 0


def test_a_wait_of_the_scripts_own_tells_nothing(run_dir: Path) -> None:
    """A wait that the script calls may be for an older work than the one issued last."""
    first, second = two(run_dir)
    for rank in (first, second):
        rank.sleep(1 + rank.rank).call("all_reduce", backend="gloo")
        rank.event(K.WAIT_BEGIN).event(K.WAIT_END)
    assert clocks_of(read_run(run_dir).shards).collectives == 0


def test_nccl_only_queues(run_dir: Path) -> None:
    """With NCCL the host goes on before a reduction is done; only a barrier holds it."""
    first, second = two(run_dir)
    for rank in (first, second):
        for op in ("all_reduce", "barrier"):
            rank.call(op, backend="nccl").event(K.WAIT_BEGIN, a=schema.WAIT_OF_CALL).event(K.WAIT_END)
    assert clocks_of(read_run(run_dir).shards).collectives == 1


def test_a_backward_waits_for_the_buckets_of_ddp(run_dir: Path) -> None:
    """DDP's reductions are over when the backward ends, so its end on one rank is behind their begin on all."""
    first, second = two(run_dir, ahead=7)
    for rank in (first, second):
        for _ in range(3):
            rank.sleep(0.5).event(K.BACKWARD_BEGIN)
            rank.call("all_reduce", backend="gloo", issuer="DDP").event(K.BACKWARD_END)
    run = read_run(run_dir)
    assert run.clocks is not None
    assert run.clocks.collectives == 3
    assert run.shards[1].clock_error_ns is not None
    assert run.shards[1].clock_error_ns < MS


def test_uncompared_clocks_have_no_bound(run_dir: Path) -> None:
    """Where nothing compared two hosts their wall clocks are taken, and it is said that this is all."""
    _, second = two(run_dir, ahead=9)
    second.event(K.STEP)
    run = read_run(run_dir)
    assert run.shards[1].clock_error_ns is None
    assert "never compared" in run.clock_sentence
    assert np.abs(errors(run, 1, [second.now - 1000, second.now])).max() == 0


def test_one_clock_has_no_error_whatever_the_wall_clock_does(run_dir: Path) -> None:
    """Ranks of one host are on one timeline though the wall clock was set back between their starts."""
    ranks = [HostRank(run_dir, rank, 2, clock="a", wall=-rank * 3600) for rank in (0, 1)]
    run = read_run(run_dir)
    assert [s.clock_error_ns for s in run.shards] == [0, 0]
    assert run.clock_sentence == ""
    assert np.abs(errors(run, 1, [ranks[1].now])).max() == 0


def test_a_host_started_anew_has_another_clock(run_dir: Path) -> None:
    """Between two attempts rank 1's host was started anew: both of its clocks are compared with rank 0's."""
    _, second = two(run_dir, ahead=100, host="h")
    second.exchange(5_000).event(K.STEP)
    later = [HostRank(run_dir, 0, 2, clock="a", attempt=1)]
    later.append(HostRank(run_dir, 1, 2, clock="c", host="h", attempt=1, ahead=-900))
    for rank in later:
        rank.sleep(60).event(K.STEP)
    later[1].exchange(5_000)
    mono = later[1].own(later[1].now)
    event = {"event": "worker_exit", "rank": 1, "attempt": 1, "exit_code": 0, "t_mono_ns": mono}
    event["t_unix_ns"] = UNIX + later[1].now - START + MS
    (run_dir / "launcher-h-7.jsonl").write_text(json.dumps(event) + "\n")
    run = read_run(run_dir)
    assert run.clocks is not None
    assert set(run.clocks.lines) == {"a", "b", "c"}
    assert run.launcher[0]["t_unix_ns"] == pytest.approx(UNIX + later[1].now - START, abs=5_000)


def test_a_clock_compared_with_another_one_than_the_reference(run_dir: Path) -> None:
    """A host that only the first attempt saw is put on the timeline by way of the host both attempts saw."""
    HostRank(run_dir, 0, 2, clock="b", ahead=4)
    old = HostRank(run_dir, 1, 2, clock="c", ahead=-20)
    # In the first attempt rank 0 was on b, which is 4 s ahead.
    old.writer.append_text(schema.CLOCK_FILE, json.dumps([old.own(old.now), 24 * SECOND, 3_000, 0]) + "\n")
    HostRank(run_dir, 0, 2, clock="a", attempt=1)
    HostRank(run_dir, 1, 2, clock="b", attempt=1, ahead=4).exchange(3_000)
    run = read_run(run_dir)
    shard_of = {s.clock: s for s in run.shards}
    bound = shard_of["c"].clock_error_ns
    assert bound is not None
    assert 6_000 <= bound < 20_000
    assert abs(int(shard_of["c"].records["t"][0]) + shard_of["c"].anchor_unix_ns - shard_of["c"].anchor_mono_ns
               - (UNIX + 1_000)) <= bound  # fmt: skip


def test_foreign_lines_are_left_out(tmp_path: Path) -> None:
    """What is no exchange, negative bounds, huge numbers and a torn line cost nothing but themselves."""
    lines = [
        "[1,2,3,0]",
        "[1,2,-3,0]",
        '["x",2,3,0]',
        "{}",
        "[1,2,3]",
        "[9e99,1,1,0]",
        "[true,1,1,0]",
        f"[{10**30},1,1,0]",
    ]
    (tmp_path / schema.CLOCK_FILE).write_text("\n".join(lines) + "\n[1,2")
    assert exchanges_of(tmp_path) == [(1, 2, 3, 0)]


# ---- what is concluded


def failing(run_dir: Path, later: int) -> dict[str, Any]:
    """The verdict where rank 1 of another host, with a bound of 1 ms, fails a while (ns) after rank 0."""
    first, second = two(run_dir, ahead=5)
    for rank in (first, second):
        rank.parameter("layer.weight")
        for _ in range(3):
            rank.forward("", "layer").sleep(0.01).step()
    for _ in range(3):
        second.exchange(MS)
    second.now = first.now + later
    first.raised("bad value 1")
    second.raised("bad value 2", kind="KeyError")
    return diagnose_run(read_run(run_dir))


def test_failures_closer_than_the_bound_are_not_ordered(run_dir: Path) -> None:
    """Two exceptions 0.1 ms apart on clocks that agree to 1 ms: both are named, none as the first."""
    verdict = failing(run_dir, MS // 10)
    assert verdict["kind"] == "exception"
    assert [c["rank"] for c in verdict["culprits"]] == [0, 1]
    assert any("who was first is not known" in text for text in verdict["evidence"])
    assert not any("before any other failed" in text for text in verdict["evidence"])
    assert verdict["confidence"] <= 0.6


def test_failures_further_apart_than_the_bound_are_ordered(run_dir: Path) -> None:
    """The same two exceptions 50 ms apart: the first is named."""
    verdict = failing(run_dir, 50 * MS)
    assert [c["rank"] for c in verdict["culprits"]] == [0]
    assert any("before any other failed" in text for text in verdict["evidence"])
    assert any("comparable to within" in text for text in verdict["evidence"])


def test_a_stall_is_seen_though_a_wall_clock_is_wrong(run_dir: Path) -> None:
    """Rank 1's host was never compared and is an hour behind: its rank is no more silent than the others are."""
    first, second = two(run_dir, ahead=-40, wall=-3600)
    for rank in (first, second):
        rank.parameter("layer.weight")
        for _ in range(3):
            rank.forward("", "layer").step()
    first.call()
    second.event(K.FORWARD_BEGIN, module=second.module("layer"), a=1)
    for _ in range(20):
        first.sleep(0.5).beat()
        second.sleep(0.5).beat()
    verdict = diagnose_run(read_run(run_dir))
    assert (verdict["kind"], [c["rank"] for c in verdict["culprits"]]) == ("stalled", [1])
    assert verdict["culprits"][0]["since_s"] == pytest.approx(10, abs=0.5)
    assert not any("not even its watchdog" in text for text in verdict["evidence"])


def test_what_is_known_of_two_ranks(run_dir: Path) -> None:
    """Times of one host compare exactly, of two hosts within both bounds, of an uncompared one not at all."""
    HostRank(run_dir, 0, 5, clock="a")
    for rank, name in ((1, "b"), (2, "c")):
        HostRank(run_dir, rank, 5, clock=name, ahead=rank).exchange(rank * 10_000)
    HostRank(run_dir, 3, 5, clock="b", ahead=1)
    HostRank(run_dir, 4, 5, clock="d")
    facts = gather(read_run(run_dir))
    assert facts.apart_ns(1, 3) == 0
    assert facts.apart_ns(0, 1) == pytest.approx(10_000, abs=10)
    assert facts.apart_ns(1, 2) == pytest.approx(30_000, abs=20)
    assert facts.apart_ns(0, 4) is None
    assert facts.apart_ns(0, 9) is None  # its shard is missing: it may be of the host that was not compared


def test_perfetto_says_how_well_times_compare(run_dir: Path, tmp_path: Path) -> None:
    """Each process of the trace is labelled with the bound of its clock."""
    _, second = two(run_dir, ahead=2)
    second.exchange(20_000).forward("layer")
    write_perfetto(run_dir, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    labels = [e["args"]["labels"] for e in trace["traceEvents"] if e["name"] == "process_labels"]
    assert labels[0].endswith("the reference clock")
    assert "clock within 0.02" in labels[1]
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "layer"]
    unix = trace["baseTimeNanoseconds"] + 1000 * spans[0]["ts"]
    assert unix == pytest.approx(UNIX + second.now - START, abs=30_000)
