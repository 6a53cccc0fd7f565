"""Flight Recorder dumps beside shards: in place of one that is missing or stopped, and held against the others.

A rank's dump is trusted as far as its calls line up with the other ranks' shards by group and number. They need not:
a shard counts from the start of its recording and counts each part of a coalesced batch, a dump does neither.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from distdbg.analyze import flight
from distdbg.analyze.flight import Call, Dump
from distdbg.analyze.flight_groups import Flight, Standing, token
from distdbg.analyze.rank import Item, RankView
from distdbg.analyze.read import Run
from distdbg.analyze.waits import Wait, names_of
from distdbg.schema import EventKind as K

# Dumps of ranks whose shards are whole are read only to be compared: not where there are very many.
MAX_COMPARED_BYTES = 32 << 20
MAX_SHIFT = 40
_ATTEMPT = re.compile(r"-attempt(\d+)-")


@dataclass
class Beside:
    """``dumps``: by rank, those in place of a shard. ``notes``: what they say; ``disputed``: what shards contradict."""

    views: dict[int, RankView]
    world: int
    dumps: dict[int, Dump] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    disputed: list[str] = field(default_factory=list)
    miscounted: bool = False  # a rank that has both counts its calls differently in them

    @cached_property
    def shadows(self) -> dict[int, Dump]:
        return {rank: shadow(view) for rank, view in self.views.items()}

    @cached_property
    def all(self) -> Flight:
        """The dumps and, in the shape of dumps, what the other ranks' shards hold."""
        found = {rank: dump for rank, dump in self.shadows.items() if rank not in self.dumps}
        scattered = {(c.group, c.seq) for dump in found.values() for c in dump.calls if c.op == "reduce_scatter"}
        return Flight({**found, **{rank: _as_shards(dump, scattered) for rank, dump in self.dumps.items()}}, self.world)

    def issued(self) -> dict[str, dict[int, int]]:
        """By name of a group and rank: the number of its last call, of ranks with a dump in place of a shard."""
        found: dict[str, dict[int, int]] = {}
        for group in self.all.groups if self.dumps else ():
            for rank in group.members:
                if rank in self.dumps:
                    found.setdefault(group.name, {})[rank] = group.issued(rank)
        return found

    @cached_property
    def standing(self) -> dict[int, Standing]:
        return {rank: s for rank, s in self.all.standing.items() if rank in self.dumps} if self.dumps else {}

    def waits(self) -> dict[int, Wait]:
        """The calls in which ranks with a dump in place of a shard stand, and for whom."""
        return {
            rank: Wait(rank, item_of(s.call), (*s.on, *s.unseen), s.call.title)
            for rank, s in self.standing.items()
            if s.on or s.unseen
        }

    def idle(self, wait: Wait) -> set[int]:
        """Of the ranks that a call waits for: those whose dump is known to lack it, and which stand in no other.

        gloo's dumps hold no messages: in a job that sends some, a rank may stand in one unseen.
        """
        if any(item.p2p for view in self.views.values() for item in view.items) and any(
            "gloo" in dump.backends for dump in self.dumps.values()
        ):
            return set()
        found = set()
        for group in self.all.groups:
            if wait.item.group.rpartition(":")[0] == group.name and wait.rank in group.members:
                behind, _ = group.lacking(wait.item.seq)
                found |= {r for r in behind if r in self.dumps and r not in self.standing}
        return {rank for rank in found if self.dumps[rank].taken >= wait.item.t or not self.all.clocks}


def beside(run: Run, attempt: int, views: dict[int, RankView], world: int) -> Beside:
    """The dumps that belong to an attempt of a run. What can't be read is added to ``run.problems``."""
    missing = set(range(world)) - set(views)
    needed = missing | {rank for rank, view in views.items() if silenced(view)}
    files = [*run.flight_recorder, *_own(run, attempt)]
    if sum(_size(file) for file in files) > MAX_COMPARED_BYTES:
        files = [file for file in files if flight.rank_of(file) in needed or file in run.flight_recorder]
    problems: list[str] = []
    found = flight.read_all(files, problems) if files else {}
    run.problems += [problem for problem in problems if problem not in run.problems]
    result = Beside(views, world)
    found = dict(sorted(found.items(), key=lambda pair: pair[0] in needed))  # those that have both tell how to count
    began = min((view.shard.anchor_unix_ns for view in views.values()), default=0)
    for rank, dump in found.items():
        if attempt > 0 and 0 < dump.last_t < began:
            run.problems.append(f"{dump.file} (rank {rank}) is of an earlier attempt; left out")
        elif rank in views and not (silenced(views[rank]) and dump.last_t > views[rank].last_t):
            _compare(result, views[rank], dump)
        elif rank >= world:
            run.problems.append(f"{dump.file} is of rank {rank}, and the run has {world} ranks; left out")
        else:
            _stand_in(result, rank, dump)
    return result


def silenced(view: RankView) -> bool:
    """Whether a shard is known to lack events: its recording stopped (a full disk), or could not keep up."""
    return bool(view.shard.meta.get("stopped")) or bool((view.records["kind"] == K.LOST).any())


def _own(run: Run, attempt: int) -> Iterable[Path]:
    for folder, files in flight.own_files(run.path).items():
        of = _ATTEMPT.search(folder.name)
        if folder == run.path or (of is not None and int(of.group(1)) == attempt):
            yield from files


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _stand_in(result: Beside, rank: int, dump: Dump) -> None:
    common, odd = 0, 0
    for other, mine in result.shadows.items():
        if other != rank:
            alike, unlike = _held_against(mine, dump)
            common, odd = common + alike + len(unlike), odd + len(unlike)
    what = "its shard is missing" if rank not in result.views else "its recording had stopped"
    if any(_went_on(view, dump) for view in result.views.values() if view.rank != rank):
        result.notes.append(f"rank {rank}: {what}, and the job went on after its Flight Recorder dump; it was not used")
        return
    shifted = any(counts_shifted(mine, dump) for other, mine in result.shadows.items() if other != rank)
    if result.miscounted or shifted or (common and odd * 2 > common):
        result.notes.append(
            f"rank {rank}: {what}, and the calls in its Flight Recorder dump do not line up with the others' shards; "
            f"{dump.file.name} was not used"
        )
        return
    result.dumps[rank] = dump
    last = dump.calls[-1] if dump.calls else None
    ended = {True: "which ended", False: "which had not ended", None: "of which is not told whether it ended"}
    said = (
        f"its last call is {last.text}{f' ({last.source})' if last.source else ''}, {ended[last.finished]}"
        if last
        else "it holds no call"
    )
    result.notes.append(f"rank {rank}: {what}; its Flight Recorder dump stands in for it: {said}")


def _went_on(view: RankView, dump: Dump) -> bool:
    """Whether a rank did more after a dump than it can have done while it waited for the dump's rank.

    A dump is left behind by a stall that recovered, too. Files' times may be those of a copy, so steps count as well.
    """
    called = max((item.t for item in view.items), default=0)
    if dump.taken >= dump.last_t and called > dump.taken + 1_000_000_000:
        return True
    steps = view.of_kind(K.STEP)
    return bool(dump.last_t) and int((steps["t"] + view.offset > dump.last_t).sum()) >= 2


def _compare(result: Beside, view: RankView, dump: Dump) -> None:
    mine = result.shadows[view.rank]
    alike, unlike = _held_against(mine, dump)
    if counts_shifted(mine, dump) or len(unlike) * 2 > alike + len(unlike):
        result.miscounted = True
        result.notes.append(f"rank {view.rank}: its Flight Recorder dump counts calls in another way than its shard")
        return
    for seen, told in unlike[:3]:
        result.disputed.append(
            f"rank {view.rank}: its shard has {seen.text} of {seen.signature or 'no tensor'} where its Flight Recorder "
            f"dump has {told.op} of {told.signature or 'no tensor'}"
        )
    last = {call.group: call.seq for call in mine.calls}
    more = [c for c in dump.calls if c.seq > last.get(c.group, 0) and c.t <= view.last_beat_t]
    if more and not silenced(view):
        result.disputed.append(
            f"rank {view.rank}: its Flight Recorder dump has {more[-1].text}, of which its shard knows nothing"
        )


def _as_shards(dump: Dump, scattered: set[tuple[str, int]]) -> Dump:
    """A dump with its reduce_scatters as shards have them: of no known size, and on gloo not shown as all_reduce."""
    calls = []
    for call in dump.calls:
        hidden = call.backend == "gloo" and call.op == "all_reduce" and (call.group, call.seq) in scattered
        if hidden or call.op == "reduce_scatter":
            call = replace(call, op="reduce_scatter", numel=None)
        calls.append(call)
    return replace(dump, calls=calls)


def _held_against(mine: Dump, dump: Dump) -> tuple[int, list[tuple[Call, Call]]]:
    """(number of calls that are the same in both, those that are not)."""
    told = {(call.group, call.seq): call for call in dump.calls}
    alike, unlike = 0, []
    for call in mine.calls:
        other = told.get((call.group, call.seq))
        if other is None or call.op == "reduce_scatter":  # gloo's dumps show it as another operation
            continue
        if token([call]) == token([other]):
            alike += 1
        else:
            unlike.append((call, other))
    return alike, unlike


def counts_shifted(mine: Dump, dump: Dump) -> bool:
    """Whether the calls of two ranks (or of one) lie much closer in time if one counts on from another number.

    Sizes and operations would not show it: most jobs repeat themselves.
    """
    theirs: dict[str, dict[int, int]] = {}
    for call in dump.calls:
        theirs.setdefault(call.group, {})[call.seq] = call.t
    ours: dict[str, dict[int, int]] = {}
    for call in mine.calls:
        ours.setdefault(call.group, {})[call.seq] = call.t
    for group, times in ours.items():
        told = theirs.get(group, {})
        apart = _apart(times, told, 0)
        if apart is None:
            continue
        others = [
            found for by in range(-MAX_SHIFT, MAX_SHIFT + 1) if by and (found := _apart(times, told, by)) is not None
        ]
        if others and min(others) * 4 < apart:
            return True
    return False


def _apart(times: dict[int, int], told: dict[int, int], by: int) -> float | None:
    """The mean distance in time of calls with the same number, one side counted on by ``by``; None of too few."""
    pairs = [abs(told[seq + by] - t) for seq, t in list(times.items())[-300:] if seq + by in told]
    return sum(pairs) / len(pairs) if len(pairs) >= 3 else None


# ---- shards in the shape of dumps, and the other way round


def shadow(view: RankView) -> Dump:
    """A shard's collectives as a dump has them; whether they ended is left to other rules."""
    names = {group.key: group.key.rpartition(":")[0] for group in view.groups.values()}
    dump = Dump(view.rank, view.shard.folder, view.last_beat_t)
    dump.members = {names[group.key]: group.ranks for group in view.groups.values() if group.ranks}
    for number, item in enumerate(view.items):
        if item.p2p or not item.group:
            continue
        dump.calls.append(
            Call(
                rank=view.rank,
                group=names[item.group],
                title=item.group_name,
                seq=item.seq,
                op=item.op,
                p2p=False,
                peer=None,
                numel=item.about.get("numel") if item.op != "reduce_scatter" else None,
                dtypes=tuple(item.about.get("dtypes", ())),
                signature=item.signature,
                finished=None,
                timed_out=False,
                t=item.t,
                number=number,
                backend="",
                phase=item.phase,
                source=item.source.partition(" by ")[0] or None,
            )
        )
    return dump


def item_of(call: Call) -> Item:
    """A dump's call as a shard has them. Its step is not known."""
    return Item(
        t=call.t,
        step=0,
        index=call.number,
        op=call.op,
        seq=call.seq,
        group=f"{call.group}:",
        group_name=call.title,
        signature=call.signature,
        about={"numel": call.numel, "dtypes": list(call.dtypes)},
        bytes=0,
        phase=call.phase or "collective",
        node=None,
        module="",
        issuer="script",
        source=call.source or "",
        joining=False,
        backward=-1,
    )


def agreement(result: Beside) -> list[str]:
    """What the evidence says of the dumps: who is stood in for, what is disputed."""
    if result.disputed:
        who = names_of({int(text.split()[1].rstrip(":")) for text in result.disputed})
        return [*result.notes, f"shard and Flight Recorder dump of {who} contradict each other", *result.disputed]
    return result.notes
