"""Nothing moves: follow the waits to the rank at which they end."""

from typing import Any

from distdbg.analyze import circling, stuck
from distdbg.analyze.facts import Facts
from distdbg.analyze.failures import where_of
from distdbg.analyze.waits import roots


def find(facts: Facts) -> dict[str, Any] | None:
    """The verdict of kind `stalled` (or `unknown`, where the waits end at a rank without a shard), or None."""
    circle = circling.find(facts)
    if circle is not None:
        return _endless(facts, circle)
    timed_out = any(f.from_peer for f in facts.failures.values())
    if not facts.stalled and not timed_out and not _doubtful(facts):
        return None
    blocked = {rank: wait.on for rank, wait in facts.blocked.items()}
    ends, cycle = roots(blocked)
    standing = {r for r in ends if (r in facts.views and not facts.ends[r].over) or _terminated_late(facts, r)}
    standing -= set(blocked)
    unseen = ends & (facts.missing | set(facts.beside.dumps))
    if unseen:
        idle = {r for wait in facts.blocked.values() for r in facts.beside.idle(wait)}
        return _idle(facts, unseen) if unseen <= idle else _unseen(facts, unseen)
    if cycle:
        return _cycle(facts, cycle)
    if not standing and facts.beside.dumps:
        return _all_issued(facts)
    if not standing:
        standing = {r for r, end in facts.ends.items() if not end.over and r in facts.views and r not in blocked}
        # Who has issued a call that is not answered may wait in it, seen or not; who has issued none does not.
        standing = {r for r in standing if not facts.waits[r]} or standing
        if standing and facts.missing and all(_making_group(facts, r) for r in standing):
            return _unseen(facts, facts.missing)
        # The making of a group waits for those that are not at it yet.
        standing = {r for r in standing if not _making_group(facts, r)} or standing
    if not standing or (not facts.stalled and not blocked):
        return None
    if len(standing) > 1 and all(facts.views[rank].at_store(facts.views[rank].place.stack) for rank in standing):
        return _store(facts, standing)
    return _stalled(facts, standing)


def _endless(facts: Facts, circle: circling.Circle) -> dict[str, Any]:
    """A rank that moves and gets nowhere: `stalled` where it did the same a few times before, `unknown` else."""
    rank, view = circle.rank, facts.views[circle.rank]
    since = round((facts.now - circle.since) / 1e9, 1)
    doing = f"{circle.count} times {circle.phase}" + (f" of {circle.module}" if circle.module else "")
    moves = f"rank {rank} moves ({doing}) and has issued no collective for {since} s"
    waiting = [f"rank {r} waits in {w.text} for {facts.names(w.on)}" for r, w in sorted(facts.blocked.items())][:40]
    if circle.usual is None:
        return {
            "kind": "unknown",
            "cause": "the others wait for a rank that moves",
            "summary": f"{moves}; the others wait for it. Whether it would have come to an end can't be told",
            "victims": facts.victims({rank}),
            "evidence": waiting,
            "confidence": 0.4,
        }
    source = view.last_source or None
    entry = facts.culprit(
        rank, phase=circle.phase, module=circle.module or None, step=view.step, source=source, since_s=since
    )
    return {
        "kind": "stalled",
        "cause": f"goes round in {circle.phase} without end",
        "summary": f"{moves}, where {circle.usual} times was the most so far; the others wait for it",
        "culprits": [entry],
        "victims": facts.victims({rank}),
        "evidence": [moves, *waiting],
        "ruled_out": [
            "an evaluation that takes its time: between these collectives it, or a peer, did the same a few times"
        ],
        "confidence": 0.8,
    }


def _making_group(facts: Facts, rank: int) -> bool:
    stack = facts.views[rank].place.stack
    return bool(stack) and stack[-1].what == "setup"


def _store(facts: Facts, ranks: set[int]) -> dict[str, Any]:
    """Several ranks wait for keys of the store, and nobody is left who could set them."""
    sources = {rank: _standing(facts, rank)["source"] for rank in sorted(ranks)}
    return {
        "kind": "unknown",
        "cause": "all wait for keys of the store",
        "summary": f"{facts.names(ranks)} wait in the job's store for keys that nobody sets; which of them should have "
        "can't be told",
        "victims": facts.victims(set()),
        "evidence": [f"rank {rank} waits in the store" + (f" ({s})" if s else "") for rank, s in sources.items()],
        "confidence": 0.4,
    }


def _doubtful(facts: Facts) -> bool:
    return any(end.how == "terminated" for end in facts.ends.values()) and not facts.interrupted


def _terminated_late(facts: Facts, rank: int) -> bool:
    """Alive and silent until the launcher ended it because a peer had given up waiting."""
    return rank in facts.views and facts.ends[rank].how == "terminated"


def _stalled(facts: Facts, ranks: set[int]) -> dict[str, Any]:
    culprits = [_standing(facts, rank) for rank in sorted(ranks)]
    who = facts.names(ranks)
    entry = culprits[0]
    verb = "stand" if len(culprits) > 1 else "stands"
    summary = f"{who} {verb} still in {where_of(entry)} since {entry['since_s']} s, waiting for no rank"
    evidence = [text for c in culprits for text in (_seen(facts, c), *stuck.sentences(facts, c))]
    for other, wait in sorted(facts.blocked.items()):
        evidence.append(f"rank {other} waits in {wait.text} for {facts.names(wait.on)}")
    return {
        "kind": "stalled",
        "summary": summary,
        "cause": _cause(facts, entry),
        "culprits": culprits,
        "victims": facts.victims(set(ranks)),
        "evidence": evidence[:40],
        "ruled_out": [
            "an exception or a dead process: none came first",
            "a mismatch of collectives: the ranks issued the same calls until then",
        ],
        "confidence": 0.95 if facts.blocked else 0.7,
    }


def _standing(facts: Facts, rank: int) -> dict[str, Any]:
    view = facts.views[rank]
    begun = _circling(facts, rank)
    if begun:
        # It goes round and round: what has been open for most of that time, not where it was just now.
        stack = tuple(o for o in view.place.stack if (facts.now_of(rank) - o.t) * 2 > facts.now_of(rank) - begun)
        return facts.culprit(
            rank, step=view.step, since_s=round((facts.now_of(rank) - begun) / 1e9, 1), **facts.at(rank, stack)
        )
    fields = facts.at(rank, view.place.stack, view.place)
    main = main_thread(facts, rank)
    if main is not None and fields["phase"] == "loop" and main.get("in") in ("data", "checkpoint"):
        fields["phase"] = main["in"]
    source = (main or {}).get("source") or view.last_source
    if fields["phase"] != "backward" or main is not None:
        fields["source"] = source or fields.get("source")
    since = round((facts.now_of(rank) - view.last_t) / 1e9, 1)
    return facts.culprit(rank, step=view.step, since_s=since, **fields)


def _circling(facts: Facts, rank: int) -> int:
    """Since when (unix ns) a rank that still records events has been within one thing; 0 if it is silent."""
    view = facts.views[rank]
    if not view.place.stack or facts.now_of(rank) - view.last_t > 1_000_000_000:
        return 0
    begun = view.place.stack[0].t
    return begun if facts.now_of(rank) - begun > 2_000_000_000 else 0


def main_thread(facts: Facts, rank: int) -> dict[str, Any] | None:
    """The main thread's stack as the watchdog last wrote it, if it is newer than the rank's last event."""
    view = facts.views[rank]
    stacks = view.shard.stacks
    if not isinstance(stacks, dict) or int(stacks.get("t_unix_ns", 0)) < view.last_t:
        return None
    return next((t for t in stacks.get("threads", []) if isinstance(t, dict) and t.get("main")), None)


def _seen(facts: Facts, entry: dict[str, Any]) -> str:
    rank = entry["rank"]
    if _circling(facts, rank):
        return f"rank {rank}: events go on, but it has been in the same {entry['phase']} for {entry['since_s']} s"
    return f"rank {rank}: no event since {entry['since_s']} s{_state(facts, rank)}"


def _state(facts: Facts, rank: int) -> str:
    if facts.ends[rank].how == "stopped":
        return "; its process is stopped (SIGSTOP)"
    view = facts.views[rank]
    if facts.now_of(rank) - view.last_beat_t > 3_000_000_000:
        return "; not even its watchdog's thread runs: native code holds the interpreter, or the process is stopped"
    main = main_thread(facts, rank)
    if main and main.get("stack"):
        frame = main["stack"][-1]
        return f"; its main thread is in {frame[2]} ({frame[0]}:{frame[1]})"
    return ""


def _cause(facts: Facts, entry: dict[str, Any]) -> str:
    if facts.ends[entry["rank"]].how == "stopped":
        return "process stopped by SIGSTOP"
    if facts.now_of(entry["rank"]) - facts.views[entry["rank"]].last_beat_t > 3_000_000_000:
        return "native code holds the interpreter, or the process is stopped"
    return f"does not return from {entry['source']}" if entry["source"] else "does not move"


def _idle(facts: Facts, ranks: set[int]) -> dict[str, Any]:
    """No shard tells where they are, but their Flight Recorder dumps do what they had not issued."""
    waits = [wait for wait in facts.blocked.values() if set(wait.on) & ranks]
    first = min(waits, key=lambda wait: wait.item.t)
    who = facts.names(ranks)
    verb = "do" if len(ranks) > 1 else "does"
    fields = {"collective": first.item.op, "group": first.group_name or None}
    return {
        "kind": "stalled",
        "cause": f"did not issue {first.text}",
        "summary": f"{who} {verb} not move: had not issued {first.text}, and stood in no collective, as the Flight "
        "Recorder tells",
        "culprits": [facts.culprit(rank, **fields) for rank in sorted(ranks)],
        "victims": facts.victims(ranks),
        "evidence": [f"rank {r} waits in {w.text} for {facts.names(w.on)}" for r, w in sorted(facts.blocked.items())][
            :40
        ],
        "ruled_out": ["a mismatch of collectives: the calls in the dump are those of the others"],
        "confidence": 0.7 if len(ranks) == 1 else 0.6,
    }


def _all_issued(facts: Facts) -> dict[str, Any]:
    """With what a dump tells, no rank is lacking in any call; where it has no shard nobody knows what else it did."""
    who = facts.names(facts.beside.dumps)
    return {
        "kind": "unknown",
        "cause": "nothing moves, and no rank is lacking",
        "summary": "nothing moves, and no rank is lacking in the calls that are known; "
        f"what else {who} did the Flight Recorder does not tell",
        "victims": facts.victims(set()),
        "evidence": [],
        "confidence": 0.3,
    }


def _unseen(facts: Facts, unseen: set[int]) -> dict[str, Any]:
    who = facts.names(unseen)
    return {
        "kind": "unknown",
        "cause": "the waits end at a rank without a shard",
        "summary": f"the others wait for {who}, of which {_little(facts, unseen)}: look there",
        "victims": facts.victims(set()),
        "confidence": 0.4,
        "evidence": [f"rank {r} waits in {w.text} for {facts.names(w.on)}" for r, w in sorted(facts.blocked.items())][
            :40
        ],
    }


def _little(facts: Facts, unseen: set[int]) -> str:
    if not unseen & set(facts.beside.dumps):
        return "nothing was recorded"
    return "too little was recorded, its Flight Recorder dump included"


def _cycle(facts: Facts, cycle: list[int]) -> dict[str, Any]:
    chain = ", ".join(
        f"rank {r} waits in {facts.blocked[r].text} for {facts.names(facts.blocked[r].on)}" for r in cycle
    )
    return {
        "kind": "unknown",
        "cause": "a cycle of waits (deadlock)",
        "summary": f"a deadlock: {chain}",
        "victims": facts.victims(set()),
        "evidence": [chain],
        "confidence": 0.4,
        "ruled_out": ["one rank that stands still: each of them waits for another"],
    }
