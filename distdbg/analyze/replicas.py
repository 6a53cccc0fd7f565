"""Ranks that wrapped different parameters in DDP, or whose graphs its reducer found to differ: kind `mismatch`.

DDP's own errors tell that something differs and are raised on ranks that are in order, too. Who differs is told
by the lists of parameters, and by the modules each rank entered.
"""

from collections.abc import Hashable
from typing import Any

from distdbg.analyze.facts import Facts
from distdbg.analyze.parting import first_difference, roles
from distdbg.analyze.rank import RankView
from distdbg.schema import EventKind as K

# What DDP's reducer says where a rank ran another graph than it was told to expect.
_REDUCER = ("Expected to mark a variable ready only once", "Expected to have finished reduction in the prior iteration")

# What DDP's check of the parameters says, on ranks that are in order, too.
_CHECK = ("DDP expects same model across all ranks", "appears not to match sizes of the same param")

_Parameter = tuple[str, tuple[int, ...], str]  # name, shape, dtype


def find(facts: Facts) -> dict[str, Any] | None:
    """The verdict of kind `mismatch` over what DDP replicates, or None."""
    if not facts.failures:
        return None
    return _wrapped(facts) or _unseen(facts) or _reducer(facts)


# ---- the parameters


def _wrapped(facts: Facts) -> dict[str, Any] | None:
    """The first DDP wrapper whose ranks brought different parameters."""
    by_wrapper: dict[tuple[tuple[int, ...], int], dict[int, tuple[tuple[_Parameter, ...], int]]] = {}
    for rank, view in facts.views.items():
        count: dict[tuple[int, ...], int] = {}
        for record in view.of_kind(K.REPLICATE):
            about = view.extra(int(record["name"]))
            ranks = tuple(int(r) for r in about.get("ranks", ()))
            number = count[ranks] = count.get(ranks, -1) + 1
            listed = tuple((str(n), tuple(shape), str(d)) for n, shape, d in about.get("parameters", ()))
            by_wrapper.setdefault((ranks, number), {})[rank] = (listed, int(record["step"]))
    for (ranks, _), lists in by_wrapper.items():
        if len({listed for listed, _ in lists.values()}) > 1:
            return _told(facts, len(ranks), lists)
    return None


def _unseen(facts: Facts) -> dict[str, Any] | None:
    """DDP's check failed, and the ranks that are seen agree: it is about one that is not."""
    failed = [r for r, f in facts.failures.items() if not f.from_peer and any(text in f.title for text in _CHECK)]
    if not failed or not facts.missing:
        return None
    first = min(failed, key=lambda r: facts.failures[r].t)
    return {
        "kind": "unknown",
        "cause": "DDP's check of the models failed",
        "summary": f"DDP found that the ranks wrap different models; {facts.names(facts.views)} agree, and nothing was "
        f"recorded of {facts.names(facts.missing)}: look there",
        "victims": facts.victims(set()),
        "evidence": [f"rank {first} raised {facts.failures[first].title}"],
        "confidence": 0.4,
    }


def _told(facts: Facts, world: int, lists: dict[int, tuple[tuple[_Parameter, ...], int]]) -> dict[str, Any]:
    sides: dict[Hashable, list[int]] = {}
    for rank, (listed, _) in lists.items():
        sides.setdefault(listed, []).append(rank)
    ordered = sorted(sides.values(), key=len, reverse=True)
    right = ordered[0]
    apart = sorted(rank for rank in lists if rank not in right)
    shown = {rank: _difference(lists[rank][0], lists[right[0]][0]) for rank in apart}
    first = shown[apart[0]]
    if len(right) * 2 <= world:
        told = f"{facts.names(right)} and {facts.names(apart)} wrap different models in DDP: on {facts.names(apart)} "
        return {
            "kind": "unknown",
            "cause": "the ranks wrap different parameters in DDP",
            "summary": f"{told}{first[1]}; which of them is at fault can't be told",
            "evidence": [f"rank {rank}: {words}" for rank, (_, words) in shown.items()],
            "confidence": 0.5,
        }
    culprits = [
        facts.culprit(
            rank,
            phase="collective",
            module=_common_module(lists[rank][0], lists[right[0]][0]) or name.rpartition(".")[0] or None,
            parameter=name or None,
            step=lists[rank][1],
            source=facts.failures[rank].source if rank in facts.failures else None,
        )
        for rank, (name, _) in shown.items()
    ]
    return {
        "kind": "mismatch",
        "cause": f"another model than on the others: {first[1]}",
        "summary": f"{facts.names(apart)} wrapped another model in DDP than the others: {first[1]}",
        "culprits": culprits,
        "victims": facts.victims(set(apart)),
        "evidence": [f"rank {rank}: {words}" for rank, (_, words) in shown.items()]
        + [f"{facts.names(right)} brought the same {len(lists[right[0]][0])} parameters"],
        "ruled_out": ["the ranks that DDP's own error names: it compares with the rank it meets first"],
        "confidence": 0.95,
    }


def _difference(ours: tuple[_Parameter, ...], theirs: tuple[_Parameter, ...]) -> tuple[str, str]:
    """(name, words) of the first parameter in which a rank differs."""
    mine, others = {name: rest for name, *rest in ours}, {name: rest for name, *rest in theirs}
    for name, shape, dtype in theirs:
        if name not in mine:
            return name, f"parameter {name} is not among its parameters, or needs no gradient there"
        if mine[name] != [shape, dtype]:
            here = mine[name]
            return name, f"parameter {name} is {here[1]}{list(here[0])} there and {dtype}{list(shape)} on the others"
    extra = next((name for name, *_ in ours if name not in others), None)
    if extra is not None:
        return extra, f"parameter {extra} is among its parameters only"
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
    return ours[at][0], f"its parameters come in another order: {ours[at][0]} where the others have {theirs[at][0]}"


def _common_module(ours: tuple[_Parameter, ...], theirs: tuple[_Parameter, ...]) -> str:
    """The innermost module that holds all parameters in which a rank differs."""
    names = [name.split(".")[:-1] for name, *_ in set(ours) ^ set(theirs)]
    common = names[0] if names else []
    for path in names[1:]:
        while path[: len(common)] != common:
            common = common[:-1]
    return ".".join(common)


# ---- the graph


def _reducer(facts: Facts) -> dict[str, Any] | None:
    """A rank whose reducer complains of its graph, and which entered other modules than its peers in that step."""
    own = {r: f for r, f in facts.failures.items() if not f.from_peer and any(text in f.title for text in _REDUCER)}
    if not own:
        return None
    rank = min(own, key=lambda r: own[r].t)
    if any(not f.from_peer and f.t < own[rank].t for f in facts.failures.values()):
        return None
    view = facts.views[rank]
    role = next((ranks for ranks in roles(facts.views) if rank in ranks), ())
    peers = [r for r in role if r != rank and r not in own]
    if len(own) > 1 or not peers:
        return None  # all alike: an error of the model, not of a rank
    step = view.step
    found = {r: _modules_part(view, facts.views[r], step) for r in peers}
    if None in found.values() or len(set(found.values())) > 1:
        return None
    how, module = found[peers[0]] or ("order", "")
    again = any(name == module for name, _ in facts.views[peers[0]].entered.get(step, []))
    words = {
        "skipped": f"skipped module {module}",
        "order": f"entered module {module} in another order than the others",
        "extra": f"entered module {module} " + ("once more than the others" if again else "which the others did not"),
    }[how]
    source = next((view.extra(i).get("source") for i, n in enumerate(view.names) if n and n.text == module), None)
    entry = facts.culprit(rank, phase="forward", module=module, step=step, source=source, error=own[rank].title)
    return {
        "kind": "mismatch",
        "cause": words,
        "summary": f"rank {rank} parted from the others in step {step}: {words}, and DDP's reducer failed on it",
        "culprits": [entry],
        "victims": facts.victims({rank}),
        "evidence": [f"rank {rank} raised {own[rank].title}", f"rank {rank}: {words}, unlike {facts.names(peers)}"],
        "ruled_out": ["an error of the model as such: the others ran the same step without it"],
        "confidence": 0.9 if len(peers) > 1 else 0.8,
    }


def _modules_part(view: RankView, peer: RankView, step: int) -> tuple[str, str] | None:
    ours, theirs = ([name for name, _ in v.entered.get(step, [])] for v in (view, peer))
    if not ours or not theirs:
        return None
    return first_difference(ours, theirs, whole=True, theirs_whole=True)
