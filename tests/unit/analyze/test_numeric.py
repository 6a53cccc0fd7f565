"""Values: what broke first, what never reached the weights, and replicas that train on their own."""

import struct
from pathlib import Path
from typing import Any

from distdbg.analyze.verdict import diagnose
from distdbg.schema import MAGNITUDE_RECEIVED, MAGNITUDE_RETURNED
from distdbg.schema import EventKind as K
from tests.unit.shards import Rank, job


def bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def gradient(rank: Rank, received: float, returned: float) -> None:
    """One backward whose node received and returned values of these magnitudes."""
    rank.backward("SqrtBackward0", module="gate")
    name, module = rank.writer.intern("node", "SqrtBackward0"), rank.module("gate")
    rank.event(K.MAGNITUDE, name, module, 0, MAGNITUDE_RECEIVED, bits(received))
    rank.event(K.MAGNITUDE, name, module, 0, MAGNITUDE_RETURNED, bits(returned))


def digest(rank: Rank, value: int, largest: float = 1.0) -> None:
    rank.event(K.DIGEST, rank.parameter("gate.weight"), rank.module("gate"), a=value, b=bits(largest))


def run(run_dir: Path, values: list[list[tuple[float, bool, float]]]) -> dict[str, Any]:
    """By rank and backward: what the node returned, whether the optimizer stepped, the largest weight then."""
    ranks = job(run_dir, len(values))
    for rank, steps in zip(ranks, values, strict=True):
        for number, (returned, steps_on, weight) in enumerate(steps):
            rank.forward("", "gate")
            gradient(rank, 1.0, returned)
            rank.call()
            if steps_on:
                digest(rank, number, weight)
                rank.step()
        rank.leave()
    return diagnose(run_dir)


NAN, INF = float("nan"), float("inf")


def test_a_gradient_that_spoils_the_weights(run_dir: Path) -> None:
    """The node that made the first NaN is named where the weights turned bad with it."""
    good, bad = [(1.0, True, 1.0)] * 2, [(1.0, True, NAN)] * 2
    verdict = run(run_dir, [[*good, (1.0, True, NAN), *bad], [*good, (NAN, True, NAN), *bad]])
    assert verdict["kind"] == "numeric"
    assert [(c["rank"], c["node"], c["step"]) for c in verdict["culprits"]] == [(1, "SqrtBackward0", 2)]


def test_a_loss_scale_that_begins_too_high(run_dir: Path) -> None:
    """Overflow in backwards whose steps are skipped never reaches the weights, and is nobody's fault."""
    steps = [(INF, False, 0.0), (INF, False, 0.0), *[(1.0, True, 1.0)] * 4]
    assert run(run_dir, [steps, steps])["kind"] == "healthy"


def test_the_last_backward_has_no_step(run_dir: Path) -> None:
    """Where a run ends with bad values nobody knows whether they would have been skipped: they are told."""
    steps = [*[(1.0, True, 1.0)] * 3, (INF, False, 0.0)]
    assert run(run_dir, [steps, [*steps[:3], (1.0, False, 0.0)]])["kind"] == "numeric"


def replicas(run_dir: Path, digests: list[list[int]], together: set[int]) -> dict[str, Any]:
    """By rank and step a digest; in the steps of ``together`` the ranks exchange gradients."""
    ranks = job(run_dir, len(digests))
    for rank, values in zip(ranks, digests, strict=True):
        for step, value in enumerate(values):
            rank.forward("", "gate").backward("AddmmBackward0")
            if step in together:
                rank.call()
            digest(rank, value)
            rank.step()
        rank.leave()
    return diagnose(run_dir)


def test_a_replica_that_parts(run_dir: Path) -> None:
    """Weights that were equal and are not any more name the replica that differs."""
    verdict = replicas(run_dir, [[1, 2, 3], [1, 9, 8], [1, 2, 3]], {0, 1, 2})
    assert (verdict["kind"], [(c["rank"], c["step"]) for c in verdict["culprits"]]) == ("numeric", [(1, 1)])


def test_local_steps_part_replicas_by_design(run_dir: Path) -> None:
    """Ranks that train on their own for a while and then exchange something are not held to be equal."""
    assert replicas(run_dir, [[1, 2, 3, 7], [1, 2, 4, 8], [1, 2, 5, 9]], {0, 1, 3})["kind"] == "healthy"
