"""When silence is a stall: the policy alone, without clocks or files, so that it can be tested.

A rank makes progress when it records an event. The job stalls when no rank that is still there makes any
for the timeout: as long as one moves, the others may well wait for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

FIRST_STEP_S = 600.0  # before the first step has ended: compiling, loading, warming up
FLOOR_S = 20.0
CEILING_S = 600.0
ALIVE_FACTOR = 3.0  # how much longer silence may last where a process visibly works


@dataclass
class RankPace:
    """What the monitor knows of one rank. Times are seconds of the caller's clock."""

    last_progress: float
    step: int = -1  # steps ended
    step_t: float = 0.0
    phase: str = "loop"
    called: bool = False  # stands in a collective, a wait or the making of a group
    counts: tuple[int, int] = (0, 0)  # collectives issued, steps ended
    counts_t: float = 0.0  # when these last changed
    busy: bool = False  # uses a core, or reads and writes a lot
    exited: bool = False


@dataclass
class Pace:
    """Decides whether a job stalls. ``timeout``: seconds, or None to derive it from the job's own pace."""

    timeout: float | None = None
    longest_silence: float = 0.0
    longest_step: float = 0.0
    steps_seen: int = 0
    _last_seen: dict[int, float] = field(default_factory=dict)

    def saw_progress(self, rank: int, before: float, now: float) -> None:
        """A rank recorded an event after some silence."""
        if self.steps_seen:
            self.longest_silence = max(self.longest_silence, now - before)

    def saw_step(self, seconds: float) -> None:
        self.steps_seen += 1
        if self.steps_seen > 1:
            self.longest_step = max(self.longest_step, seconds)

    def limit(self, ranks: Mapping[int, RankPace]) -> float:
        """Seconds of silence on all ranks that are a stall now."""
        if self.timeout is not None:
            return self.timeout
        if any(pace.step < 1 for pace in ranks.values() if not pace.exited):
            return FIRST_STEP_S
        return min(CEILING_S, max(FLOOR_S, 10 * self.longest_silence, 5 * self.longest_step))

    def stalled(self, ranks: Mapping[int, RankPace], now: float) -> float | None:
        """Seconds of silence if the job stalls, else None."""
        there = [pace for pace in ranks.values() if not pace.exited]
        if not there:
            return None
        silence = now - max(pace.last_progress for pace in there)
        limit = self.limit(ranks)
        if silence < limit:
            return None
        if silence < limit * ALIVE_FACTOR and (_works(there) or _idle_alike(there, len(there) < len(ranks))):
            return None
        return silence

    def circling(self, ranks: Mapping[int, RankPace], now: float) -> int | None:
        """The key of the one rank that moves while all others are silent, and has long issued no collective itself.

        It may be about an evaluation of its own: whether it gets anywhere is the analysis' to tell.
        """
        there = {key: pace for key, pace in ranks.items() if not pace.exited}
        limit = self.limit(ranks) * ALIVE_FACTOR
        moving = [key for key, pace in there.items() if now - pace.last_progress < limit]
        if len(moving) != 1 or len(there) < 2 or len(there) < len(ranks) or there[moving[0]].called:
            return None
        return moving[0] if now - there[moving[0]].counts_t >= limit else None


def _works(there: list[RankPace]) -> bool:
    """A rank that saves, loads or runs the script's own code, and visibly does, or its first step: not yet a stall."""
    quiet = ("checkpoint", "data", "loop")
    return any(pace.busy and not pace.called and (pace.phase in quiet or pace.step < 1) for pace in there)


def _idle_alike(there: list[RankPace], some_left: bool) -> bool:
    """All ranks in the script's own code (or all loading, or all saving) after the same calls: nobody waits."""
    if some_left or len(there) < 2:
        return False
    free = all(pace.phase in ("loop", "data", "checkpoint") and not pace.called for pace in there)
    return free and len({(pace.phase, pace.counts) for pace in there}) == 1
