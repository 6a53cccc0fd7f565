"""One timeline for the shards of several hosts: how far each host's clock is from the reference, and how surely.

What is known of a clock are intervals: at a moment its offset from the reference was between two numbers. Each
exchange over the job's store gives one, and so does each collective in which every rank waits for all others: none
leaves it before the last has come. Clocks part slowly and evenly, so each interval narrows its neighbours.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from distdbg import schema
from distdbg.analyze.ordering import Ordered, between, ordered_of
from distdbg.analyze.read import Shard, ShardStream

DRIFT = 500e-6  # two clocks part by no more than this: what a kernel slews a clock by, a crystal errs by a tenth
WANDER = 10e-6  # how much that rate itself changes, where the measurements do not show more
WINDOWS = 200  # of the run, from each of which one collective is taken
MAX_LINES = 100_000

Piece = Shard | ShardStream


@dataclass(frozen=True)
class Line:
    """The offset of a clock from the reference: within ``low`` and ``high`` around a slope, at the moments ``x``.

    ``x`` is in ns from ``t``; ``low`` and ``high`` in ns from ``offset + rate * x``. In between they widen by
    ``wander`` (ns a ns). A line with no points is that of the reference itself.
    """

    t: int = 0
    offset: int = 0
    rate: float = 0.0
    wander: float = 0.0
    x: np.ndarray = field(default_factory=lambda: np.zeros(0))
    low: np.ndarray = field(default_factory=lambda: np.zeros(0))
    high: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def to_reference(self, t: np.ndarray) -> np.ndarray:
        """The reference's time (ns) at moments of this clock (ns)."""
        if not len(self.x):
            return t
        x = (t - self.t).astype(np.float64)
        shift = np.rint(self.rate * x + np.interp(x, self.x, (self.low + self.high) / 2)).astype(np.int64)
        result: np.ndarray = t + self.offset + shift
        return result

    def error(self, t: np.ndarray) -> np.ndarray:
        """By how much ``to_reference`` may be wrong, ns."""
        if not len(self.x):
            return np.zeros(len(t))
        x = (t - self.t).astype(np.float64)
        middle = np.interp(x, self.x, (self.low + self.high) / 2)
        after = np.searchsorted(self.x, x)
        left, right = np.maximum(after - 1, 0), np.minimum(after, len(self.x) - 1)
        since, until = np.abs(x - self.x[left]) * self.wander, np.abs(self.x[right] - x) * self.wander
        high = np.minimum(self.high[left] + since, self.high[right] + until)
        low = np.maximum(self.low[left] - since, self.low[right] - until)
        found: np.ndarray = np.maximum(high - middle, middle - low)
        return found


@dataclass(frozen=True)
class Intervals:
    """At ``t`` (ns, own clock) the reference's clock was between ``t + low`` and ``t + high``."""

    t: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]]) -> "Intervals":
        values = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return cls(values[:, 0], values[:, 1], values[:, 2])

    def at(self, rows: np.ndarray) -> "Intervals":
        return Intervals(self.t[rows], self.low[rows], self.high[rows])

    def joined(self, other: "Intervals") -> "Intervals":
        pairs = ((self.t, other.t), (self.low, other.low), (self.high, other.high))
        return Intervals(*(np.concatenate(pair) for pair in pairs))


def fit(known: Intervals) -> Line | None:
    """The line through intervals; None where there are none, or where no clock can keep them all."""
    if not len(known.t):
        return None
    order = np.argsort(known.t, kind="stable")
    t, low, high = known.t[order], known.low[order], known.high[order]
    start, offset = int(t[0]), int(low[0] // 2 + high[0] // 2)
    x, down, up = (values.astype(np.float64) for values in (t - start, low - offset, high - offset))
    rate, unsure = _rate(x, (down + up) / 2, (up - down) / 2)
    down, up = down - rate * x, up - rate * x
    wander = min(DRIFT, unsure + WANDER)
    while True:
        narrow_down, narrow_up = _narrowed(x, down, up, wander)
        if np.all(narrow_down <= narrow_up + 1):
            return Line(start, offset, rate, wander, x, narrow_down, np.maximum(narrow_up, narrow_down))
        if wander >= 2 * DRIFT:
            return None
        wander *= 2


def _rate(x: np.ndarray, middle: np.ndarray, half: np.ndarray) -> tuple[float, float]:
    """(rate, how unsure it is) by the two intervals that tell it best."""
    # Some of the narrowest are enough; all pairs of hundreds would be many.
    chosen = np.sort(np.argsort(half, kind="stable")[:64])
    apart = x[chosen][None, :] - x[chosen][:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        unsure = np.where(apart > 0, (half[chosen][None, :] + half[chosen][:, None] + 1) / apart, np.inf)
    i, j = np.unravel_index(int(np.argmin(unsure)), unsure.shape)
    if not unsure[i, j] < DRIFT:
        return 0.0, DRIFT
    first, last = chosen[i], chosen[j]
    return float((middle[last] - middle[first]) / (x[last] - x[first])), float(unsure[i, j])


def _narrowed(x: np.ndarray, low: np.ndarray, high: np.ndarray, wander: float) -> tuple[np.ndarray, np.ndarray]:
    """Every interval narrowed by what all others leave open at its moment."""
    w = wander * x
    forward = np.maximum.accumulate(low + w) - w
    backward = np.maximum.accumulate((low - w)[::-1])[::-1] + w
    lower = np.maximum(forward, backward)
    forward = np.minimum.accumulate(high - w) + w
    backward = np.minimum.accumulate((high + w)[::-1])[::-1] - w
    return lower, np.minimum(forward, backward)


def _moments(begin: int, end: int) -> np.ndarray:
    """The ends of a time and enough in between to find where an error is largest."""
    return np.linspace(begin, end, 500).astype(np.int64)


# ---- what is known


def exchanges_of(folder: Path) -> list[tuple[int, int, int, int]]:
    """(own ns, offset ns, error ns, reference rank) of each exchange of a shard; what is no such line is left out."""
    try:
        lines = (folder / schema.CLOCK_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines[-MAX_LINES:]:
        try:
            t, offset, error, rank = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue  # the last may be torn
        whole = all(type(number) is int and abs(number) < 1 << 62 for number in (t, offset, error, rank))
        if whole and error >= 0:
            found.append((t, offset, error, rank))
    return found


@dataclass
class Clocks:
    """All clocks of a run, by the id in meta.json. One without a line is only known by its host's wall time."""

    reference: str = ""
    unix_ns: int = 0  # to add to the reference's time for unix time
    lines: dict[str, Line] = field(default_factory=dict)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)  # the time recorded by it, where there are several
    wall: dict[str, int] = field(default_factory=dict)  # of a clock without a line: to add to its time for unix time
    exchanges: int = 0
    collectives: int = 0
    broken: dict[str, int] = field(default_factory=dict)  # collectives that contradict a clock's line

    def to_unix(self, clock: str, t: np.ndarray) -> np.ndarray:
        """Unix time (ns) on the one timeline at moments of a clock (ns)."""
        line = self.lines.get(clock)
        result: np.ndarray = t + self.wall[clock] if line is None else line.to_reference(t) + self.unix_ns
        return result

    def drifts(self, clock: str) -> bool:
        """Whether a clock's times need more than one number to be added."""
        return clock in self.lines and len(self.lines[clock].x) > 0

    def moment(self, clock: str, t: int) -> int:
        """``to_unix`` of one moment."""
        return int(self.to_unix(clock, np.array([t], dtype=np.int64))[0])

    def error_ns(self, clock: str) -> int | None:
        """The largest error in the time that was recorded by a clock; None where no bound is known."""
        line = self.lines.get(clock)
        if line is None or clock in self.broken:
            return None
        return int(np.ceil(line.error(_moments(*self.spans[clock])).max())) if clock in self.spans else 0

    @property
    def sentence(self) -> str:
        """How well the times of different hosts compare, for a person; "" where there is one clock."""
        if len(self.wall) < 2:
            return ""
        if self.broken:
            return (
                f"{sum(self.broken.values())} of {self.collectives} collectives contradict the clocks that "
                f"{self.exchanges} exchanges gave: times of different hosts may be off by an unknown amount"
            )
        errors = [self.error_ns(clock) for clock in self.wall]
        known = sorted(error for error in errors if error is not None)
        if len(known) < len(errors):
            return (
                f"{len(errors) - len(known)} of {len(errors)} hosts' clocks were never compared with the others': "
                "their times are by their own wall clocks, and off by an unknown amount"
            )
        by = [f"{self.exchanges} exchange{'s' if self.exchanges > 1 else ''}"] if self.exchanges else []
        by += [f"the order of {self.collectives} collectives"] if self.collectives else []
        within = f"{sum(known[-2:]) / 1e6:.3f} ms"
        return f"times of different hosts ({len(errors)}) are comparable to within {within} (by {' and '.join(by)})"


def clocks_of(pieces: Sequence[Piece]) -> Clocks:
    """The clocks of shards that tell which clock they were written by."""
    known = [piece for piece in pieces if piece.clock]
    if not known:
        return Clocks()
    newest = max(piece.attempt for piece in known)
    first = min((p for p in known if p.attempt == newest), key=lambda p: (p.rank, p.anchor_unix_ns))
    clocks = Clocks(first.clock, first.anchor_unix_ns - first.anchor_mono_ns, {first.clock: Line()})
    clocks.wall = {p.clock: p.anchor_unix_ns - p.anchor_mono_ns for p in reversed(known)}
    names = list(dict.fromkeys(piece.clock for piece in known))
    if len(names) > 1:
        _solve(clocks, names, known)
    return clocks


def _solve(clocks: Clocks, names: list[str], pieces: Sequence[Piece]) -> None:
    """Give every clock a line that exchanges or collectives lead to, from the reference outwards."""
    exchanged = _exchanged(pieces)
    numbers: dict[str, int] = {}
    ordered = {name: ordered_of((p for p in pieces if p.clock == name), numbers) for name in names}
    clocks.spans = {name: found.span for name, found in ordered.items()}
    open_names = [name for name in names if name != clocks.reference]
    settled = [clocks.reference]
    while settled and open_names:
        via = settled.pop(0)
        for name in list(open_names):
            if _settle(clocks, name, via, exchanged.get((name, via), []), ordered):
                open_names.remove(name)
                settled.append(name)


def _exchanged(pieces: Sequence[Piece]) -> dict[tuple[str, str], list[tuple[int, int, int]]]:
    """(own ns, offset, error) by (clock, the clock it was compared with), both ways round."""
    of_rank = {(piece.attempt, piece.rank): piece.clock for piece in pieces}
    found: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for piece in pieces:
        for t, offset, error, rank in exchanges_of(piece.folder):
            other = of_rank.get((piece.attempt, rank), "")
            if other and other != piece.clock:
                found.setdefault((piece.clock, other), []).append((t, offset, error))
                found.setdefault((other, piece.clock), []).append((t + offset, -offset, error))
    return found


def _settle(
    clocks: Clocks, name: str, via: str, exchanged: list[tuple[int, int, int]], ordered: dict[str, Ordered]
) -> bool:
    """Whether the clock now has a line, by what is known between it and one that has one."""
    told = Intervals.of([(t, offset - error, offset + error) for t, offset, error in exchanged])
    every = Intervals(*between(ordered[name], ordered[via], DRIFT))
    told, every = (_through(clocks.lines[via], known) for known in (told, every))
    line, broken = _fit_all(told, every)
    if line is None:
        return False
    clocks.lines[name] = line
    clocks.exchanges += len(told.t)
    clocks.collectives += len(every.t)
    if broken:
        clocks.broken[name] = broken
    return True


def _fit_all(told: Intervals, every: Intervals) -> tuple[Line | None, int]:
    """The line through the exchanges and what collectives tell, and how many collectives contradict it."""
    known = told.joined(_narrowest(every))
    line = fit(known)
    for _ in range(3):
        if line is None:
            break
        wrong = _contradicting(line, every)
        if not len(wrong):
            return line, 0
        known = known.joined(_narrowest(every.at(wrong)))
        line = fit(known)
    line = fit(told)  # the exchanges are measured, the order of collectives is inferred
    return line, len(_contradicting(line, every)) if line is not None else 0


def _contradicting(line: Line, known: Intervals) -> np.ndarray:
    """The positions of intervals that lie outside of a line's bounds."""
    offset = line.to_reference(known.t) - known.t
    error = line.error(known.t) + 1
    return np.flatnonzero((offset - error > known.high) | (offset + error < known.low))


def _through(line: Line, known: Intervals) -> Intervals:
    """Intervals against one clock as intervals against the reference."""
    if not len(line.x) or not len(known.t):
        return known
    middle = known.t + known.low // 2 + known.high // 2
    shift = line.to_reference(middle) - middle
    # The rate of that clock differs over the width of an interval, too.
    error = np.ceil(line.error(middle) + DRIFT * (known.high - known.low)).astype(np.int64)
    return Intervals(known.t, known.low + shift - error, known.high + shift + error)


def _narrowest(known: Intervals) -> Intervals:
    """Of each part of the time the interval that tells most."""
    if len(known.t) <= WINDOWS:
        return known
    begin, end = int(known.t.min()), int(known.t.max())
    window = ((known.t - begin) / max(1, end - begin) * WINDOWS).astype(np.int64)
    order = np.lexsort((known.high - known.low, window))
    chosen = order[np.r_[True, np.diff(window[order]) > 0]]
    return known.at(chosen)


# ---- a run that has been read


def align(shards: Iterable[Shard], launcher: Iterable[dict[str, Any]]) -> Clocks:
    """Put shards and the launchers' events on one timeline, in place; see ``Shard.clock_error_ns``."""
    shards = list(shards)
    clocks = clocks_of(shards)
    hosts: dict[str, set[str]] = {}
    for shard in shards:
        if not shard.clock:
            continue
        hosts.setdefault(shard.host, set()).add(shard.clock)
        shard.clock_error_ns = clocks.error_ns(shard.clock)
        shard.anchor_unix_ns = clocks.moment(shard.clock, shard.anchor_mono_ns)
        if clocks.drifts(shard.clock):
            moved = clocks.to_unix(shard.clock, shard.records["t"])
            shard.records = shard.records.copy()
            shard.records["t"] = moved - (shard.anchor_unix_ns - shard.anchor_mono_ns)
        _retime(shard.stacks, shard.clock, clocks)
    for event in launcher:
        _retime(event, _clock_of(event, hosts.get(str(event.get("host", "")), set()), clocks), clocks)
    return clocks


def _clock_of(event: dict[str, Any], candidates: set[str], clocks: Clocks) -> str:
    """The clock of a launcher: of its host, which has another one once it was started anew."""
    mono, unix = event.get("t_mono_ns"), event.get("t_unix_ns")
    if type(mono) is not int or type(unix) is not int:
        return ""
    return min(candidates, key=lambda clock: abs(clocks.wall[clock] - (unix - mono)), default="")


def _retime(about: dict[str, Any] | None, clock: str, clocks: Clocks) -> None:
    """The wall time of a note beside the shard, from the monotonic time that it has, too."""
    mono = about.get("t_mono_ns") if about is not None else None
    if about is not None and clock and type(mono) is int and 0 < mono < 1 << 62 and "t_unix_ns" in about:
        about["t_unix_ns"] = clocks.moment(clock, mono)
