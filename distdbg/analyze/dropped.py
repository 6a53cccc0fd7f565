"""Ranks that parted in a step whose events are no longer kept: told by the digests of steps, which outlast them."""

from distdbg.analyze.parting import Parting, roles
from distdbg.analyze.rank import RankView

Words = tuple[int, int]  # hashes of the modules entered and of the collectives issued


def first_by_digest(views: dict[int, RankView]) -> Parting | None:
    """The earliest step, before those that are kept on all ranks, in which a role's ranks issued different calls."""
    found = [p for ranks in roles(views) if len(ranks) > 1 if (p := _of_role(views, ranks)) is not None]
    return min(found, key=lambda p: p.step, default=None)


def _of_role(views: dict[int, RankView], ranks: tuple[int, ...]) -> Parting | None:
    kept = max(views[rank].first_step for rank in ranks)
    if kept <= 0:
        return None
    words = {rank: _words(views[rank], kept) for rank in ranks}
    for step in sorted(set.intersection(*(set(w) for w in words.values()))):
        calls = {rank: words[rank][step][1] for rank in ranks}
        if len(set(calls.values())) > 1:
            return _judged(ranks, step, calls, words)
    return None


def _words(view: RankView, kept: int) -> dict[int, Words]:
    digests = view.digests
    digests = digests[digests["step"] < kept]
    return {int(d["step"]): (int(d["modules"]), int(d["calls"])) for d in digests}


def _judged(ranks: tuple[int, ...], step: int, calls: dict[int, int], words: dict[int, dict[int, Words]]) -> Parting:
    sides: dict[int, list[int]] = {}
    for rank in ranks:
        sides.setdefault(calls[rank], []).append(rank)
    ordered = sorted(sides.values(), key=len, reverse=True)
    by, right = "majority", ordered[0]
    if len(right) * 2 <= len(ranks):
        # The first step often differs from all others (buckets are rebuilt): it is no habit.
        right = [rank for rank in ranks if step > 1 and words[rank].get(step - 1) == words[rank][step]]
        by = "habit" if len({calls[rank] for rank in right}) == 1 else "unclear"
        right = [rank for rank in ranks if by == "habit" and calls[rank] == calls[right[0]]]
    culprits = tuple(rank for rank in ranks if rank not in right) if right else ()
    return Parting(step, culprits, tuple(tuple(side) for side in ordered), by, "digest", None, None)
