"""Values: the first non-finite or exploding gradient or activation, and replicas that part (`--numerics`)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from distdbg.analyze.facts import Facts
from distdbg.analyze.parting import roles
from distdbg.analyze.rank import RankView
from distdbg.schema import MAGNITUDE_ACTIVATION, MAGNITUDE_RECEIVED, MAGNITUDE_RETURNED
from distdbg.schema import EventKind as K

_SYNCHRONISES = {"all_reduce", "reduce_scatter", "all_to_all", "reduce"}
EXPLODED = 1e4  # times what the same place had in all earlier steps and has on the peers


@dataclass
class Onset:
    """The first place on a rank that turned good values into bad ones."""

    rank: int
    step: int
    t: int
    phase: str
    node: str | None
    module: str
    what: str  # nan, inf, exploded
    value: float


def find(facts: Facts) -> dict[str, Any] | None:
    """The verdict of kind `numeric`, or None."""
    if facts.symptom:
        return None
    onsets = [onset for rank, view in facts.views.items() if (onset := _onset(rank, view)) is not None]
    onsets = [onset for onset in onsets if onset.what != "exploded" or _beyond_peers(facts, onset)]
    parted = _parted(facts)
    first = min((o.step for o in onsets), default=None)
    if parted is not None and (first is None or parted["culprits"][0]["step"] <= first):
        return parted
    if first is None:
        return None
    here = [o for o in onsets if o.step == first]
    if facts.missing and all(o.phase == "forward" for o in here):
        return None  # bad weights may have come from a rank that is not seen
    # In backward a rank's own nodes come before the all-reduce that spreads the values, so all onsets of that
    # step are the ranks' own; an activation is bad on all ranks at once when the weights were.
    return _non_finite(facts, here, first)


def _magnitudes(view: RankView) -> np.ndarray:
    found: np.ndarray = view.records[view.records["kind"] == K.MAGNITUDE]
    return found


def _values(records: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(records["b"]).view(np.float64)


def _onset(rank: int, view: RankView) -> Onset | None:
    """The first place whose input was finite and whose output is not; else the first that blew up."""
    records = _magnitudes(view)
    if not len(records):
        return None
    values = _values(records)
    bad = ~np.isfinite(values) & ~_harmless(view, records["t"])
    returned = (records["a"] & MAGNITUDE_RETURNED) != 0
    activation = (records["a"] & MAGNITUDE_ACTIVATION) != 0
    # Models mask with infinities: one in an activation counts only where gradients turn bad in that step, too.
    broken = set(records["step"][bad & ~activation].tolist())
    for index in np.flatnonzero(bad & returned).tolist():
        record = records[index]
        if activation[index] and np.isinf(values[index]) and int(record["step"]) not in broken:
            continue
        before = records[max(0, index - 1)]
        same = int(before["module"]) == int(record["module"]) and int(before["name"]) == int(record["name"])
        if index and same and (int(before["a"]) & MAGNITUDE_RECEIVED) and bad[index - 1]:
            continue  # it was handed on
        return _made(rank, view, record, "nan" if np.isnan(values[index]) else "inf", float(values[index]))
    handed = np.flatnonzero(bad & ~activation)
    if len(handed):
        at = int(handed[0])
        return _made(rank, view, records[at], "nan" if np.isnan(values[at]) else "inf", float(values[at]))
    return _explosion(rank, view, records, values)


def _harmless(view: RankView, times: np.ndarray) -> np.ndarray:
    """Marks the moments whose values never reached the weights: all are finite at the end of the next step.

    A loss scale that begins too high overflows, and the step is skipped; rows without a word are thrown away.
    """
    digests = view.records[view.records["kind"] == K.DIGEST]
    finite = np.isfinite(_values(digests))
    first = np.unique(digests["step"], return_index=True)[1]
    if not digests["b"].any():  # none, or of a recorder that did not note it
        return np.zeros(len(times), dtype=bool)
    whole = np.logical_and.reduceat(finite, first)
    following = np.searchsorted(digests["t"][first], times)
    found: np.ndarray = np.append(whole, False)[following]
    return found


def _explosion(rank: int, view: RankView, records: np.ndarray, values: np.ndarray) -> Onset | None:
    """The first place that left the largest magnitude of its own earlier steps by orders of magnitude."""
    largest: dict[tuple[int, int, int], float] = {}
    steps: dict[tuple[int, int, int], int] = {}
    columns = zip(
        records["name"].tolist(),
        records["module"].tolist(),
        records["a"].tolist(),
        records["step"].tolist(),
        values.tolist(),
        range(len(records)),
        strict=True,
    )
    received: dict[tuple[int, int, int], bool] = {}
    for name, module, a, step, value, index in columns:
        key = (name, module, a)
        known = largest.get(key, 0.0)
        blown = known > 0 and steps.get(key, step) < step and value > known * EXPLODED
        if a & MAGNITUDE_RECEIVED:
            received[(name, module, a & MAGNITUDE_ACTIVATION)] = blown
        elif blown and not received.get((name, module, a & MAGNITUDE_ACTIVATION), False):
            return _made(rank, view, records[index], "exploded", value)
        if not blown:
            largest[key] = max(known, value)
            steps.setdefault(key, step)
    return None


def _beyond_peers(facts: Facts, onset: Onset) -> bool:
    """Whether no peer has values of that size there in that step: what grows alike on all ranks is training."""
    peers = [view for rank, view in facts.views.items() if rank != onset.rank]
    for view in peers:
        records = _magnitudes(view)
        records = records[(records["step"] == onset.step) & (records["a"] & MAGNITUDE_RETURNED != 0)]
        same = [
            view.text(int(r["module"])) == onset.module
            and (onset.node is None or view.text(int(r["name"])) == onset.node)
            for r in records
        ]
        here = _values(records[np.array(same, dtype=bool)])
        if len(here) and np.nanmax(here) * EXPLODED > onset.value:
            return False
    return bool(peers)


def _made(rank: int, view: RankView, record: Any, what: str, value: float) -> Onset:
    activation = bool(int(record["a"]) & MAGNITUDE_ACTIVATION)
    return Onset(
        rank,
        int(record["step"]),
        int(record["t"]) + view.offset,
        "forward" if activation else "backward",
        None if activation else view.text(int(record["name"])),
        view.text(int(record["module"])),
        what,
        value,
    )


def _non_finite(facts: Facts, onsets: list[Onset], step: int) -> dict[str, Any] | None:
    if len(onsets) == len(facts.views) and len(onsets) > 1:
        # All ranks at once: bad weights from the step before, or the same fault everywhere.
        first = min(onsets, key=lambda o: o.t)
        same = all((o.phase, o.node, o.module) == (first.phase, first.node, first.module) for o in onsets)
        near = [o for o in onsets if o.t - first.t <= (facts.apart_ns(first.rank, o.rank) or 0)]
        culprits = onsets if same else near
    else:
        culprits = onsets
    entries = [
        facts.culprit(
            o.rank,
            phase=o.phase,
            node=o.node,
            module=o.module,
            step=step,
            source=_source(facts.views[o.rank], o.module),
        )
        for o in culprits
    ]
    o = culprits[0]
    words = {"nan": "NaN", "inf": "an infinite value", "exploded": f"a value of {o.value:.3g}, far beyond its scale"}
    place = f"node {o.node} of module {o.module}" if o.node else f"module {o.module or '(the model itself)'}"
    thing = "gradient" if o.phase == "backward" else "activation"
    who = facts.names([c.rank for c in culprits])
    return {
        "kind": "numeric",
        "cause": f"{words[o.what]} in {o.phase}",
        "culprits": entries,
        "victims": [],
        "summary": f"{who} made {words[o.what]} first: {place}, {thing} in step {step}",
        "evidence": [
            f"what {place} received on rank {c.rank} was in order, what it returned was not" for c in culprits
        ],
        "ruled_out": ["an earlier step or node: all values before were finite and of their usual size"],
        "confidence": 0.9,
    }


def _source(view: RankView, module: str) -> str | None:
    for name in view.names:
        if name is not None and name.category == "module" and name.text == module:
            return (name.extra or {}).get("source")
    return None


def _parted(facts: Facts) -> dict[str, Any] | None:
    """Parameters that were equal on all replicas after some step and are not after a later one."""
    for ranks in roles(facts.views):
        if len(ranks) < 2:
            continue
        digests = {rank: _digests(facts.views[rank]) for rank in ranks}
        # Replicas are kept equal by what they exchange. Ranks that train on their own for a step (local SGD) may
        # part, and are not equal again by their next exchange.
        together = set.intersection(*({i.step for i in facts.views[r].items if i.op in _SYNCHRONISES} for r in ranks))
        equal: set[str] = set()
        for step in sorted(set.intersection(*(set(d) for d in digests.values()))):
            if step not in together:
                equal.clear()
                continue
            now = {rank: digests[rank][step] for rank in ranks}
            names = [n for n in now[ranks[0]] if all(n in d for d in now.values())]
            parted = [n for n in names if n in equal and len({d[n] for d in now.values()}) > 1]
            if parted:
                return _replicas(facts, ranks, now, parted, step)
            equal |= {n for n in names if len({d[n] for d in now.values()}) == 1}
    return None


def _digests(view: RankView) -> dict[int, dict[str, int]]:
    records = view.records[view.records["kind"] == K.DIGEST]
    found: dict[int, dict[str, int]] = {}
    for record in records:
        found.setdefault(int(record["step"]), {})[view.text(int(record["name"]))] = int(record["a"])
    return found


def _replicas(
    facts: Facts, ranks: tuple[int, ...], now: dict[int, dict[str, int]], parted: list[str], step: int
) -> dict[str, Any]:
    parameter = parted[0]
    sides: dict[int, list[int]] = {}
    for rank in ranks:
        sides.setdefault(now[rank][parameter], []).append(rank)
    ordered = sorted(sides.values(), key=len, reverse=True)
    clear = len(ordered[0]) * 2 > len(ranks)
    culprits = sorted(r for side in ordered[1:] for r in side) if clear else []
    module = parameter.rpartition(".")[0]
    told = f"parameter {parameter} is no longer the same on {facts.names(ranks)} after step {step}"
    if not culprits:
        return {
            "kind": "unknown",
            "summary": f"{told}; which replica is wrong can't be told",
            "confidence": 0.5,
            "cause": "replicas parted",
            "evidence": [told],
            "culprits": [],
        }
    entries = [facts.culprit(r, phase=None, module=module, parameter=parameter, step=step) for r in culprits]
    more = f" (and {len(parted) - 1} more parameters)" if len(parted) > 1 else ""
    return {
        "kind": "numeric",
        "cause": "replicas parted",
        "culprits": entries,
        "victims": [],
        "confidence": 0.9,
        "summary": f"{facts.names(culprits)} parted from the other replicas in step {step}: {parameter}{more}",
        "evidence": [told, f"{facts.names(ordered[0])} still agree with each other"],
        "ruled_out": ["replicas that differed from the start: these parameters were equal before"],
    }


__all__ = ["EXPLODED", "Onset", "find"]
