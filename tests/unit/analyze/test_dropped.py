"""Ranks that parted in a step whose events are no longer kept."""

from pathlib import Path
from typing import Any

from distdbg.analyze.verdict import diagnose
from distdbg.record.digest import StepDigest
from distdbg.schema import STEP_RECORD, STEPS_FILE
from tests.unit.shards import Rank, job, launcher


def long_job(run_dir: Path, world: int, *, odd: int | None, at: int = 3, steps: int = 12) -> list[Rank]:
    """A rank leaves out a call in one step; the events of the first steps are taken away afterwards."""
    ranks = job(run_dir, world)
    for rank in ranks:
        rank.parameter("layer.weight")
        digest = StepDigest(rank.writer)
        for step in range(steps):
            skips = rank.rank == odd and step == at
            rank.forward("", "layer").backward("AddmmBackward0")
            digest.entered(1, "layer")
            if not skips:
                rank.call()
                digest.issued("all_reduce", world)
            digest.step_ended()
            rank.step()
        rank.call().wait()
    return ranks


def forget(ranks: list[Rank], until: int) -> None:
    """Take the events of the steps before ``until`` away, as the rotation of segments does."""
    for rank in ranks:
        (segment,) = rank.writer.folder.glob("seg-*.dds")
        data = bytearray(segment.read_bytes())
        for offset in range(4096, len(data), 48):
            if int.from_bytes(data[offset + 32 : offset + 36], "little") < until:
                data[offset + 46 : offset + 48] = b"\0\0"
        segment.write_bytes(bytes(data))


def verdict(run_dir: Path) -> tuple[dict[str, Any], list[tuple[int, Any, Any]]]:
    launcher(run_dir, {"event": "stall", "at": 9.0})
    found = diagnose(run_dir)
    return found, [(c["rank"], c["step"], c["phase"]) for c in found["culprits"]]


def test_the_step_is_told_by_its_digest(run_dir: Path) -> None:
    """Who left a call out long ago, and in which step, is known though the events are gone."""
    forget(long_job(run_dir, 3, odd=1), 6)
    found, culprits = verdict(run_dir)
    assert (found["kind"], culprits) == ("mismatch", [(1, 3, None)])
    assert "no longer kept" in found["summary"]


def test_two_ranks_by_their_habit(run_dir: Path) -> None:
    """With two ranks the one that did otherwise in the step before is at fault."""
    forget(long_job(run_dir, 2, odd=0), 6)
    assert verdict(run_dir)[1] == [(0, 3, None)]


def test_the_first_step_is_no_habit(run_dir: Path) -> None:
    """Two ranks that part before there is a habit: nobody can be named."""
    forget(long_job(run_dir, 2, odd=0, at=1), 6)
    found, culprits = verdict(run_dir)
    assert (found["kind"], culprits) == ("unknown", [])


def test_ranks_that_did_the_same(run_dir: Path) -> None:
    """Equal digests accuse nobody."""
    ranks = long_job(run_dir, 3, odd=None)
    forget(ranks, 6)
    for rank in ranks:
        rank.leave()
    assert diagnose(run_dir)["kind"] == "healthy"


def test_a_torn_digest(run_dir: Path) -> None:
    """A last record that is not whole is left out."""
    ranks = long_job(run_dir, 3, odd=1)
    forget(ranks, 6)
    with open(ranks[0].writer.folder / STEPS_FILE, "ab") as file:
        file.write(b"\1" * (STEP_RECORD.size - 5))
    assert verdict(run_dir)[1] == [(1, 3, None)]
