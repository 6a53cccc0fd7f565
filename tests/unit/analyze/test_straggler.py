"""Who is late: against peers place by place, and a rank without peers against its own earlier steps."""

from pathlib import Path
from typing import Any

from distdbg.analyze.verdict import diagnose
from distdbg.schema import EventKind as K
from tests.unit.shards import Rank, job


def own(rank: Rank, module: str, seconds: float, *, node: bool = False) -> None:
    """Work in a module's forward, or in a node of it in a backward."""
    number = rank.module(module)
    if not node:
        rank.event(K.FORWARD_BEGIN, module=number, a=2).sleep(seconds).event(K.FORWARD_END, module=number)
        return
    run, rank.backwards = rank.backwards, rank.backwards + 1
    words = (rank.writer.intern("node", "MmBackward0"), number, 0, run, 0)
    rank.event(K.BACKWARD_BEGIN, seq=run, a=1).event(K.PREHOOK, *words).sleep(seconds).event(K.POSTHOOK, *words)
    rank.event(K.BACKWARD_FINAL, seq=run).event(K.BACKWARD_END, seq=run)


def meet(ranks: list[Rank]) -> None:
    """All ranks wait in a collective until the last one is there."""
    for rank in ranks:
        rank.call().wait()
    there = max(rank.now for rank in ranks)
    for rank in ranks:
        rank.now = there
        rank.event(K.WAIT_END).step()


def verdict_of(run_dir: Path, ranks: list[Rank]) -> tuple[str, list[tuple[Any, ...]]]:
    for rank in ranks:
        rank.leave()
    found = diagnose(run_dir)
    return found["kind"], [(c["rank"], c["phase"], c["module"], c["step"]) for c in found["culprits"]]


def test_a_module_slow_in_both_directions(run_dir: Path) -> None:
    """Lateness that lies half in a module's forward and half in its backward is that module's."""
    ranks = job(run_dir, 3)
    for step in range(16):
        for rank in ranks:
            rank.parameter("w")
            slow = 0.012 if rank.rank == 2 and step >= 5 else 0.0
            own(rank, "a", 0.04)
            own(rank, "b", 0.01 + slow)
            own(rank, "b", 0.01 + slow * 0.9, node=True)
        meet(ranks)
    assert verdict_of(run_dir, ranks) == ("straggler", [(2, "forward", "b", 5)])


def test_noise_elsewhere_does_not_hide_a_steady_place(run_dir: Path) -> None:
    """A module that is always late on one rank is named although whole steps vary by more than that."""
    ranks = job(run_dir, 3)
    for step in range(30):
        for rank in ranks:
            rank.parameter("w")
            own(rank, "a", 0.03 + 0.02 * ((7 * step + 5 * rank.rank) % 4))
            own(rank, "b", 0.001 + (0.03 + 0.01 * (step % 3) if rank.rank == 1 and step >= 6 else 0.0))
        meet(ranks)
    assert verdict_of(run_dir, ranks) == ("straggler", [(1, "forward", "b", 6)])


def test_two_at_once(run_dir: Path) -> None:
    """Several ranks that are late alike are all named."""
    ranks = job(run_dir, 5)
    for _ in range(14):
        for rank in ranks:
            rank.parameter("w")
            own(rank, "a", 0.05 if rank.rank in (1, 3) else 0.01)
        meet(ranks)
    kind, culprits = verdict_of(run_dir, ranks)
    assert (kind, sorted(culprits)) == ("straggler", [(1, "forward", "a", 2), (3, "forward", "a", 2)])


def test_each_rank_now_and_then(run_dir: Path) -> None:
    """Delays that strike one rank after the other are nobody's."""
    ranks = job(run_dir, 4)
    for step in range(24):
        for rank in ranks:
            rank.parameter("w")
            own(rank, "a", 0.05 if step % 4 == rank.rank else 0.01)
        meet(ranks)
    assert verdict_of(run_dir, ranks) == ("healthy", [])


def pipeline(run_dir: Path, *, late_from: int, other: float = 0.0) -> tuple[str, list[tuple[Any, ...]]]:
    """Two stages with parameters of their own; the second gets slower, or both by ``other``."""
    ranks = job(run_dir, 2)
    for step in range(22):
        for rank in ranks:
            rank.parameter(f"stage{rank.rank}.w")
            late = step >= late_from
            own(rank, "a", 0.02 + (other if late else 0.0) + (0.03 if late and rank.rank == 1 else 0.0))
        meet(ranks)
    return verdict_of(run_dir, ranks)


def test_a_stage_that_leaves_its_habit(run_dir: Path) -> None:
    """A rank without peers is late where it got slower than it was and the others wait more."""
    assert pipeline(run_dir, late_from=7) == ("straggler", [(1, "forward", "a", 7)])


def test_a_stage_that_is_slow_by_design(run_dir: Path) -> None:
    """A stage that has more to do from the start on is nobody's fault."""
    assert pipeline(run_dir, late_from=0) == ("healthy", [])


def test_all_stages_get_slower(run_dir: Path) -> None:
    """Where all ranks have more to do from a step on none of them is late."""
    assert pipeline(run_dir, late_from=7, other=0.04) == ("healthy", [])
