"""Ranks that did different things: the verdict of kind `mismatch`, told as what went wrong first."""

from dataclasses import dataclass
from typing import Any

from distdbg.analyze.dropped import first_by_digest
from distdbg.analyze.facts import Facts
from distdbg.analyze.parting import (
    Parting,
    first_by_group,
    first_by_habit,
    first_by_role,
    first_difference,
    parts_only_in,
    signature,
)
from distdbg.analyze.rank import Item, Raised, RankView
from distdbg.analyze.waits import roots
from distdbg.schema import EventKind as K


def find(facts: Facts) -> dict[str, Any] | None:
    """A mismatch before the first visible failure, or None."""
    if not facts.symptom:
        return None
    views = facts.views
    partings = (first_by_digest(views), first_by_group(views, places=True), first_by_role(views, facts.ends))
    found = [p for p in partings if p is not None]
    parting = min(found, key=lambda p: (p.step, p.comparison != "role", p.t), default=None)
    if parting is None and _deadlocked(facts):
        parting = first_by_habit(facts.views)
    if parting is None or _too_late(facts, parting):
        return None
    if _unsure(facts, parting):
        parting.culprits, parting.by = (), "unclear"
    return _verdict(facts, parting)


def _unsure(facts: Facts, parting: Parting) -> bool:
    """Whether the ranks that are not seen could turn the majority, or a habit that others may have left, too."""
    if not facts.missing:
        return False
    sizes = [len(side) for side in parting.sides]
    return parting.by == "habit" or max(sizes) * 2 <= sum(sizes) + len(facts.missing)


def find_silent(facts: Facts) -> dict[str, Any] | None:
    """In a run that ended well: calls of one group that were paired crosswise, so that numbers are wrong."""
    if facts.symptom or facts.missing:
        return None
    parting = first_by_group(facts.views, places=True)
    if parting is None:
        parting = first_by_role(facts.views, facts.ends)
        if parting is None or not _swapped(facts, parting):
            return None
    elif not parting.culprits or _harmless(parting):
        return None
    return _verdict(facts, parting, silent=True)


def _swapped(facts: Facts, parting: Parting) -> bool:
    """The same calls as the peers', in another order over several groups, and only in that step.

    Each group then sees equal sequences, so nothing stops, and sums over one group go into the other too early.
    An order that a rank always has is its own business.
    """
    ours, theirs = parting.ours, parting.theirs
    if parting.by != "majority" or ours is None or theirs is None or ours.group_name == theirs.group_name:
        return False
    peer = next((r for side in parting.sides for r in side if r not in parting.culprits), None)
    return peer is not None and all(
        parts_only_in(facts.views[rank], facts.views[peer], parting.step) for rank in parting.culprits
    )


def _harmless(parting: Parting) -> bool:
    """Sizes that differ in a call whose backend took them as they were, and all ended well."""
    ours, theirs = parting.ours, parting.theirs
    if ours is None or theirs is None:
        return True
    if ours.issuer in ("DDP", "FSDP") and ours.op == theirs.op:
        return False  # what a wrapper exchanges must be the same on all ranks, whatever a transport lets pass
    if ours.source != theirs.source and signature(ours) == signature(theirs):
        return False  # the same call from another line, both of which all ranks use in pairs elsewhere
    return ours.op == theirs.op and ours.site == theirs.site and ours.about.get("dtypes") == theirs.about.get("dtypes")


def _deadlocked(facts: Facts) -> bool:
    """Every rank that lives waits for another that lives, or for a call that this one left out."""
    blocked = {rank: wait.on for rank, wait in facts.blocked.items()}
    if not blocked:
        return False
    ends, cycle = roots(blocked)
    if cycle:
        return True
    return any(facts.blocked[rank].item.p2p for rank in blocked) and all(
        end in facts.views and not _stands_in_own_code(facts, end) for end in ends
    )


def _stands_in_own_code(facts: Facts, rank: int) -> bool:
    return rank not in facts.blocked and not facts.ends[rank].over and rank not in facts.failures


def _too_late(facts: Facts, parting: Parting) -> bool:
    """Whether something failed on its own before the ranks parted."""
    own = {rank: f.t for rank, f in facts.failures.items() if not f.from_peer}
    own |= {r: e.t for r, e in facts.ends.items() if e.how == "crashed" and r not in facts.failures}
    departed = _departed(facts, parting)
    return any(departed - t > _margin(facts, rank, parting.culprits) for rank, t in own.items())


def _margin(facts: Facts, rank: int, others: tuple[int, ...]) -> int:
    """ns that a rank's clock and the others' may differ by, 0 where that is not known."""
    return max((facts.apart_ns(rank, other) or 0 for other in others), default=0)


def _departed(facts: Facts, parting: Parting) -> int:
    """When the culprit left the others: its other call, or the end of the step in which it left one out (unix ns)."""
    if parting.ours is not None and parting.culprits:
        return parting.ours.t
    ended = []
    for rank in parting.culprits:
        view = facts.views[rank]
        steps = view.of_kind(K.STEP)
        ended += [int(t) + view.offset for t in steps["t"][steps["step"] == parting.step]]
    return min(ended, default=parting.t)


# ---- where it began


@dataclass
class Origin:
    """The place at which a culprit left the others, more exactly than by the call that shows it."""

    step: int
    fields: dict[str, Any]
    sentence: str


def _verdict(facts: Facts, parting: Parting, *, silent: bool = False) -> dict[str, Any]:
    told = _told(parting)
    if not parting.culprits:
        sides = " against ".join(facts.names(side) for side in parting.sides)
        return {
            "kind": "unknown",
            "cause": "the ranks issue different collectives",
            "summary": f"{sides} part in step {parting.step}, and which of them is at fault can't be told: {told}",
            "victims": facts.victims(set()),
            "evidence": [told],
            "confidence": 0.4,
        }
    origins = {rank: _origin(facts, parting, rank) for rank in parting.culprits}
    culprits = [_entry(facts, parting, rank, origins[rank]) for rank in parting.culprits]
    entry, origin = culprits[0], origins[parting.culprits[0]]
    who = facts.names(parting.culprits)
    summary = f"{who} parted from the others in step {entry['step']}: {origin.sentence if origin else told}"
    evidence = [told] + [f"rank {rank}: {o.sentence}" for rank, o in origins.items() if o]
    evidence.append(_why(facts, parting))
    for other, wait in sorted(facts.blocked.items())[:20]:
        evidence.append(f"rank {other} waits in {wait.text} for {facts.names(wait.on)}")
    ruled = ["an error, a death or a stall that came first: what is seen of these came later"] if not silent else []
    return {
        "kind": "mismatch",
        "summary": summary,
        "cause": origin.sentence if origin else told,
        "culprits": culprits,
        "victims": facts.victims(set(parting.culprits)),
        "evidence": evidence,
        "ruled_out": ruled,
        "confidence": {"majority": 0.95, "habit": 0.85}.get(parting.by, 0.6) - (0.1 if silent else 0),
    }


def _told(parting: Parting) -> str:
    ours, theirs = parting.ours, parting.theirs
    if parting.comparison == "digest":
        return (
            "issued other collectives than the others; what exactly is not known, since its events are no longer kept"
            " or not read"
        )
    who = "the others issued" if parting.comparison != "habit" else "it issued before"
    mine = f"issued {_call(ours)}" if ours else "issued no call"
    other = _call(theirs) if theirs else "no call"
    return f"{mine} where {who} {other}"


def _call(item: Item | None) -> str:
    if item is None:
        return "no call"
    place = item.issuer if item.issuer in ("DDP", "join") else item.module
    where = f" in {item.phase}" + (f" of {place}" if place else "")
    what = f"{item.op}{f' of {item.signature}' if item.signature else ''} on {item.group_name}"
    return f"{what}{where}" + (f" ({item.source})" if item.source else "")


def _why(facts: Facts, parting: Parting) -> str:
    if parting.by == "majority":
        sides = sorted(parting.sides, key=len)
        return f"{facts.names(sides[-1])} agree with each other"
    return f"{facts.names(parting.culprits)} departed from earlier steps of its own"


def _entry(facts: Facts, parting: Parting, rank: int, origin: Origin | None) -> dict[str, Any]:
    item = _own_item(facts, parting, rank)
    if item is not None and _left_out(facts, parting, rank, item):
        item = None
    shown = item or parting.theirs
    fields: dict[str, Any] = {"phase": shown.phase if shown else "loop" if parting.comparison != "digest" else None}
    if item is not None:
        fields.update(node=item.node, module=item.module, source=item.source.partition(" by ")[0] or None)
        if item.issuer in ("DDP", "join"):
            fields.update(node=None, module=None)
    elif shown is not None:
        fields.update(node=None, module=None if shown.issuer in ("DDP", "join") else shown.module)
    if shown is not None:
        fields["collective"] = shown.op
        fields["group"] = next((g.name for g in facts.views[rank].groups.values() if g.key == shown.group), None)
    step = parting.step
    if origin is not None:
        fields.update(origin.fields)
        step = origin.step
    return facts.culprit(rank, step=step, **fields)


def _left_out(facts: Facts, parting: Parting, rank: int, item: Item) -> bool:
    """Whether the culprit left the others' call out: its own is what they issue next; theirs does not follow here."""
    theirs = parting.theirs
    peer = next((r for r, v in facts.views.items() if r not in parting.culprits and theirs in v.items), None)
    if theirs is None or peer is None:
        return False
    after_theirs = _following(facts.views[peer], theirs)
    after_ours = _following(facts.views[rank], item)
    swapped = after_ours is not None and _alike(after_ours, theirs)
    return after_theirs is not None and _alike(after_theirs, item) and not swapped


def _following(view: RankView, item: Item) -> Item | None:
    """What a rank issued next in that group; where it got no further, what it issued after such a call before."""
    calls = [i for i in view.items if i.group == item.group and i.p2p == item.p2p]
    position = next((n for n, i in enumerate(calls) if i.index == item.index), None)
    if position is None:
        return None
    if position + 1 < len(calls):
        return calls[position + 1]
    if item.phase != "collective" and item.issuer != "script":
        return None  # a forward without its backward is an evaluation more rather than a backward less
    earlier = [n for n in range(position - 1, -1, -1) if _alike(calls[n], item)]
    return calls[earlier[0] + 1] if earlier else None


def _alike(a: Item, b: Item) -> bool:
    return (signature(a), a.site) == (signature(b), b.site)


def _own_item(facts: Facts, parting: Parting, rank: int) -> Item | None:
    """The culprit's own call at the difference."""
    ours = parting.ours
    if ours is None or rank == parting.culprits[0]:
        return ours
    same = [i for i in facts.views[rank].items if i.step == ours.step and i.op == ours.op and i.site == ours.site]
    return same[0] if same else ours


def _origin(facts: Facts, parting: Parting, rank: int) -> Origin | None:
    if parting.comparison == "digest":
        return None
    others = [r for side in parting.sides for r in side if r not in parting.culprits and r in facts.views]
    peer = next((r for r in sorted(others) if facts.views[r].parameters == facts.views[rank].parameters), None)
    caught = _caught(facts, parting, rank, others)
    if caught is not None:
        return caught
    odd = _odd_step(facts, parting, rank, peer) if peer is not None else None
    if odd is not None:
        return odd
    if parting.comparison == "habit":
        return None
    if peer is not None:
        return _module_parting(facts, parting, rank, peer) or _gradient_parting(facts, parting, rank, peer)
    return None


def _caught(facts: Facts, parting: Parting, rank: int, others: list[int]) -> Origin | None:
    """An exception caught by the script that left this rank behind: a forward or backward that the others completed."""
    view = facts.views[rank]
    final = facts.failures.get(rank)
    for raised in view.raised:
        if raised.step > parting.step or (final is not None and raised.error == final.error):
            continue
        if any(_raised_alike(facts.views[other], raised, view) for other in others):
            continue  # the others handle the same in that step, and no call of theirs is missing
        usual = _usual_items(facts, raised, others)
        if not raised.opened or not usual or not _whole_model(facts, raised, view, others):
            continue
        place = facts.at(rank, raised.opened)
        text = view.text(raised.error)
        source = str(view.extra(raised.error).get("source") or "") or place.get("source")
        where = f" in module {place['module']}" if place.get("module") else ""
        where += f" ({source})" if source else ""
        sentence = (
            f"{text}, raised in {place['phase']}{where} and caught, left out the {usual[0].op} that the others issued"
        )
        fields = {
            "phase": place["phase"],
            "node": place["node"],
            "module": place["module"],
            "source": source,
            "error": text,
            "collective": usual[0].op,
        }
        return Origin(raised.step, fields, sentence)
    return None


def _raised_alike(other: RankView, raised: Raised, view: RankView) -> bool:
    text = view.text(raised.error)
    return any(r.step == raised.step and other.text(r.error) == text for r in other.raised)


def _usual_items(facts: Facts, raised: Raised, others: list[int]) -> list[Item]:
    """What the others issued in that step: in backward, else in forward, else in the loop."""
    for other in others:
        found = [i for i in facts.views[other].items if i.step == raised.step]
        for phase in ("backward", "forward"):
            inside = [i for i in found if i.phase == phase]
            if inside:
                return inside
        if found:
            return found
    return []


def _whole_model(facts: Facts, raised: Raised, view: RankView, others: list[int]) -> bool:
    """Whether what was broken off is what issues the collectives: the others' outermost module, or their backward."""
    outer = raised.opened[0]
    if outer.what == "backward":
        mine = _backwards(view, raised.step)
        theirs = [_backwards(facts.views[other], raised.step) for other in others]
        return any(len(mine) != len(found) for found in theirs) or outer.a * 2 > max(
            (max(f, default=0) for f in theirs), default=0
        )
    roots_of_others = {entered[0][0] for o in others if (entered := facts.views[o].entered.get(raised.step))}
    return outer.what != "forward" or view.text(outer.module) in roots_of_others


def _backwards(view: RankView, step: int) -> list[int]:
    """The number of nodes of each backward of a step."""
    found = view.of_kind(K.BACKWARD_BEGIN)
    return [int(nodes) for nodes in found["a"][found["step"] == step]]


def _odd_step(facts: Facts, parting: Parting, rank: int, peer: int) -> Origin | None:
    """The one earlier step in which this rank ran its model once more than the others: a batch it began and dropped.

    What broke it off left no trace of its own (an error between forward and backward, say).
    """
    view, other = facts.views[rank], facts.views[peer]
    first = max(view.first_step, other.first_step)
    odd = [s for s in range(first, parting.step) if _modules_differ(view, other, s)]
    if len(odd) != 1 or parting.comparison == "habit":
        return None
    step = odd[0]
    ours, theirs = ([name for name, _ in v.entered.get(step, [])] for v in (view, other))
    if len(ours) <= len(theirs) or ours[len(ours) - len(theirs) :] != theirs or not ours or ours[0] != theirs[0]:
        return None
    usual = [i for i in other.items if i.step == step]
    fields = {"phase": "loop", "node": None, "module": None, "source": None,
              "collective": usual[0].op if usual else None}  # fmt: skip
    return Origin(step, fields, "began a batch and dropped it after its forward, and so is one batch behind the others")


def _module_parting(facts: Facts, parting: Parting, rank: int, peer: int) -> Origin | None:
    """A module that this rank skipped, entered in addition, or in another order, in the step of the difference."""
    view, other = facts.views[rank], facts.views[peer]
    step = parting.step
    if step > max(view.first_step, other.first_step) and _modules_differ(view, other, step - 1):
        return None  # they differ in other steps too, and no collective minded
    ours, theirs = ([name for name, _ in v.entered.get(step, [])] for v in (view, other))
    limit = parting.ours
    if limit is not None and limit.phase == "forward":
        ours = [name for name, index in view.entered.get(step, []) if index <= limit.index]
    found = first_difference(
        ours,
        theirs,
        whole=view.steps_ended > step or parting.ours is None or (parting.ours.phase != "forward" and bool(ours)),
        theirs_whole=other.steps_ended > step,
    )
    if found is None or not ours:
        return None
    how, module = found
    words = {
        "skipped": f"skipped module {module}",
        "extra": f"entered module {module}, which the others did not",
        "order": f"entered module {module} in another order than the others",
    }
    number = next(
        (i for i, n in enumerate(other.names) if n is not None and n.category == "module" and n.text == module), 0
    )
    fields = {"phase": "forward", "node": None, "module": module, "source": other.extra(number).get("source")}
    if how == "skipped" and parting.theirs is not None:
        fields["collective"] = parting.theirs.op
    return Origin(step, fields, words[how])


def _modules_differ(a: RankView, b: RankView, step: int) -> bool:
    return [n for n, _ in a.entered.get(step, [])] != [n for n, _ in b.entered.get(step, [])]


def _gradient_parting(facts: Facts, parting: Parting, rank: int, peer: int) -> Origin | None:
    """A parameter that got a gradient on the others and none here, where DDP's call is missing."""
    item = parting.theirs or parting.ours
    if item is None or item.issuer != "DDP" or item.phase != "backward":
        return None
    if parting.ours is not None and parting.ours.issuer == "script":
        return None  # its own call is where it parted
    view, other = facts.views[rank], facts.views[peer]
    mine, theirs = _ready(view, parting.step), _ready(other, parting.step)
    lacking = [p for p in theirs if p not in mine]
    if not lacking or not mine or not (view.steps_ended > parting.step or parting.ours is not None):
        return None
    parameter = lacking[-1]
    module = parameter.rpartition(".")[0]
    fields = {"phase": "forward", "node": None, "module": module or None, "parameter": parameter}
    return Origin(
        parting.step, fields, f"parameter {parameter} got no gradient, as on the others, so its bucket never filled"
    )


def _ready(view: RankView, step: int) -> list[str]:
    """Parameters whose gradient became ready in a step, in order."""
    post = view.of_kind(K.POSTHOOK)
    post = post[(post["step"] == step) & ((post["b"] >> 32) > 0)]
    return [view.text(int(b) >> 32) for b in post["b"]]
