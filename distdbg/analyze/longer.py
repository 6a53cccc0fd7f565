"""Stragglers in a run of which the last steps were read: told over as many steps as it takes, on fewer ranks.

That a rank is late shows in any window; that it is late for good, and from which step on, takes a longer look. This
reads more steps of those ranks that may be late and of some peers to compare them with.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from distdbg.analyze import straggler
from distdbg.analyze.facts import Facts
from distdbg.analyze.parting import roles
from distdbg.analyze.rank import RankView
from distdbg.analyze.read import read_run
from distdbg.analyze.straggler import MIN_TAIL, Late
from distdbg.analyze.window import BUDGET, Window

SUSPECTS = 16  # ranks that are looked at longer, at most
RANKS = 48  # these and their peers, at most
FEWEST = 4  # ranks, however many steps: a rank that is late and three that agree
EDGE = 1  # steps; what begins as near to the beginning of a look may have begun before


def find(facts: Facts) -> dict[str, Any] | None:
    """The verdict of kind `straggler`, or None."""
    if facts.symptom:
        return None
    window = facts.run.window
    late = straggler.late(facts)
    if window is None:
        return straggler.told(facts, late) if late else None
    look = window
    if not late:
        for look in _looks(facts, window):
            late = straggler.late(_look(facts, look))
            if late:
                break
        else:
            return None
    late, look = _to_its_beginning(facts, window, look, late)
    found = straggler.told(facts, late)
    if look.ranks is not None:
        ranks = facts.names(look.ranks & facts.views.keys())
        found["evidence"].append(f"for where it begins, steps from {look.step} on were read of {ranks}")
    return found


def _looks(facts: Facts, window: Window) -> Iterable[Window]:
    """Longer looks at those that may be late though the window does not show it."""
    steps = window.reached - window.step
    if steps < MIN_TAIL:
        yield _window(facts, window, straggler.suspects(facts, SUSPECTS), MIN_TAIL)
    alone = [ranks[0] for ranks in roles(facts.views) if len(ranks) == 1]
    if alone:  # such a rank is told by its habit, which may be long ago
        fits = int(2 * BUDGET / window.events_a_step() / min(len(alone), SUSPECTS))
        if fits > max(steps, MIN_TAIL):
            yield _window(facts, window, alone[:SUSPECTS], fits)


def _to_its_beginning(facts: Facts, window: Window, look: Window, late: list[Late]) -> tuple[list[Late], Window]:
    """Looks back, twice as far each time, until the step is seen from which on a rank is late."""
    while look.step > 0 and min(one.step for one in late) <= look.step + EDGE:
        farther = _window(facts, window, [one.rank for one in late], 2 * (window.reached - look.step))
        again = straggler.late(_look(facts, farther))
        if not again:
            break
        late, look = again, farther
    return late, look


def _window(facts: Facts, window: Window, ranks: list[int], steps: int) -> Window:
    """A longer look at some ranks, the first of them at least, and at as many peers of theirs as can be afforded."""
    count = max(FEWEST, min(RANKS, int(BUDGET / window.events_a_step() / steps)))
    chosen = ranks[: max(1, count // 2)]
    roles_ = [peers for peers in roles(facts.views) if len(peers) == 1 or set(peers) & set(chosen)]
    others = [rank for peers in roles_ for rank in peers if rank not in chosen]
    room = count - len(chosen)
    return window.longer(chosen + others[:: max(1, -(-len(others) // room))], steps)  # spread over the hosts


def _look(facts: Facts, window: Window) -> Facts:
    """The same facts with other views."""
    run = read_run(facts.run.path, window)
    facts.run.problems += [problem for problem in run.problems if problem not in facts.run.problems]
    same = {view.shard.folder: rank for rank, view in facts.views.items()}
    views = {same[s.folder]: RankView(s, facts.cut) for s in run.shards if s.folder in same}
    return replace(facts, run=run, views=dict(sorted(views.items())))
