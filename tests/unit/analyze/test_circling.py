"""A rank that moves without end while the others wait for it, and an evaluation that takes its time."""

from pathlib import Path
from typing import Any

from distdbg.analyze.verdict import diagnose
from distdbg.schema import EventKind as K
from tests.unit.shards import Rank, job, launcher


def rounds(rank: Rank, count: int) -> None:
    for _ in range(count):
        rank.forward("").sleep(0.01)


def endless(run_dir: Path, *, usual: int, now: int, everywhere: bool = True) -> dict[str, Any]:
    """Rank 1 goes ``now`` times round where it (and its peers) did so ``usual`` times before; then an interrupt."""
    ranks = job(run_dir, 3)
    for rank in ranks:
        rank.parameter("w")
        for _ in range(3):
            rank.forward("")
            rank.call()
            rounds(rank, usual if everywhere or rank.rank == 1 else 0)
            rank.step()
        rank.forward("").call()
    rounds(ranks[1], now)
    end = ranks[1].now
    for rank in ranks:
        if rank.rank != 1:
            rounds(rank, usual if everywhere else 0)
            rank.step().forward("").call().wait()
        rank.now = end
        rank.beat()
    launcher(run_dir, {"event": "interrupted", "at": (end + 1_000_000 - 10**12) / 1e9, "signal": "SIGINT"})
    return diagnose(run_dir)


def test_a_decoding_without_end(run_dir: Path) -> None:
    """A rank that did a thing a few times a step, and now does it without end, is stalled."""
    verdict = endless(run_dir, usual=6, now=2_000)
    assert (verdict["kind"], [c["rank"] for c in verdict["culprits"]]) == ("stalled", [1])
    assert (verdict["culprits"][0]["phase"], verdict["culprits"][0]["step"]) == ("forward", 3)
    assert [victim["waits_for"] for victim in verdict["victims"]] == [[1], [1]]


def test_a_long_evaluation_of_one_rank(run_dir: Path) -> None:
    """What a rank never did before may come to an end: nobody is named."""
    verdict = endless(run_dir, usual=0, now=2_000)
    assert (verdict["kind"], verdict["culprits"]) == ("unknown", [])
    assert "can't be told" in verdict["summary"]


def test_a_short_one(run_dir: Path) -> None:
    """A few more rounds than usual are no fault."""
    verdict = endless(run_dir, usual=6, now=60)
    assert (verdict["kind"], verdict["culprits"]) == ("healthy", [])


def test_the_others_did_nothing_of_the_kind(run_dir: Path) -> None:
    """A rank's own earlier steps are habit enough where its peers did not take part."""
    assert endless(run_dir, usual=6, now=2_000, everywhere=False)["kind"] == "stalled"


def test_events_of_the_watchdog_are_no_rounds(run_dir: Path) -> None:
    """Silence with a beat is a plain stall, not a circle."""
    ranks = job(run_dir, 2)
    for rank in ranks:
        rank.parameter("w")
        rank.forward("").call().step()
    ranks[0].call().wait()
    for _ in range(40):
        for rank in ranks:
            rank.sleep(0.5).beat()
    assert ranks[1].writer.position() > 40
    launcher(run_dir, {"event": "stall", "at": 21.0})
    assert diagnose(run_dir)["summary"].startswith("rank 1 stands still")
    assert K.HEARTBEAT
