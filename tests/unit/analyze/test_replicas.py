"""Ranks that hand other parameters to DDP, and graphs that its reducer refuses."""

import shutil
from pathlib import Path
from typing import Any

from distdbg.analyze.verdict import diagnose
from distdbg.schema import EventKind as K
from tests.unit.shards import Rank, job

Parameters = list[list[Any]]
PLAIN: Parameters = [["a.weight", [4, 2], "float32"], ["a.bias", [4], "float32"], ["b.weight", [2, 4], "float32"]]


def wraps(rank: Rank, parameters: Parameters, ranks: list[int] | None = None) -> None:
    about = {"ranks": ranks or list(range(rank.world)), "parameters": parameters}
    rank.event(K.REPLICATE, name=rank.writer.intern("text", "DistributedDataParallel of Net (wrapper 0)", about))


def fails(run_dir: Path, lists: list[Parameters], groups: list[list[int]] | None = None) -> dict[str, Any]:
    """Each rank wraps its list, then all raise what DDP says of somebody."""
    ranks = job(run_dir, len(lists))
    for rank, parameters in zip(ranks, lists, strict=True):
        wraps(rank, parameters, groups[rank.rank] if groups else None)
        rank.raised("DDP expects same model across all ranks, but Rank 0 has 3 params", kind="RuntimeError")
    return diagnose(run_dir)


def told(verdict: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(c["rank"], c["module"], c["parameter"], c["step"]) for c in verdict["culprits"]]


def test_a_parameter_that_one_rank_leaves_out(run_dir: Path) -> None:
    """The rank whose list differs from the others' is named with the module, whoever DDP's error blames."""
    verdict = fails(run_dir, [PLAIN, PLAIN[2:], PLAIN])
    assert (verdict["kind"], told(verdict)) == ("mismatch", [(1, "a", "a.weight", 0)])


def test_another_shape(run_dir: Path) -> None:
    """A parameter of another shape is told with both shapes."""
    verdict = fails(run_dir, [PLAIN, PLAIN, [*PLAIN[:2], ["b.weight", [2, 9], "float32"]]])
    assert told(verdict) == [(2, "b", "b.weight", 0)]
    assert "float32[2, 9] there and float32[2, 4]" in verdict["summary"]


def test_another_order(run_dir: Path) -> None:
    """The same parameters in another order are another model, too."""
    verdict = fails(run_dir, [PLAIN, PLAIN[::-1], PLAIN])
    assert [entry[0] for entry in told(verdict)] == [1]
    assert "another order" in verdict["summary"]


def test_halves_name_nobody(run_dir: Path) -> None:
    """With two ranks it can't be told whose model is the right one."""
    verdict = fails(run_dir, [PLAIN, PLAIN[:2]])
    assert (verdict["kind"], verdict["culprits"]) == ("unknown", [])


def test_the_rank_that_differs_is_not_seen(run_dir: Path) -> None:
    """Ranks that brought the same parameters are not accused of the difference that DDP found."""
    ranks = job(run_dir, 3)[:2]
    shutil.rmtree(next(run_dir.glob("ranks/rank00002*")))
    for rank in ranks:
        wraps(rank, PLAIN)
        rank.raised("DDP expects same model across all ranks, but Rank 0 has 3 params", kind="RuntimeError")
    verdict = diagnose(run_dir)
    assert (verdict["kind"], verdict["culprits"], verdict["missing_ranks"]) == ("unknown", [], [2])
    assert "look there" in verdict["summary"]


def test_groups_of_their_own_may_differ(run_dir: Path) -> None:
    """Pipeline stages wrap different models in different groups: an error there is what it says."""
    verdict = fails(run_dir, [PLAIN, PLAIN, PLAIN[:1], PLAIN[:1]], [[0, 1], [0, 1], [2, 3], [2, 3]])
    assert verdict["kind"] == "exception"


def ready_twice(run_dir: Path, again: tuple[int, ...]) -> dict[str, Any]:
    """Ranks in ``again`` enter a module twice in step 2, and DDP's reducer fails there."""
    ranks = job(run_dir, 3)
    for rank in ranks:
        rank.parameter("layer.weight")
        for _ in range(2):
            rank.forward("", "layer", "head").backward("AddmmBackward0").call().step()
        rank.forward("", "layer", *(["layer"] if rank.rank in again else []), "head")
        if rank.rank in again:
            rank.raised("Expected to mark a variable ready only once. This error is", kind="RuntimeError")
        else:
            rank.backward("AddmmBackward0").call().raised("Connection closed by peer", peer=True, kind="RuntimeError")
    return diagnose(run_dir)


def test_a_module_entered_twice(run_dir: Path) -> None:
    """A reducer that fails on the one rank that entered a module twice tells of that, not of an error of its own."""
    verdict = ready_twice(run_dir, (1,))
    assert (verdict["kind"], told(verdict)) == ("mismatch", [(1, "layer", None, 2)])
    assert "once more than the others" in verdict["summary"]


def test_a_model_that_ddp_cannot_train(run_dir: Path) -> None:
    """Where all ranks do so alike it is an error of all."""
    verdict = ready_twice(run_dir, (0, 1, 2))
    assert (verdict["kind"], [c["rank"] for c in verdict["culprits"]]) == ("exception", [0, 1, 2])
