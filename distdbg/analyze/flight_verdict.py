"""A verdict from dumps of the Flight Recorder alone, where there is no shard: less can be known, and less is said.

A dump tells which calls a rank issued, not where it is. So there are four answers: the ranks issued different calls
(`mismatch`), the waits end at a rank that lives and stands in no call (`stalled`), nothing is unfinished (`healthy`),
or `unknown`, with what is missing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distdbg import schema
from distdbg.analyze.flight import Call, Dump, read_all
from distdbg.analyze.flight_groups import ALL_AT_ONCE, Difference, Flight, Group, Standing
from distdbg.analyze.waits import names_of, roots
from distdbg.errors import DumpError

# A call that was under way for less than that when the dump was written is what a running job looks like, too.
YOUNG_NS = 1_000_000_000


def diagnose_files(files: Sequence[Path], problems: list[str]) -> dict[str, Any]:
    """The verdict over dumps' files. Raises DumpError where none of them can be read."""
    told = list(problems)
    dumps = read_all(files, told)
    if not dumps:
        raise DumpError("; ".join(told[:3]) or "no Flight Recorder dump was given")
    return diagnose(dumps, told)


def diagnose(dumps: dict[int, Dump], problems: list[str]) -> dict[str, Any]:
    """The verdict, as in verdict.json. ``problems``: what could not be read."""
    flight = Flight(dumps)
    found = _differing(flight) or _swapped(flight)
    if found is None:
        found = _waiting(flight) if flight.unfinished else _quiet(flight)
    told = [f"from Flight Recorder dumps of {names_of(dumps)} alone: no shard of distdbg was there"]
    if flight.missing:
        told.append(f"{names_of(flight.missing)}: no dump")
    confidence = float(found["confidence"]) * (0.8 if flight.missing and found["culprits"] else 1)
    return {
        "schema": schema.VERDICT_SCHEMA,
        "kind": found["kind"],
        "summary": found["summary"],
        "cause": found["cause"],
        "culprits": found["culprits"],
        "victims": found["victims"],
        "evidence": [*found["evidence"], *told, *problems],
        "ruled_out": found.get("ruled_out", []),
        "confidence": round(confidence, 2),
        "world_size": flight.world,
        "attempt": 0,
        "missing_ranks": sorted(flight.missing),
    }


def _unknown(cause: str, summary: str, evidence: list[str], victims: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kind": "unknown",
        "cause": cause,
        "summary": summary,
        "culprits": [],
        "victims": victims,
        "evidence": evidence,
        "confidence": 0.3,
    }


# ---- what is said of a rank, here and where a dump stands in for a shard


def entry_of(rank: int, call: Call | None, **fields: Any) -> dict[str, Any]:
    """A culprit's entry with every field of the contract: of a dump, the call and its line at most."""
    names = ("phase", "node", "module", "parameter", "step", "collective", "group", "error", "signal", "source",
             "since_s", "node_index", "node_count")  # fmt: skip
    entry: dict[str, Any] = {"rank": rank, "host": None, "pid": None, **dict.fromkeys(names)}
    if call is not None:
        entry.update(phase=call.phase or "collective", collective=call.op, group=call.title, source=call.source)
    entry.update(fields)
    return entry


def at(call: Call) -> str:
    """ "all_reduce #17 of default_pg (train.py:12)"."""
    return call.text + (f" ({call.source})" if call.source else "")


def last_of(dump: Dump, group: str) -> str:
    """What a rank last issued in a group, in words."""
    found = [call for call in dump.calls if call.group == group]
    if not found:
        return f"rank {dump.rank} issued no call of that group"
    ended = "which ended" if found[-1].finished else "which has not ended"
    return f"rank {dump.rank}: its last call of that group is {at(found[-1])}, {ended}"


def _victims(flight: Flight, culprits: set[int]) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "waits_for": sorted({*s.on, *s.unseen}) or sorted(culprits), "in": _in(s.call)}
        for rank, s in sorted(flight.standing.items())
        if rank not in culprits
    ]


def _in(call: Call) -> str:
    return call.text + (f", {call.signature}" if call.signature else "")


def _stands(rank: int, standing: Standing) -> str:
    call = standing.call
    timed_out = ", and was given up after its timeout" if call.timed_out else ""
    on = f"; {names_of(standing.on)} had not issued it" if standing.on else ""
    return f"rank {rank} issued {at(call)}, which had not ended{timed_out}{on}"


# ---- the answers


def _quiet(flight: Flight) -> dict[str, Any]:
    uneven = [
        group
        for group in flight.groups
        if len({group.issued(rank) for rank in group.members if rank in flight.dumps}) > 1
    ]
    counts = [
        f"{group.title}: " + ", ".join(f"rank {r} issued {group.issued(r)} calls" for r in sorted(group.streams)[:20])
        for group in uneven[:3]
    ]
    summary = f"no collective was unfinished on {names_of(flight.dumps)}"
    why = _not_healthy(flight, uneven)
    if why:
        return _unknown("no call is unfinished", f"{summary}; nobody is named: {why}", counts, [])
    notes = []
    difference = flight.first_difference()
    if difference is not None:
        notes.append(f"not the same on all ranks, but it ended: {_difference(difference)}")
    return {
        "kind": "healthy",
        "summary": f"nothing wrong in the dumps: {summary}",
        "cause": "",
        "culprits": [],
        "victims": [],
        "evidence": notes,
        "confidence": 0.6,
    }


def _not_healthy(flight: Flight, uneven: list[Group]) -> str:
    """Why dumps in which nothing is unfinished do not show that all is well; "" if they do."""
    dumps = flight.dumps.values()
    if flight.missing:
        return f"no dump of {names_of(flight.missing)}"
    if undecided := [dump.rank for dump in dumps if dump.calls and dump.calls[-1].finished is None]:
        return f"the dumps of {names_of(undecided)} do not say which calls ended"
    if empty := [dump.rank for dump in dumps if not dump.calls and not dump.messages]:
        return f"the dumps of {names_of(empty)} hold no call"
    if unheld := [dump.rank for dump in dumps if dump.messaging and "gloo" in dump.backends]:
        return f"{names_of(unheld)} sent or received messages, which gloo's dumps do not hold"
    return _uneven(flight, uneven[0]) if uneven else ""


def _uneven(flight: Flight, group: Group) -> str:
    most = max(group.issued(rank) for rank in group.members)
    fewer = [rank for rank in group.members if rank in flight.dumps and group.issued(rank) < most]
    call = next(calls[-1] for stream in group.streams.values() for seq, calls in stream.items() if seq == most)
    text = f"{names_of(fewer)} had not issued {at(call)}"
    if call.backend == "gloo":
        return text + ", which ended or failed on the others: gloo's dumps do not tell which"
    return text + ": an older dump, or a rank that went no further"


def _difference(found: Difference) -> str:
    sides = [f"{names_of(side)}" for side in found.sides]
    mine, theirs = (
        f"{at(call)}{' of ' + call.signature if call.signature else ''}" for call in (found.ours, found.theirs)
    )
    if found.culprits:
        words = "before it issued" if found.order else "where the others issued"
        return f"{names_of(found.culprits)} issued {mine} {words} {theirs}"
    words = "first, where others issued first" if found.order else "against"
    return f"{' against '.join(sides)}: {mine} {words} {theirs}"


def _differing(flight: Flight) -> dict[str, Any] | None:
    found = flight.first_difference()
    if found is None or not flight.unfinished or (found.ended and found.only_sizes):
        return None  # a size that the backend took as it was, and what stands now came later
    return parted(flight, found, _victims(flight, set(found.culprits)))


def _swapped(flight: Flight) -> dict[str, Any] | None:
    found = flight.first_swap()
    return None if found is None else parted(flight, found, _victims(flight, set(found.culprits)))


def parted(flight: Flight, found: Difference, victims: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdict over ranks that issued different calls."""
    told = _difference(found)
    evidence = [told, *(_stands(rank, s) for rank, s in sorted(flight.standing.items())[:20])]
    if not found.culprits:
        return _unknown(
            "the ranks issue different collectives",
            f"the ranks part in {found.theirs.text}, and which of them is at fault can't be told: {told}",
            evidence,
            victims,
        )
    if found.by == "majority":
        evidence.append(f"{names_of(found.sides[0])} agree with each other")
    else:
        evidence.append(f"{names_of(found.culprits)} left the order of calls that it kept before")
    where = f" at {found.ours.source}" if found.ours.source else ""
    return {
        "kind": "mismatch",
        "cause": told,
        "summary": f"{names_of(found.culprits)} parted from the others in {found.ours.text}{where}: {told}",
        "culprits": [entry_of(rank, found.ours) for rank in found.culprits],
        "victims": victims,
        "evidence": evidence,
        "ruled_out": ["a rank that only stands still: the calls themselves differ"],
        "confidence": (0.8 if found.by == "majority" else 0.6) - (0.2 if found.ended else 0),
    }


def _waiting(flight: Flight) -> dict[str, Any]:
    standing = flight.standing
    evidence = [_stands(rank, s) for rank, s in sorted(standing.items())[:20]]
    victims = _victims(flight, set())
    ages = [age for s in standing.values() if (age := flight.age(s.call)) is not None]
    if ages and max(ages) < YOUNG_NS and not any(s.call.timed_out for s in standing.values()):
        text = f"calls were under way, the longest for {max(ages) / 1e9:.2f} s: a job that runs looks like that, too"
        return _unknown("calls were under way", text, evidence, victims)
    blocked = {rank: (*s.on, *s.unseen) for rank, s in standing.items()}
    ends, cycle = roots(blocked)
    unseen = {rank for s in standing.values() for rank in s.unseen} - set(standing)
    if cycle:
        chain = ", ".join(f"rank {r} waits in {standing[r].call.text} for {names_of(blocked[r])}" for r in cycle)
        return _unknown("a cycle of waits (deadlock)", f"a deadlock: {chain}", evidence, victims)
    if unseen & ends:
        return _unseen(flight, unseen & ends, evidence, victims)
    lacking = ends - set(standing)
    if not lacking:
        calls = ", ".join(sorted({standing[rank].call.text for rank in ends & set(standing)})[:4])
        if not all(g.sure for s in standing.values() if (g := flight.group_of(s.call.rank, s.call)) is not None):
            text = f"every rank that left a dump issued {calls}; whether there are more ranks the dumps do not tell"
            return _unknown("the members of the group are not known", text, evidence, victims)
        text = f"all ranks issued {calls}, and it did not end: no rank is lacking, look at the network and the devices"
        return _unknown("a call that all ranks issued did not end", text, evidence, victims)
    return _lacking(flight, lacking, evidence)


def _unseen(flight: Flight, unseen: set[int], evidence: list[str], victims: list[dict[str, Any]]) -> dict[str, Any]:
    gone, old = unseen - set(flight.dumps), unseen & set(flight.dumps)
    parts = [f"{names_of(gone)} left no dump"] if gone else []
    parts += [f"the dump of {names_of(old)} is older than the others', or not whole"] if old else []
    text = f"the others wait for {names_of(unseen)}: {', '.join(parts)}; look there"
    return _unknown("the waits end at a rank of which too little is known", text, evidence, victims)


def _lacking(flight: Flight, lacking: set[int], evidence: list[str]) -> dict[str, Any]:
    waits = [s for s in flight.standing.values() if set(s.on) & lacking]
    call = min((s.call for s in waits), key=lambda call: call.t)
    group = flight.group_of(call.rank, call)
    members = len(group.members) if group is not None else 0
    issued = sum(1 for rank in group.members if group.issued(rank) >= call.seq) if group is not None else 0
    told = [last_of(flight.dumps[rank], call.group) for rank in sorted(lacking)[:10]]
    gloo = any("gloo" in flight.dumps[rank].backends for rank in lacking)
    doubt = ["a dump does not tell a rank that stands still from one that left the call out, or ended later"]
    unheld = gloo and any(flight.dumps[rank].messaging for rank in lacking)
    if unheld:
        doubt.append("gloo's dumps do not hold messages, of which there were some: it may stand in one")
    elif gloo:
        doubt.append("gloo's dumps hold no send and no recv, so a rank that stands in one looks idle")
    several = len(lacking) > 1 and (gloo or call.op not in ALL_AT_ONCE)  # who of them is needed, nobody knows
    # Half of a group and more: then it may be the others that issued one call too many.
    if unheld or several or (members > 2 and len(lacking & set(group.members if group else ())) * 2 >= members):
        text = f"{names_of(lacking)} had not issued {at(call)}, in which {issued} of {members} ranks stand"
        victims = _victims(flight, set())
        return _unknown("a call that some ranks issued and others did not", text, evidence + told + doubt, victims)
    confidence = 0.65 - 0.1 * gloo - 0.1 * (members == 2) - 0.1 * (len(lacking) > 1)
    verb = "are" if len(lacking) > 1 else "is"
    return {
        "kind": "stalled",
        "cause": f"did not issue {call.text}",
        "summary": f"{names_of(lacking)} {verb} the one{'s' * (len(lacking) > 1)} that the others wait for: "
        f"had not issued {at(call)}, and stood in no collective",
        "culprits": [entry_of(rank, None, collective=call.op, group=call.title) for rank in sorted(lacking)],
        "victims": _victims(flight, lacking),
        "evidence": told + evidence + doubt,
        "ruled_out": [
            "a mismatch of collectives: the calls that the ranks share are the same, as far as they are kept"
        ],
        "confidence": confidence,
    }
