"""Of a large run the last steps are read, and more where a verdict needs it: it must be as if all had been read."""

from pathlib import Path
from typing import Any

import pytest

from distdbg import schema
from distdbg.analyze import window
from distdbg.analyze.layout import Layout
from distdbg.analyze.read import read_run
from distdbg.analyze.verdict import diagnose
from distdbg.record.digest import StepDigest
from distdbg.schema import EventKind as K
from tests.unit.analyze.test_straggler import meet, own
from tests.unit.shards import Rank, job, launcher, train

SEGMENT = schema.SEGMENT_HEADER_SIZE + 200 * schema.RECORD_SIZE


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many events are no large run yet."""

    def set_to(events: int) -> None:
        monkeypatch.setattr(window, "BUDGET", events)

    return set_to


def both(run_dir: Path, budget: Any, events: int = 100) -> tuple[dict[str, Any], dict[str, Any]]:
    """The verdicts over the last steps and over all, without what tells how it was read."""
    budget(events)
    assert window.plan(run_dir) is not None
    part, whole = diagnose(run_dir), diagnose(run_dir, whole=True)
    assert "read: the events from step" in " ".join(part["evidence"])
    assert "read: " not in " ".join(whole["evidence"])
    for found in (part, whole):
        found.pop("evidence")
    return part, whole


def digested(ranks: list[Rank], steps: int, *, odd: int | None = None, at: int = 3) -> None:
    """Steps with digests; one rank leaves out a call in one of them."""
    for rank in ranks:
        rank.parameter("layer.weight")
        digest = StepDigest(rank.writer)
        for step in range(steps):
            rank.forward("", "layer").backward("AddmmBackward0")
            digest.entered(1, "layer")
            if rank.rank != odd or step != at:
                rank.call()
                digest.issued("all_reduce", rank.world)
            digest.step_ended()
            rank.step()


# ---- the same as over all


def test_a_stall(run_dir: Path, budget: Any) -> None:
    """A rank that stands in a node, with all its fields, and its victims."""
    ranks = job(run_dir, 3)
    train(ranks, 40)
    ranks[1].forward("", "layer", "head").backward("AddBackward0", "AddmmBackward0", leave=False)
    for rank in (ranks[0], ranks[2]):
        rank.forward("", "layer", "head").backward("AddBackward0", "AddmmBackward0").call().wait()
    for rank in ranks:
        rank.sleep(9).beat()
    launcher(run_dir, {"event": "stall", "at": 9.0})
    part, whole = both(run_dir, budget)
    assert part == whole
    assert [(c["rank"], c["step"], c["node"]) for c in part["culprits"]] == [(1, 40, "AddmmBackward0")]


def test_an_exception(run_dir: Path, budget: Any) -> None:
    """The rank that raised, in its last step."""
    ranks = job(run_dir, 3)
    train(ranks, 40)
    ranks[2].sleep(0.1).raised("boom")
    for rank in ranks[:2]:
        rank.call().wait()
    part, whole = both(run_dir, budget)
    assert part == whole
    assert (part["kind"], [c["rank"] for c in part["culprits"]]) == ("exception", [2])


def test_a_call_left_out_in_the_last_step(run_dir: Path, budget: Any) -> None:
    """A mismatch within the steps that are read."""
    ranks = job(run_dir, 3)
    digested(ranks, 40)
    for rank in ranks:
        rank.forward("", "layer").backward("AddmmBackward0")
        (rank.call("all_gather") if rank.rank == 1 else rank.call()).wait()
    launcher(run_dir, {"event": "stall", "at": 9.0})
    part, whole = both(run_dir, budget)
    assert part == whole
    assert (part["kind"], [(c["rank"], c["step"]) for c in part["culprits"]]) == ("mismatch", [(1, 40)])


def test_a_call_left_out_long_ago(run_dir: Path, budget: Any) -> None:
    """Digests tell that the ranks parted before what is read, so it is read from there: what was called is known."""
    ranks = job(run_dir, 3)
    digested(ranks, 60, odd=1, at=7)
    for rank in ranks:
        rank.call().wait()
    launcher(run_dir, {"event": "stall", "at": 9.0})
    part, whole = both(run_dir, budget)
    assert part == whole
    assert [(c["rank"], c["step"], c["collective"]) for c in part["culprits"]] == [(1, 7, "all_reduce")]


def test_long_ago_and_too_much_to_read(run_dir: Path, budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all events since are too many the digest alone tells, and says so."""
    ranks = job(run_dir, 3)
    digested(ranks, 60, odd=1, at=7)
    for rank in ranks:
        rank.call().wait()
    launcher(run_dir, {"event": "stall", "at": 9.0})
    budget(100)
    monkeypatch.setattr(window, "MOST", 200)
    found = diagnose(run_dir)
    assert [(c["rank"], c["step"], c["phase"]) for c in found["culprits"]] == [(1, 7, None)]
    assert "not read" in found["summary"]


def test_the_end_of_a_join(run_dir: Path, budget: Any) -> None:
    """That a rank joined long ago what is going on is known, though its beginning is not among the steps read."""
    ranks = job(run_dir, 2)
    for rank in ranks:
        rank.event(K.JOIN_BEGIN)
    train(ranks, 40)
    for _ in range(5):
        ranks[0].call(source="join.py:1", issuer="join", size=1).call().step()
        ranks[1].call(source="join.py:1", issuer="join", size=1).call(issuer="join")
    for rank in ranks:
        rank.event(K.JOIN_END).leave()
    part, whole = both(run_dir, budget)
    assert part["kind"] == whole["kind"] == "healthy"


# ---- stragglers


def late_job(run_dir: Path, steps: int, since: int, *, world: int = 5, until: int | None = None) -> list[Rank]:
    """Rank 2 is late in module b from a step on."""
    ranks = job(run_dir, world)
    for step in range(steps):
        for rank in ranks:
            rank.parameter("w")
            late = rank.rank == 2 and step >= since and (until is None or step < until)
            own(rank, "a", 0.02 + 0.001 * ((step * 7 + rank.rank * 5) % 3))
            own(rank, "b", 0.01 + (0.02 if late else 0.0))
        meet(ranks)
    for rank in ranks:
        rank.leave()
    return ranks


@pytest.mark.parametrize("since", [3, 57, 120, 160])
def test_a_straggler_since_before_and_since_within(run_dir: Path, budget: Any, since: int) -> None:
    """The step from which on a rank is late is found wherever it lies, also where few steps are read at first."""
    late_job(run_dir, 180, since)
    budget(300)
    found = diagnose(run_dir)
    assert found["kind"] == "straggler"
    assert [(c["rank"], c["module"]) for c in found["culprits"]] == [(2, "b")]
    assert abs(found["culprits"][0]["step"] - since) <= 2
    assert {victim["rank"] for victim in found["victims"]} <= {0, 1, 3, 4}


def test_a_straggler_since_lately_in_all_that_was_kept(run_dir: Path) -> None:
    """A rank that is late for good only in the last quarter of a long run."""
    late_job(run_dir, 180, 140)
    found = diagnose(run_dir)
    assert [(c["rank"], c["module"]) for c in found["culprits"]] == [(2, "b")]
    assert abs(found["culprits"][0]["step"] - 140) <= 2


def test_hiccups_are_no_straggler(run_dir: Path, budget: Any) -> None:
    """A rank that was late for some steps, which end with the run or before, is not blamed."""
    late_job(run_dir, 180, 174)
    budget(300)
    assert diagnose(run_dir)["kind"] == "healthy"


# ---- what is read


def test_small_runs_are_read_whole(run_dir: Path, budget: Any) -> None:
    """A run within the budget has no window, nor has one whose values were recorded."""
    ranks = job(run_dir, 2)
    train(ranks, 40)
    assert window.plan(run_dir) is None
    budget(100)
    assert window.plan(run_dir) is not None
    ranks[0].writer.write_meta({"numerics": True})
    assert window.plan(run_dir) is None


def test_the_rank_that_is_least_far_counts(run_dir: Path, budget: Any) -> None:
    """All ranks are read from some whole steps before the one that is least far on."""
    ranks = job(run_dir, 3)
    train(ranks[:2], 60)
    train(ranks[2:], 20)
    budget(100)
    found = window.plan(run_dir)
    assert found is not None
    assert found.step == 19 - window.WHOLE_STEPS  # its last event is the end of step 19
    run = read_run(run_dir, found)
    assert [shard.first_step for shard in run.shards] == [found.step] * 3
    for shard in run.shards:
        assert int(shard.records["step"][0]) == found.step - 1
        assert int(shard.records["kind"][0]) == K.STEP


def test_a_run_without_steps_is_read_whole(run_dir: Path, budget: Any) -> None:
    """Where no rank counts steps there is no last one."""
    ranks = job(run_dir, 2)
    for rank in ranks:
        for _ in range(200):
            rank.forward("", "layer")
    budget(100)
    assert window.plan(run_dir) is None


def test_records_of_several_segments(run_dir: Path) -> None:
    """What is read from a step on is what a look through all events finds, whichever segment the step begins in."""
    rank = Rank(run_dir, 0, 1, segment_bytes=SEGMENT)
    train([rank], 90)
    whole = read_run(run_dir).shards[0].records
    layout = Layout(rank.writer.folder)
    assert layout.usable
    assert layout.count == len(whole)
    assert len(layout.parts) > 2
    for step in (0, 1, 17, 18, 19, 50, 89, 90, 500):
        records, all_of_it = layout.records(step)
        assert len(records) - (0 < step <= 90) == int((whole["step"] >= step).sum())
        assert all_of_it == (step == 0)


def test_a_damaged_shard_is_read_whole(run_dir: Path, budget: Any) -> None:
    """A file that is no segment, or an empty shard, leaves it to the reader of all to say so."""
    ranks = job(run_dir, 2)
    train(ranks, 40)
    (ranks[0].writer.folder / schema.SEGMENT_PATTERN.format(9)).write_bytes(b"nothing")
    budget(100)
    assert window.plan(run_dir) is None
    assert "seg-000009" in " ".join(diagnose(run_dir)["evidence"])


def test_steps_that_begin_anew(run_dir: Path, budget: Any) -> None:
    """A shard whose steps do not grow can't be looked into by halving."""
    rank = Rank(run_dir, 0, 1, segment_bytes=SEGMENT)
    train([rank], 60)
    rank.writer.step = 0
    train([rank], 60)
    budget(100)
    assert not Layout(rank.writer.folder).usable
    assert window.plan(run_dir) is None
