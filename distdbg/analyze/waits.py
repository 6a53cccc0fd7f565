"""Who waits for whom: pending collectives and messages, followed to their roots."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from distdbg.analyze.ends import End
from distdbg.analyze.rank import Item, RankView
from distdbg.schema import EventKind as K


@dataclass(frozen=True)
class Wait:
    """A rank issued ``item``, which can't complete before the ranks in ``on`` have issued theirs."""

    rank: int
    item: Item
    on: tuple[int, ...]
    group_name: str

    @property
    def text(self) -> str:
        if self.item.p2p:
            return f"{self.item.op} #{self.item.seq} ({self.item.signature})"
        return f"{self.item.op} #{self.item.seq} of {self.group_name}"


def pending(views: dict[int, RankView], known: dict[str, dict[int, int]] | None = None) -> dict[int, list[Wait]]:
    """By rank, its calls that some other rank has not yet answered, the oldest first.

    ``known``: by name of a group and rank, the number of its last call, as told by other evidence than its shard.
    """
    waits: dict[int, list[Wait]] = {rank: [] for rank in views}
    _collectives(views, waits, known or {})
    _messages(views, waits)
    for found in waits.values():
        found.sort(key=lambda wait: wait.item.t)
    return waits


def _collectives(views: dict[int, RankView], waits: dict[int, list[Wait]], known: dict[str, dict[int, int]]) -> None:
    counts: dict[str, dict[int, int]] = {}
    names: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, view in views.items():
        for group in view.groups.values():
            names[group.key] = (group.name, group.ranks)
            counts.setdefault(group.key, {}).setdefault(rank, 0)
        for item in view.items:
            if not item.p2p and item.group:
                counts[item.group][rank] = max(counts[item.group].get(rank, 0), item.seq)
    for key, found in counts.items():
        for rank, count in known.get(key.rpartition(":")[0], {}).items():
            if rank in names[key][1]:
                found[rank] = max(found.get(rank, 0), count)
    answered = {key: min(counts[key].get(r, 0) for r in ranks) for key, (_, ranks) in names.items() if ranks}
    for rank, view in views.items():
        for item in view.items:
            if item.p2p or not item.group or item.seq <= answered.get(item.group, 0):
                continue
            name, ranks = names[item.group]
            behind = tuple(r for r in ranks if r != rank and counts[item.group].get(r, 0) < item.seq)
            if behind:
                waits[rank].append(Wait(rank, item, behind, name))


def _messages(views: dict[int, RankView], waits: dict[int, list[Wait]]) -> None:
    """A receive waits for its send; a send may be buffered, so it waits only if its rank stands in it."""
    done: dict[tuple[str, int, int, int], int] = {}
    for rank, view in views.items():
        for item in view.items:
            if item.p2p:
                key = (item.op, rank, int(item.about.get("peer", -1)), int(item.about.get("tag", 0)))
                done[key] = done.get(key, 0) + 1
    for rank, view in views.items():
        seen: dict[tuple[str, int, int], int] = {}
        for item in view.items:
            if not item.p2p:
                continue
            peer, tag = int(item.about.get("peer", -1)), int(item.about.get("tag", 0))
            count = seen[(item.op, peer, tag)] = seen.get((item.op, peer, tag), 0) + 1
            other = ("recv" if item.op == "send" else "send", peer, rank, tag)
            if peer >= 0 and done.get(other, 0) < count and (peer in views or item.op == "recv"):
                waits[rank].append(Wait(rank, item, (peer,), ""))


def blocked_in_wait(view: RankView, end: End) -> bool:
    """Whether a rank stands in a call that waits for others, by its events or, failing these, its stacks."""
    place = view.place
    inner = place.stack[-1].what if place.stack else ""
    if inner in ("wait", "collective", "setup"):
        return True
    if place.finalizing:
        return True
    issued_last = bool(view.items) and len(view.main) > 0 and int(view.main["kind"][-1]) == K.COLLECTIVE_END
    stacks = view.shard.stacks
    main = next((t for t in stacks.get("threads", []) if t.get("main")), None) if isinstance(stacks, dict) else None
    fresh = main is not None and view.last_t <= int(stacks.get("t_unix_ns", 0)) if isinstance(stacks, dict) else False
    if fresh and main is not None:
        if main.get("in") in ("collective", "setup"):
            return True
        if main.get("in") == "backward":
            return inner in ("node", "backward") and _waits_in_cpp(view)
        # In torch's own code right after a call: some wrapper waits for it there.
        return issued_last and main.get("in") not in ("data", "checkpoint") and _in_torch(main)
    return place.between or issued_last or (inner == "node" and _waits_in_cpp(view))


def _in_torch(thread: dict[str, Any]) -> bool:
    """Whether a thread's innermost Python frame is torch's."""
    stack = thread.get("stack") or [[""]]
    return "/torch/" in str(stack[-1][0])


def _waits_in_cpp(view: RankView) -> bool:
    """In a node or between two of them with no Python below: waiting if the last call it issued there is recent."""
    place = view.place
    if not view.items or not place.stack:
        return False
    inner = place.stack[-1]
    last = view.items[-1]
    return last.t >= inner.t if inner.what == "node" else place.between and last.backward >= 0


def roots(blocked: dict[int, tuple[int, ...]]) -> tuple[set[int], list[int]]:
    """Ranks at which the waits end (they wait for nobody), and one cycle of waits if there is any.

    ``blocked``: rank -> ranks it waits for.
    """
    ends: set[int] = set()
    for rank, on in blocked.items():
        for other in on:
            if other not in blocked:
                ends.add(other)
        if not on:
            ends.add(rank)
    return ends, _cycle(blocked) if not ends else []


def _cycle(blocked: dict[int, tuple[int, ...]]) -> list[int]:
    for start in blocked:
        path: list[int] = []
        rank = start
        while rank in blocked and rank not in path:
            path.append(rank)
            on = blocked[rank]
            if not on:
                break
            rank = on[0]
        if rank in path:
            return path[path.index(rank) :]
    return []


def names_of(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 0 and 2", "ranks 0..6, 9"."""
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) <= 4:
        return "ranks " + ", ".join(map(str, found[:-1])) + f" and {found[-1]}"
    parts: list[str] = []
    start = previous = found[0]
    for rank in [*found[1:], None]:
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        parts.append(str(start) if start == previous else f"{start}..{previous}")
        if rank is not None:
            start = previous = rank
    return "ranks " + ", ".join(parts)
