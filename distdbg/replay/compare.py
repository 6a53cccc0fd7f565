"""The same node on several ranks: which of its incoming gradients differ. Reads descriptions only, no tensor."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from distdbg.errors import BundleError
from distdbg.replay.bundle import Bundle

NORM_FACTOR = 10.0  # norms this far apart are told


def place_of(bundle: Bundle) -> tuple[Any, ...]:
    """What ranks share of a node: by it they are matched, never by clocks or sequence numbers."""
    about = bundle.about
    return (about["step"], about.get("backward"), about["node"], about.get("module"), about.get("call"))


def compare_bundles(bundles: Sequence[Bundle], *, of: int | None = None) -> list[str]:
    """What differs in what came in, a sentence each; [] where nothing does.

    With ``of`` (a rank) two ranks are told from that rank's side.
    Raises BundleError where the bundles are not of one node.
    """
    if len({place_of(bundle) for bundle in bundles}) > 1:
        names = ", ".join(bundle.path.name for bundle in bundles)
        raise BundleError(f"{names} are not of one node: step, backward, node and module must agree")
    found: list[str] = []
    for index in range(max((len(bundle.about["inputs"]) for bundle in bundles), default=0)):
        entries = {int(b.about["rank"]): _entry(b, index) for b in bundles}
        name = "incoming gradient" if index == 0 else f"incoming gradient {index}"
        found += _differences(name, entries, of)
    return found


def _entry(bundle: Bundle, index: int) -> dict[str, Any] | None:
    entries = bundle.about["inputs"]
    found = entries[index] if index < len(entries) else None
    return found if isinstance(found, dict) else None


def _differences(name: str, entries: dict[int, dict[str, Any] | None], of: int | None) -> list[str]:
    for look in (_shape, _dtype, _finite):
        values = {rank: look(entry) for rank, entry in entries.items()}
        told = _told(name, values, of)
        if told:
            return told  # what follows from a difference of shape is not told again
    norms = {rank: entry.get("norm") for rank, entry in entries.items() if entry is not None}
    known = {rank: float(norm) for rank, norm in norms.items() if isinstance(norm, (int, float))}
    return _norms(name, known)


def _told(name: str, values: dict[int, str], of: int | None) -> list[str]:
    if len(set(values.values())) < 2:
        return []
    if of in values and len(values) == 2:
        (other,) = (rank for rank in values if rank != of)
        return [f"rank {of}'s {name} is {values[of]} where rank {other}'s is {values[other]}"]
    usual, count = Counter(values.values()).most_common(1)[0]
    others = Counter(values.values()).most_common(2)[1][1]
    if count == others:  # no majority: each is told
        return [f"the {name} is " + ", ".join(f"{value} on rank {rank}" for rank, value in sorted(values.items()))]
    where = "the others have" if count > 1 else "the other has"
    return [
        f"rank {rank}'s {name} is {value} where {where} {usual}"
        for rank, value in sorted(values.items())
        if value != usual
    ]


def _shape(entry: dict[str, Any] | None) -> str:
    return "None" if entry is None else str(entry.get("shape"))


def _dtype(entry: dict[str, Any] | None) -> str:
    return "None" if entry is None else str(entry.get("dtype"))


def _finite(entry: dict[str, Any] | None) -> str:
    return "not finite" if entry is not None and entry.get("finite") is False else "finite"


def _norms(name: str, norms: dict[int, float]) -> list[str]:
    if len(norms) < 2:
        return []
    ordered = sorted(norms.values())
    middle = ordered[len(ordered) // 2] if len(ordered) > 2 else ordered[0]
    return [
        f"rank {rank}'s {name} has norm {norm:.4g} where the others have about {middle:.4g}"
        for rank, norm in sorted(norms.items())
        if norm > NORM_FACTOR * middle or norm * NORM_FACTOR < middle
    ]
