"""Where ranks first part: the earliest step in which they issue different collectives, and who left the others.

Three comparisons, each of streams that may be cut short (a rank that failed or waits has only a beginning):

- **one group, call by call**: the n-th call of a group must be the same on all of its ranks (operation, size,
  dtype, root, the place it is issued from);
- **one role, step by step**: ranks with the same parameters issue the same calls, in the same order over all
  groups, in the same step; sizes are left out, since two tensor-parallel groups may hold different batches;
- **one rank and its habit**: with two ranks, or equal halves, who departs from its own earlier steps is at fault.

What changes no collective (another module path, a batch of another shape, an exception handled on the spot) is
no parting. Calls within `torch.distributed.algorithms.join` are left out: there ranks differ by design.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from distdbg.analyze.ends import End
from distdbg.analyze.rank import Item, RankView

_NO_CALL = "no call"
# Operations whose contributions may differ in size from rank to rank.
_FREE_SIZES = {"all_to_all", "gather", "scatter", "barrier"}


@dataclass
class Parting:
    """The first difference. ``ours`` is the culprit's call there (None: none), ``theirs`` the others'."""

    step: int
    culprits: tuple[int, ...]  # () where it can't be told who is at fault
    sides: tuple[tuple[int, ...], ...]
    by: str  # majority, habit, unclear
    comparison: str  # group, role, habit, digest
    ours: Item | None
    theirs: Item | None
    group_name: str = ""

    @property
    def t(self) -> int:
        return max((item.t for item in (self.ours, self.theirs) if item is not None), default=0)


def comparable(view: RankView) -> list[Item]:
    return [item for item in view.items if not item.joining]


def signature(item: Item) -> Hashable:
    """What must agree between the ranks of a group in one call."""
    about = item.about
    return (*agreed(item.op, tuple(about.get("dtypes", ())), about.get("numel")), about.get("root"))


def agreed(op: str, dtypes: tuple[str, ...], numel: int | None) -> tuple[str, tuple[str, ...], int | None]:
    """Of an operation, its types and its size what the ranks of a group must have in common."""
    return op, () if op in ("barrier", "scatter") else dtypes, None if op in _FREE_SIZES else numel


def first_by_group(views: dict[int, RankView], *, places: bool) -> Parting | None:
    """The earliest call of any group that is not the same on all of its ranks.

    ``places``: whether to compare where it was issued from, too.
    """
    found: list[Parting] = []
    for key, (name, members) in _members(views).items():
        streams: dict[int, dict[int, Item]] = {}
        for rank in members:
            streams[rank] = {item.seq: item for item in views[rank].items if item.group == key and not item.p2p}
        if len(streams) < 2:
            continue
        lines = _common_lines(streams) if places else set()
        for seq in sorted(set().union(*streams.values())):
            calls = {rank: stream[seq] for rank, stream in streams.items() if seq in stream}
            if len(calls) < 2 or any(item.joining for item in calls.values()):
                continue
            tokens: dict[int, Hashable] = {rank: _token(item, places) for rank, item in calls.items()}
            if len(set(tokens.values())) == 1 and all(item.source in lines for item in calls.values()):
                tokens = {rank: item.source for rank, item in calls.items()}
            if len(set(tokens.values())) > 1:
                found.append(_judge(views, tokens, calls, "group", name))
                break
        splits = _split_mismatch(views, streams, members, name)
        if splits is not None:
            found.append(splits)
    return min(found, key=lambda p: (p.step, p.t), default=None)


def _common_lines(streams: dict[int, dict[int, Item]]) -> set[str]:
    """Lines of the script from which all ranks of a group issued the same call, more than once.

    Only between such lines is a difference one: ranks often have a line each (a root sends what others receive).
    """
    shared = set.intersection(*(set(stream) for stream in streams.values()))
    together: Counter[str] = Counter()
    for seq in shared:
        found = {stream[seq].source for stream in streams.values()}
        calls = [stream[seq] for stream in streams.values()]
        if len(found) == 1 and all(item.issuer == "script" and item.op != "barrier" for item in calls):
            together.update(found)
    return {line for line, count in together.items() if count > 1 and line}


def _token(item: Item, places: bool) -> Hashable:
    site = item.site if places and item.op != "barrier" else ()
    return (signature(item), site)


def _split_mismatch(
    views: dict[int, RankView], streams: dict[int, dict[int, Item]], members: tuple[int, ...], name: str
) -> Parting | None:
    """An all_to_all in which what one rank sends another is not what that one expects."""
    shared = set.intersection(*(set(stream) for stream in streams.values())) if len(streams) == len(members) else set()
    for seq in sorted(shared):
        calls = {rank: streams[rank][seq] for rank in members}
        if any(item.op != "all_to_all" or not item.about.get("input_splits") for item in calls.values()):
            continue
        wrong: Counter[int] = Counter()
        for i, sender in enumerate(members):
            for j, receiver in enumerate(members):
                sends, takes = calls[sender].about["input_splits"], calls[receiver].about["output_splits"]
                if i < len(takes) and j < len(sends) and sends[j] != takes[i]:
                    wrong[sender] += 1
                    wrong[receiver] += 1
        if wrong:
            worst = max(wrong.values())
            culprits = [rank for rank, count in wrong.items() if count == worst]
            tokens: dict[int, Hashable] = {
                rank: rank in culprits if len(culprits) < len(members) else rank for rank in members
            }
            return _judge(views, tokens, calls, "group", name)
    return None


def _members(views: dict[int, RankView]) -> dict[str, tuple[str, tuple[int, ...]]]:
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for view in views.values():
        for group in view.groups.values():
            found[group.key] = (group.name, tuple(rank for rank in group.ranks if rank in views))
    return found


# ---- roles


def roles(views: dict[int, RankView]) -> list[tuple[int, ...]]:
    """Ranks with the same parameters, as tuples; a rank of which no parameter is known is alone."""
    found: dict[Hashable, list[int]] = {}
    for rank, view in sorted(views.items()):
        found.setdefault(view.parameters or rank, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def first_by_role(views: dict[int, RankView], ends: dict[int, End]) -> Parting | None:
    """The earliest step in which ranks of one role issue different calls."""
    found = [p for ranks in roles(views) if len(ranks) > 1 if (p := _role_parting(views, ends, ranks)) is not None]
    return min(found, key=lambda p: (p.step, p.t), default=None)


def _role_parting(views: dict[int, RankView], ends: dict[int, End], ranks: tuple[int, ...]) -> Parting | None:
    ranks = _counting_alike(views, ranks)
    if len(ranks) < 2:
        return None
    common = set.intersection(*({label for _, label in _labelled(views[rank])} for rank in ranks))
    streams = {rank: _by_step(views[rank], common) for rank in ranks}
    first = max(views[rank].first_step for rank in ranks)
    last = max(max(streams[rank], default=0) for rank in ranks)
    for step in range(first, last + 1):
        calls = {rank: streams[rank].get(step, []) for rank in ranks}
        for position in range(max(map(len, calls.values()), default=0)):
            tokens: dict[int, Hashable] = {}
            for rank in ranks:
                if position < len(calls[rank]):
                    item, label = calls[rank][position]
                    tokens[rank] = (item.op, label, item.site if item.op != "barrier" else ())
                elif views[rank].steps_ended > step:
                    tokens[rank] = _NO_CALL
            if len(set(tokens.values())) > 1:
                here = {rank: calls[rank][position][0] for rank in tokens if position < len(calls[rank])}
                return _judge(views, tokens, here, "role", "", step)
    return None


def parts_only_in(view: RankView, peer: RankView, step: int) -> bool:
    """Whether two ranks of a role issue the same calls in all steps but this one, of which there must be some."""
    labels = {label for _, label in _labelled(view)} & {label for _, label in _labelled(peer)}
    ours, theirs = _by_step(view, labels), _by_step(peer, labels)
    others = (set(ours) | set(theirs)) - {step}

    def tokens(stream: dict[int, list[tuple[Item, str]]], at: int) -> list[Hashable]:
        return [(item.op, label, item.site) for item, label in stream.get(at, [])]

    return len(others) > 1 and all(tokens(ours, at) == tokens(theirs, at) for at in others)


def _labelled(view: RankView) -> list[tuple[Item, str]]:
    labels = {group.key: group.label for group in view.groups.values()}
    return [(item, labels.get(item.group, "")) for item in comparable(view) if not item.p2p and item.group]


def _by_step(view: RankView, labels: set[str]) -> dict[int, list[tuple[Item, str]]]:
    found: dict[int, list[tuple[Item, str]]] = {}
    for item, label in _labelled(view):
        if label in labels:
            found.setdefault(item.step, []).append((item, label))
    return found


def _counting_alike(views: dict[int, RankView], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Leave out ranks that count no steps where others do (an optimizer on some ranks only)."""
    counts = {rank: views[rank].steps_ended for rank in ranks}
    if max(counts.values()) < 2:
        return ranks
    return tuple(rank for rank in ranks if counts[rank] > 0 or len({i.step for i in views[rank].items}) > 1)


# ---- habit


def first_by_habit(views: dict[int, RankView]) -> Parting | None:
    """The rank that departs from its own earlier steps in the calls it issues, messages included.

    Only ranks that had a habit (two steps alike) can depart from one; where all depart in the same step none is named.
    """
    departures: dict[int, tuple[int, Item | None, Item | None]] = {}
    for rank, view in views.items():
        found = _departure(view)
        if found is not None:
            departures[rank] = found
    if not departures:
        return None
    step = min(found[0] for found in departures.values())
    culprits = tuple(sorted(rank for rank, found in departures.items() if found[0] == step))
    _, ours, theirs = departures[culprits[0]]
    others = tuple(rank for rank in views if rank not in culprits)
    known = bool(others)
    return Parting(
        step, culprits if known else (), (culprits, others), "habit" if known else "unclear", "habit", ours, theirs
    )


def _departure(view: RankView) -> tuple[int, Item | None, Item | None] | None:
    streams: dict[int, list[Item]] = {}
    for item in comparable(view):
        streams.setdefault(item.step, []).append(item)
    last = max(view.steps_ended, max(streams, default=0))
    for step in range(view.first_step + 1, last + 1):
        before, now = streams.get(step - 1, []), streams.get(step, [])
        if step == last and not now:
            continue
        ended = view.steps_ended > step
        for position in range(max(len(before), len(now))):
            old = before[position] if position < len(before) else None
            new = now[position] if position < len(now) else None
            if new is None and not ended:
                break
            if (old and habit_token(old)) != (new and habit_token(new)):
                if (
                    old is None
                    and not ended
                    and step == view.steps_ended
                    and new is not None
                    and new.phase == "collective"
                ):
                    break  # after the loop: what a script does at its end is no departure
                if _warm_up(view, streams, step):
                    break
                return step, new, old
    return None


def _warm_up(view: RankView, streams: dict[int, list[Item]], step: int) -> bool:
    """The first step often differs from all that follow (buckets are rebuilt, groups made): no habit yet."""
    first = view.first_step
    following = streams.get(step + 1, [])
    now = streams.get(step, [])
    alike = [habit_token(i) for i in following][: len(now)] == [habit_token(i) for i in now][: len(following)]
    return step == first + 1 and bool(following) and alike


def habit_token(item: Item) -> Hashable:
    about = item.about
    return (
        item.op,
        item.group,
        about.get("peer"),
        about.get("tag"),
        about.get("root"),
        tuple(about.get("dtypes", ())),
        item.site,
    )


# ---- who is at fault


def _judge(
    views: dict[int, RankView],
    tokens: dict[int, Hashable],
    calls: dict[int, Item],
    comparison: str,
    group_name: str,
    step: int | None = None,
) -> Parting:
    sides: dict[Hashable, list[int]] = {}
    for rank, token in tokens.items():
        sides.setdefault(token, []).append(rank)
    ordered = sorted(sides.values(), key=len, reverse=True)
    by = "majority"
    if len(ordered[0]) * 2 > len(tokens):
        right = ordered[0]
    else:
        right = [rank for rank in tokens if keeps_habit(views[rank], calls.get(rank), step)]
        kept = {tokens[rank] for rank in right}
        by = "habit" if len(kept) == 1 else "unclear"
        right = [rank for rank in tokens if tokens[rank] in kept] if by == "habit" else []
    culprits = tuple(sorted(rank for rank in tokens if rank not in right)) if right else ()
    theirs = next((calls[rank] for rank in sorted(right) if rank in calls), None)
    ours = next((calls[rank] for rank in culprits if rank in calls), None)
    if not culprits:
        first = sorted(calls)
        ours, theirs = calls[first[0]], calls[first[-1]]
    if step is None:
        step = theirs.step if theirs is not None else ours.step if ours is not None else 0
    found = tuple(tuple(sorted(side)) for side in ordered)
    return Parting(step, culprits, found, by, comparison, ours, theirs, group_name)


def keeps_habit(view: RankView, call: Item | None, step: int | None) -> bool:
    """Whether a rank did up to this call what it did in the step before."""
    at = call.step if call is not None else step or 0
    items = comparable(view)
    now = [habit_token(i) for i in items if i.step == at and (call is None or i.index <= call.index)]
    before = [habit_token(i) for i in items if i.step == at - 1]
    modules_now, modules_before = _modules(view, at), _modules(view, at - 1)
    if not before and not modules_before:
        return False
    if call is None:
        return now == before and modules_now == modules_before
    alike = now == before[: len(now)]
    if alike and call is not None:
        alike = _same_size(call, [i for i in items if i.step == at - 1], len(now) - 1)
    if not alike and at == view.first_step + 1 and modules_now == modules_before[: len(modules_now)]:
        return True  # a first step's calls are no habit yet, its modules are
    return alike


def _same_size(call: Item, before: list[Item], position: int) -> bool:
    return position >= len(before) or signature(before[position]) == signature(call)


def _modules(view: RankView, step: int) -> list[str]:
    return [name for name, _ in view.entered.get(step, [])]


def first_difference(ours: list[str], theirs: list[str], *, whole: bool, theirs_whole: bool) -> tuple[str, str] | None:
    """("skipped" or "extra" or "order", module) where two sequences of modules first differ, or None.

    ``whole``, ``theirs_whole``: whether a sequence is known to its end; else it may be a beginning of the other.
    """
    for position in range(max(len(ours), len(theirs))):
        mine = ours[position] if position < len(ours) else None
        other = theirs[position] if position < len(theirs) else None
        if mine == other:
            continue
        if mine is None:
            return ("skipped", other or "") if whole else None
        if other is None:
            return ("extra", mine) if theirs_whole else None
        if mine not in theirs[position:]:
            return ("extra", mine)
        if other not in ours[position:]:
            return ("skipped", other)
        return ("order", mine)
    return None
