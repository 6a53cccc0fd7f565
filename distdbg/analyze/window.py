"""Which steps of a run a verdict reads: all of them, or of a large run the last ones of every rank.

Where the ranks are, how they ended and what they wait for is in their last steps. A window begins with the same step
on every rank, as if all older events had been dropped; that the ranks parted earlier is told by the digests of steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from distdbg import schema
from distdbg.analyze import read
from distdbg.analyze.layout import Layout

BUDGET = 4 << 20  # events: what is read and reasoned over in some seconds and half a gigabyte
MOST = 4 * BUDGET  # where a verdict needs more than the last steps
WHOLE_STEPS = 4  # that every rank has ended, at least: what is usual is told by equal steps


@dataclass(frozen=True)
class Window:
    """What is read of a run: the step with which each attempt begins (0: all of it), and of which ranks (None: all)."""

    layouts: dict[Path, Layout]  # by the shard's folder
    first: dict[int, int]  # by attempt
    ranks: frozenset[int] | None = None

    @property
    def step(self) -> int:
        """The first step that is read of the newest attempt."""
        return self.first[max(self.first)]

    def holds(self, folder: Path) -> bool:
        """Whether anything of a shard is read."""
        attempt, rank = read.attempt_and_rank(folder)
        return folder in self.layouts and (self.ranks is None or (attempt == max(self.first) and rank in self.ranks))

    def read(self, folder: Path) -> tuple[np.ndarray, int | None]:
        """The events of a shard from a step on, and that step; None where these are all it has. Raises OSError."""
        step = self.first[read.attempt_and_rank(folder)[0]]
        records, whole = self.layouts[folder].records(step)
        return records, None if whole else step

    def longer(self, ranks: Iterable[int], steps: int) -> "Window":
        """Of some ranks of the newest attempt the last steps, so many before the one that all have reached."""
        first = max(0, min(self.reached - steps, self.step))
        return Window(self.layouts, {max(self.first): first}, frozenset(ranks))

    def earlier(self, step: int) -> "Window | None":
        """Of all ranks the events from an earlier step on; None where these are too many."""
        begin = max(0, min(step, self.step))
        if sum(layout.count - layout.position(begin) for layout in self._newest()) > MOST:
            return None
        return replace(self, first={**self.first, max(self.first): begin})

    @property
    def reached(self) -> int:
        """The step that all ranks have begun."""
        return _reached(self._newest())

    def events_a_step(self) -> float:
        """How many events a rank writes in a step, about."""
        return max(median(layout.count / (layout.last_step + 1) for layout in self._newest()), 1.0)

    def _newest(self) -> list[Layout]:
        newest = max(self.first)
        return [layout for folder, layout in self.layouts.items() if read.attempt_and_rank(folder)[0] == newest]


def plan(run_dir: Path) -> Window | None:
    """The steps to read of a run; None where all of it is no more than BUDGET events, or no part will do."""
    layouts: dict[Path, Layout] = {}
    attempts: dict[int, list[Layout]] = {}
    for folder in read.folders(run_dir):
        about = read.json_file(folder / schema.META_FILE, []) or {}
        layouts[folder] = layout = Layout(folder)
        # Where values first were wrong may be in any step; and reading all says what is wrong with a shard.
        if about.get("numerics") or not layout.usable:
            return None
        attempts.setdefault(read.attempt_and_rank(folder)[0], []).append(layout)
    if sum(layout.count for layout in layouts.values()) <= BUDGET:
        return None
    first = {attempt: max(layout.last_step for layout in found) for attempt, found in attempts.items()}
    newest = max(attempts)
    first[newest] = _begin(attempts[newest], BUDGET)
    return Window(layouts, first) if first[newest] > 0 or len(attempts) > 1 else None


def _begin(layouts: list[Layout], budget: int) -> int:
    each = max(1, budget // len(layouts))
    fits = [layout.step_at(max(0, layout.count - each)) for layout in layouts]
    return max(0, min(int(median(fits)) + 1, _reached(layouts) - WHOLE_STEPS))


def _reached(layouts: list[Layout]) -> int:
    return min(layout.last_step for layout in layouts)
