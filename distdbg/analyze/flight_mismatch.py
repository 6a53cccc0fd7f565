"""A rank without a shard whose Flight Recorder dump shows that it issued other collectives than the others' shards."""

from typing import Any

from distdbg.analyze import flight_verdict
from distdbg.analyze.facts import Facts


def find(facts: Facts) -> dict[str, Any] | None:
    """A mismatch (or `unknown`, where it can't be told who is at fault) in which a dump takes part, or None."""
    if not facts.symptom or not facts.beside.dumps:
        return None
    if any(item.joining for view in facts.views.values() for item in view.items):
        return None  # within join() ranks differ by design, and a dump does not tell what is within
    found = facts.beside.all.first_difference()
    if found is None or not any(set(side) <= set(facts.beside.dumps) for side in found.sides):
        return None  # where the shards differ, other rules know more
    own = [f.t for f in facts.failures.values() if not f.from_peer]
    if own and found.t > min(own):
        return None
    verdict = flight_verdict.parted(facts.beside.all, found, facts.victims(set(found.culprits)))
    for entry in verdict["culprits"]:
        view = facts.views.get(entry["rank"])
        if view is not None:
            entry.update(host=view.shard.host, pid=view.shard.pid)
    return verdict
