"""What the dumps of several ranks say together: by group and number, who issued what, and who waits for whom.

A dump is a look at one moment, and the ranks' moments differ. So a call that a dump does not hold counts as not issued
only if the dump is whole, and no other dump shows that it was written before the others' (`late`).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

from distdbg.analyze.flight import Call, Dump
from distdbg.analyze.parting import agreed

# Operations that end on no rank before every rank of the group has issued them.
ALL_AT_ONCE = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}

Token = tuple[Hashable, ...]


@dataclass
class Group:
    """One process group over all dumps. ``sure``: whether its members are told, and not just those that were seen."""

    name: str
    title: str
    members: tuple[int, ...]
    sure: bool
    streams: dict[int, dict[int, list[Call]]] = field(
        default_factory=dict
    )  # rank -> number -> calls (a batch: several)
    exact: set[int] = field(default_factory=set)  # ranks of which the last call is known

    def issued(self, rank: int) -> int:
        """The number of the last call of a rank, 0 for none."""
        return max(self.streams.get(rank, {}), default=0)

    @cached_property
    def floor(self) -> int:
        """The last call that ended somewhere and so was issued by all."""
        found = (
            seq
            for stream in self.streams.values()
            for seq, calls in stream.items()
            if all(call.finished and call.op in ALL_AT_ONCE for call in calls)
        )
        return max(found, default=0)

    def late(self, rank: int) -> bool:
        """Whether other dumps prove that this rank went on after its own dump."""
        return self.issued(rank) < self.floor

    def lacking(self, seq: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(members that had not issued a call, members of which that can't be told)."""
        behind = [rank for rank in self.members if self.issued(rank) < seq]
        sure = tuple(rank for rank in behind if rank in self.exact and not self.late(rank))
        return sure, tuple(rank for rank in behind if rank not in sure)


@dataclass(frozen=True)
class Standing:
    """A rank has issued ``call``, which has not ended. ``on`` had not issued it; of ``unseen`` that is not known."""

    call: Call
    on: tuple[int, ...]
    unseen: tuple[int, ...]


@dataclass
class Difference:
    """A call that is not the same on all ranks, or two calls in another order. ``culprits``: () if it can't be told."""

    culprits: tuple[int, ...]
    sides: tuple[tuple[int, ...], ...]
    by: str  # majority, habit, unclear
    ours: Call
    theirs: Call
    order: bool = False
    only_sizes: bool = False
    ended: bool = False  # on all ranks that issued it

    @property
    def t(self) -> int:
        return min(self.ours.t, self.theirs.t)


class Flight:
    """The dumps of a job. ``world``: the number of ranks, as far as the dumps tell or ``at_least``."""

    def __init__(self, dumps: dict[int, Dump], at_least: int = 1) -> None:
        self.dumps = dumps
        self.world = max([at_least, *(rank + 1 for rank in dumps), *(dump.world for dump in dumps.values())])
        # Whether the dumps tell how many ranks there are, and not just how many left one.
        self.told = at_least > 1 or any(dump.world > 1 for dump in dumps.values())

    @property
    def missing(self) -> set[int]:
        return set(range(self.world)) - set(self.dumps)

    # ---- groups

    @cached_property
    def groups(self) -> list[Group]:
        """All groups; of two with one name (a split of a group) each."""
        found: dict[tuple[str, tuple[int, ...]], Group] = {}
        told: dict[str, set[tuple[int, ...]]] = {}
        for dump in self.dumps.values():
            for name, ranks in dump.members.items():
                told.setdefault(name, set()).add(ranks)
        for rank, dump in self.dumps.items():
            for call in dump.calls:
                ranks = dump.members.get(call.group, ())
                if not ranks:  # another member's dump may tell; two groups of that name would leave it open
                    others = [r for r in told.get(call.group, ()) if rank in r]
                    ranks = others[0] if len(others) == 1 else ()
                if not ranks and (call.group == "0" or call.title == "default_pg"):
                    ranks = tuple(range(self.world))
                group = found.get((call.group, ranks))
                if group is None:
                    group = found[call.group, ranks] = Group(call.group, call.title, ranks, bool(ranks) and self.told)
                group.streams.setdefault(rank, {}).setdefault(call.seq, []).append(call)
        for group in found.values():
            group.members = group.members or tuple(sorted(group.streams))
            group.exact = {rank for rank in group.members if self._exact(rank, group)}
        return list(found.values())

    def _exact(self, rank: int, group: Group) -> bool:
        dump = self.dumps.get(rank)
        if dump is None or dump.gaps:
            return False
        return rank in group.streams or dump.first == 0

    # ---- who stands where

    @cached_property
    def unfinished(self) -> dict[int, list[Call]]:
        """By rank the calls that have not ended, messages too, in order; ranks without one are left out."""
        found = {}
        for rank, dump in self.dumps.items():
            calls = [call for call in dump.calls if call.finished is False and not self._ended_elsewhere(rank, call)]
            # A message that was never marked as ended, with later ones that were, is an entry nobody looked after.
            done = max((message.number for message in dump.messages if message.finished), default=-1)
            calls += [message for message in dump.messages if message.finished is False and message.number > done]
            if calls:
                found[rank] = sorted(calls, key=lambda call: call.number)
        return found

    def _ended_elsewhere(self, rank: int, call: Call) -> bool:
        """Whether a later call of the group has ended on this rank.

        NCCL's end in order. gloo's need not, but one that all take part in shows that all had issued those before.
        """
        return any(
            other.finished
            and (other.backend != "gloo" or other.op in ALL_AT_ONCE)
            and other.group == call.group
            and other.number > call.number
            for other in self.dumps[rank].calls
        )

    @cached_property
    def standing(self) -> dict[int, Standing]:
        """By rank the call it stands in: of the first of each group the one for which somebody is lacking, if any.

        Later calls of a group count for nothing: the host runs ahead of the device, on each rank as far as it may.
        """
        found = {}
        for rank, calls in self.unfinished.items():
            firsts: dict[tuple[str, bool], Call] = {}
            for call in calls:
                firsts.setdefault((call.group, call.p2p), call)
            all_of_it = [self._standing(rank, call) for call in firsts.values()]
            found[rank] = next((s for s in all_of_it if s.on), None) or next(
                (s for s in all_of_it if s.unseen), all_of_it[0]
            )
        return found

    def _standing(self, rank: int, call: Call) -> Standing:
        group = self.group_of(rank, call)
        if group is None:
            return Standing(call, (), ())
        if call.p2p:
            peer = group.members[call.peer] if call.peer is not None and call.peer < len(group.members) else None
            if peer is None or not group.sure:
                return Standing(call, (), ())
            return Standing(call, (peer,), ()) if peer in self.dumps else Standing(call, (), (peer,))
        behind, unseen = group.lacking(call.seq)
        # A dump that was written before the others issued the call can't hold it.
        early = tuple(r for r in behind if self.clocks and self.dumps[r].taken < call.t)
        return Standing(call, tuple(r for r in behind if r not in early), unseen + early)

    def group_of(self, rank: int, call: Call) -> Group | None:
        same = [g for g in self.groups if g.name == call.group and rank in g.members]
        return same[0] if same else None

    @cached_property
    def clocks(self) -> bool:
        """Whether the files' times can be those of the dumps: none is older than what it holds."""
        return all(dump.taken >= dump.last_t for dump in self.dumps.values())

    def age(self, call: Call) -> int | None:
        """How long a call was under way when its dump was written (ns); None where the files' times don't tell."""
        return self.dumps[call.rank].taken - call.t if self.clocks and call.t else None

    # ---- differences

    def first_difference(self) -> Difference | None:
        """The earliest call of any group that is not the same on all ranks of which it is kept."""
        found = [difference for group in self.groups if (difference := differs(group, self.missing)) is not None]
        return min(found, key=lambda d: d.t, default=None)

    def first_swap(self) -> Difference | None:
        """Two calls of two groups, each of which stands on some rank because the other came first there."""
        for rank, calls in self.unfinished.items():
            for other in sorted(self.unfinished):
                if other == rank or calls[0].p2p or self.unfinished[other][0].p2p:
                    continue
                found = self._swap(calls[0], self.unfinished[other][0])
                if found is not None:
                    return found
        return None

    def _swap(self, x: Call, y: Call) -> Difference | None:
        first, second = self.group_of(x.rank, x), self.group_of(y.rank, y)
        if first is None or second is None or first is second:
            return None
        if x.rank not in second.members or y.rank not in first.members:
            return None
        orders: dict[int, Token] = {}
        for rank in sorted(set(first.members) & set(second.members) & set(self.dumps)):
            a, b = first.streams.get(rank, {}).get(x.seq), second.streams.get(rank, {}).get(y.seq)
            if a or b:
                ahead = a is not None and (b is None or a[0].number < b[0].number)
                orders[rank] = ("first" if ahead else "second",)
        if orders.get(x.rank) != ("first",) or orders.get(y.rank) != ("second",):
            return None
        calls = {
            r: (first.streams[r][x.seq] if o == ("first",) else second.streams[r][y.seq]) for r, o in orders.items()
        }
        merged = {
            rank: sorted(
                (c for c in self.dumps[rank].calls if c.group in (first.name, second.name)), key=lambda c: c.number
            )
            for rank in orders
        }
        habits = {rank: _habitual(merged[rank], calls[rank][0], with_group=True) for rank in orders}
        return _judge(orders, calls, habits, len(self.missing), order=True)


def token(calls: list[Call]) -> Token:
    """What must agree between the ranks of a group in one call (of a batch: in each of its parts)."""
    return tuple(agreed(call.op, call.dtypes, call.numel) for call in calls)


def differs(group: Group, missing: set[int]) -> Difference | None:
    """The first call of a group that is not the same on all of its ranks, or None."""
    shared = sorted(set().union(*group.streams.values())) if len(group.streams) > 1 else []
    oldest = {rank: min(stream) for rank, stream in group.streams.items()}
    unseen = len(missing & set(group.members))
    for seq in shared:
        # Of the oldest call kept, parts may have been overwritten.
        calls = {r: s[seq] for r, s in group.streams.items() if seq in s and (seq > oldest[r] or seq <= 1)}
        tokens = {rank: token(found) for rank, found in calls.items()}
        if len(set(tokens.values())) > 1:
            streams = {rank: [c[0] for _, c in sorted(group.streams[rank].items())] for rank in calls}
            habits = {rank: _habitual(streams[rank], calls[rank][0], with_group=False) for rank in calls}
            return _judge(tokens, calls, habits, unseen)
    return None


def _habitual(stream: list[Call], call: Call, *, with_group: bool) -> bool | None:
    """Whether a call follows the one before it as it always did; None where there is no habit yet."""

    def sign(one: Call) -> Hashable:
        return (one.group if with_group else "", token([one]))

    at = next((n for n, one in enumerate(stream) if one.number == call.number), 0)
    if at == 0:
        return None
    before = sign(stream[at - 1])
    followed = [sign(stream[n + 1]) for n in range(at - 1) if sign(stream[n]) == before]
    if len(followed) < 2 or len(set(followed)) > 1:
        return None
    return followed[0] == sign(call)


def _judge(
    tokens: dict[int, Token],
    calls: dict[int, list[Call]],
    habits: dict[int, bool | None],
    unseen: int,
    *,
    order: bool = False,
) -> Difference:
    """Who is at fault: the minority, also if those that are not seen sided with it; else who left its habit."""
    sides: dict[Token, list[int]] = {}
    for rank, what in tokens.items():
        sides.setdefault(what, []).append(rank)
    ordered = sorted(sides.values(), key=len, reverse=True)
    by = "unclear"
    culprits: tuple[int, ...] = ()
    if len(ordered[0]) * 2 > len(tokens) + unseen:
        by, culprits = "majority", tuple(rank for rank in sorted(tokens) if rank not in ordered[0])
    elif len(ordered) == 2 and not unseen:
        kept = [all(habits[rank] is True for rank in side) for side in ordered]
        left = [all(habits[rank] is False for rank in side) for side in ordered]
        for mine, other in ((0, 1), (1, 0)):
            if left[mine] and kept[other]:
                by, culprits = "habit", tuple(sorted(ordered[mine]))
    one = min(culprits) if culprits else ordered[-1][0]
    other_side = next(side for side in ordered if one not in side)
    ours, theirs = calls[one], calls[min(other_side)]
    at = 0
    if not order:
        alike = [token([a]) == token([b]) for a, b in zip(ours, theirs, strict=False)]
        at = alike.index(False) if False in alike else 0
    return Difference(
        culprits=culprits,
        sides=tuple(tuple(sorted(side)) for side in ordered),
        by=by,
        ours=ours[at],
        theirs=theirs[at],
        order=order,
        only_sizes=not order and (ours[at].op, ours[at].dtypes) == (theirs[at].op, theirs[at].dtypes),
        ended=all(call.finished for found in calls.values() for call in found),
    )
