"""A rank's own exception, or a process that is gone: whichever came first and is not a peer's doing."""

from typing import Any

from distdbg.analyze import bundles
from distdbg.analyze.ends import End, Failure
from distdbg.analyze.facts import Facts
from distdbg.analyze.rank import Open

_SIGNALS = {
    "SIGSEGV": "a memory error in native code",
    "SIGABRT": "an abort in native code",
    "SIGBUS": "a bus error",
    "SIGKILL": "killed from outside, often by the kernel when memory runs out",
}


def find(facts: Facts) -> dict[str, Any] | None:
    """The verdict of kind `exception` or `died`, or None."""
    raised = {rank: f for rank, f in facts.failures.items() if not f.from_peer and not _outside(facts, rank)}
    first_raise = min(raised, key=lambda r: raised[r].t, default=None)
    gone = {rank: end for rank, end in facts.ends.items() if _gone(facts, rank)}
    first_gone = min(gone, key=lambda r: (gone[r].t, gone[r].order), default=None)
    if first_raise is None and first_gone is None:
        return None
    if first_raise is not None and (first_gone is None or raised[first_raise].t <= gone[first_gone].t):
        first, found = first_raise, _exception(facts, first_raise)
    else:
        assert first_gone is not None
        first, found = first_gone, _of_gone(facts, first_gone)
    return _with_others(facts, found, first, raised, gone)


def _of_gone(facts: Facts, rank: int) -> dict[str, Any]:
    end = facts.ends[rank]
    return _exited(facts, rank) if end.how == "left" and end.code else _died(facts, rank)


def _with_others(
    facts: Facts, found: dict[str, Any], first: int, raised: dict[int, Failure], gone: dict[int, End]
) -> dict[str, Any]:
    """The verdict with the ranks of other hosts that failed so soon after that the clocks do not tell who was first."""
    times = {rank: end.t for rank, end in gone.items()} | {rank: failure.t for rank, failure in raised.items()}
    named = {entry["rank"] for entry in found["culprits"]}
    apart = {rank: facts.apart_ns(first, rank) for rank in times if rank not in named}
    others = sorted(rank for rank, bound in apart.items() if bound is not None and times[rank] - times[first] < bound)
    if not others:
        unsure = sorted(rank for rank, bound in apart.items() if bound is None)
        if unsure:
            text = f"that rank {first} failed before {facts.names(unsure)} rests on clocks that were not compared"
            found = {**found, "evidence": [*found["evidence"], text], "confidence": min(0.7, found["confidence"])}
        return found
    entries = [_raising(facts, r) if r in raised else _of_gone(facts, r)["culprits"][0] for r in others]
    culprits = sorted([*found["culprits"], *entries], key=lambda entry: int(entry["rank"]))
    evidence = [text.replace(", before any other failed", "") for text in found["evidence"]]
    within = max(apart[rank] or 0 for rank in others) / 1e6
    evidence.append(
        f"rank {first} and {facts.names(others)} failed within {within:.3f} ms, which "
        "their hosts' clocks do not tell apart: who was first is not known"
    )
    return {
        **found,
        "summary": f"{found['summary']}; {facts.names(others)} failed at the same time as far as the clocks tell",
        "culprits": culprits,
        "victims": facts.victims({entry["rank"] for entry in culprits}),
        "evidence": evidence,
        "ruled_out": [text for text in found["ruled_out"] if "it ended first" not in text],
        "confidence": min(0.6, found["confidence"]),
    }


def _outside(facts: Facts, rank: int) -> bool:
    """An interrupt, or what a rank raises because somebody ended the run."""
    failure = facts.failures[rank]
    return failure.type in ("KeyboardInterrupt", "SystemExit") or (facts.cut is not None and failure.t > facts.cut)


def _gone(facts: Facts, rank: int) -> bool:
    end = facts.ends[rank]
    if rank in facts.failures:
        return False
    seen = rank in facts.views
    if end.how == "crashed":
        # An abort inside a collective may be the transport's answer to what another rank sent it.
        return not (end.signal == "SIGABRT" and facts.missing and (not seen or rank in facts.blocked))
    if end.how in ("vanished", "left") and end.code:
        return seen  # without its shard, an exit code does not tell an own failure from a peer's
    # Within a backward, say, no process ends on purpose with nothing wrong; between steps it may (os._exit at the end).
    amid = end.how == "vanished" and seen and bool(facts.views[rank].place.stack)
    return end.how in ("left", "vanished") and (amid or _needed(facts, rank))


def _needed(facts: Facts, rank: int) -> bool:
    """Whether some rank waits for this one, directly."""
    return any(rank in wait.on for other, wait in facts.blocked.items() if other != rank)


def _exception(facts: Facts, first: int) -> dict[str, Any]:
    ranks = [first, *(r for r in facts.failures if r != first and _alike(facts, first, r))]
    culprits = [_raising(facts, rank) for rank in sorted(ranks)]
    entry = next(c for c in culprits if c["rank"] == first)
    failure = facts.failures[first]
    who = facts.names(ranks)
    summary = f"{who} failed in {where_of(entry)}: {failure.title}"
    evidence = [f"rank {first} raised {failure.type} at {failure.source or failure.where}, before any other failed"]
    if entry["node"]:
        evidence.append(f"node {entry['node']} was entered on rank {first} and not left")
        evidence += bundles.sentences(facts, first, entry)
    later = [r for r, f in facts.failures.items() if f.from_peer]
    ruled = ["a mismatch of collectives: the ranks issued the same calls until then"] if len(facts.views) > 1 else []
    if later:
        ruled.append(f"{facts.names(later)}: the errors there tell of a peer that is gone")
    return {
        "kind": "exception",
        "summary": summary,
        "cause": failure.title,
        "culprits": culprits,
        "victims": facts.victims(set(ranks)),
        "evidence": evidence,
        "ruled_out": ruled,
        "confidence": 0.99,
    }


def _exited(facts: Facts, rank: int) -> dict[str, Any]:
    """sys.exit with an exit code that says something went wrong: a SystemExit ended the rank."""
    end, view = facts.ends[rank], facts.views[rank]
    error = f"SystemExit: {end.code}"
    fields = facts.at(rank, view.place.stack, view.place)
    fields["source"] = fields.get("source") or view.last_source or None
    entry = facts.culprit(rank, step=view.step, error=error, **fields)
    return {
        "kind": "exception",
        "summary": f"rank {rank} left in {where_of(entry)} with exit code {end.code} (sys.exit)",
        "cause": error,
        "culprits": [entry],
        "victims": facts.victims({rank}),
        "confidence": 0.95,
        "evidence": [f"rank {rank} came to its end by sys.exit with exit code {end.code}, before any other failed"],
        "ruled_out": ["an exception of another kind: none left its script"],
    }


def _alike(facts: Facts, first: int, other: int) -> bool:
    """Whether another rank raised the same of its own: the same error at the same place in the same step."""
    a, b = facts.failures[first], facts.failures[other]
    if b.from_peer or a.type != b.type or a.source != b.source or a.where != b.where or _outside(facts, other):
        return False
    return facts.views[first].step == facts.views[other].step


def _raising(facts: Facts, rank: int) -> dict[str, Any]:
    view, failure = facts.views[rank], facts.failures[rank]
    raised = facts.raised_of(rank)
    step = raised.step if raised else view.step
    fields: dict[str, Any]
    if failure.origin == "data":
        fields = {"phase": "data"}
    elif raised is not None:
        fields = facts.at(rank, raised.opened, _place_at(facts, rank, raised.opened))
    else:
        fields = facts.at(rank, view.place.stack, view.place)
        if failure.origin in ("optimizer", "checkpoint", "collective") and fields["phase"] == "loop":
            fields["phase"] = failure.origin
    fields["source"] = failure.source or fields.get("source")
    return facts.culprit(rank, step=step, error=failure.title, **fields)


def _place_at(facts: Facts, rank: int, stack: tuple[Open, ...]) -> Any:
    """Where in an open backward an exception arose that left no node open: after which node."""
    from distdbg.analyze.rank import Place
    from distdbg.schema import EventKind as K

    view = facts.views[rank]
    backward = next((o for o in reversed(stack) if o.what == "backward"), None)
    if backward is None or stack[-1].what == "node":
        return None
    post = view.of_kind(K.POSTHOOK)
    post = post[(post["a"] & 0xFFFFFFFF) == backward.seq]
    finals = view.of_kind(K.BACKWARD_FINAL)
    place = Place("backward", stack, finalizing=bool((finals["seq"] == backward.seq).any()))
    if len(post):
        last = post[-1]
        place.last_node = Open(
            "node",
            int(last["name"]),
            int(last["module"]),
            int(last["seq"]),
            int(last["a"]),
            int(last["b"]),
            int(last["t"]) + view.offset,
            int(last["step"]),
        )
    return place


def _died(facts: Facts, rank: int) -> dict[str, Any]:
    end, view = facts.ends[rank], facts.views.get(rank)
    waiting = [wait for other, wait in facts.blocked.items() if other != rank and rank in wait.on]
    fields: dict[str, Any] = {"phase": None}
    step = view.step if view else None
    if view is not None:
        fields = facts.at(rank, view.place.stack, view.place)
        if end.how == "left":
            fields.update(phase="exit", node=None, module=None)
        fields["source"] = fields.get("source") or view.last_source or None
    if waiting and end.how == "left":
        fields["collective"], fields["group"] = waiting[0].item.op, waiting[0].group_name or None
    way = _way(facts, rank)
    entry = facts.culprit(rank, step=step, signal=end.signal, **fields)
    summary = f"rank {rank} {way}" + (f" in {where_of(entry)}" if view is not None and end.how != "left" else "")
    if end.how == "left":
        summary += f" in step {step}, while others still needed it" if waiting else f" in step {step}"
    evidence = [f"rank {rank} {way}"]
    if entry["node"]:
        evidence.append(f"node {entry['node']} was entered on rank {rank} and not left")
    if view is None:
        evidence.append(f"the shard of rank {rank} is missing, so its place is unknown")
    return {
        "kind": "died",
        "summary": summary,
        "cause": way,
        "culprits": [entry],
        "victims": facts.victims({rank}),
        "evidence": evidence,
        "confidence": 0.97 if view is not None else 0.7,
        "ruled_out": ["an exception of its own: none left its script", "an end by the launcher: it ended first"],
    }


def _way(facts: Facts, rank: int) -> str:
    end = facts.ends[rank]
    if end.signal:
        meaning = _SIGNALS.get(end.signal)
        return f"was ended by {end.signal}" + (f" ({meaning})" if meaning else "")
    if end.how == "left":
        return f"came to the end of its script with exit code {end.code or 0}"
    if end.code is None:
        return "is gone without a trace of an end"
    return f"ended with exit code {end.code} without leaving its script (os._exit)"


def ordinal(number: int) -> str:
    """ "1st", "12th", "23rd"."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def where_of(entry: dict[str, Any]) -> str:
    parts = []
    if entry["node"]:
        place = f", {ordinal(entry['node_index'] + 1)} of {entry['node_count']}" if entry["node_count"] else ""
        parts.append(f"node {entry['node']}{place}")
    if entry["module"]:
        parts.append(f"module {entry['module']}")
    phase = {"loop": "the script's own code", "data": "loading data"}.get(entry["phase"] or "", entry["phase"])
    text = f"{phase} of step {entry['step']}" if phase else f"step {entry['step']}"
    return f"{text} ({', '.join(parts)})" if parts else text
