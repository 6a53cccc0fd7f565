"""What each rank did around the fault: a window of time, and the bars that fall into it, for pictures of lanes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distdbg.analyze.facts import Facts
from distdbg.analyze.rank import RankView
from distdbg.analyze.spans import END_KINDS, PAIRS
from distdbg.schema import EventKind as K

SECOND = 1_000_000_000
_BEGIN = {int(begin): what for what, (begin, _) in PAIRS.items() if what != "gc"}
_END = {int(kind): whats for kind, whats in END_KINDS.items()}
_RAISED = {int(kind) for kind in K if kind.name.endswith("_RAISED")}
_LATER = ("mismatch", "straggler", "numeric")  # where the place of the fault is a step, not the rank's last event


@dataclass(frozen=True)
class Window:
    """Unix ns. ``fault``: the moment of the fault; ``now``: the moment the facts are of, often far behind ``end``."""

    begin: int
    end: int
    fault: int
    now: int


@dataclass
class Bar:
    """Something begun and ended, or still open; ``depth`` counts what is around it. Times are unix ns."""

    begin: int
    end: int
    what: str  # as in spans; "finalizing" for the time from a backward's last node to its end
    name: str
    module: str
    step: int
    depth: int
    thread: int
    open: bool = False
    raised: bool = False  # an exception left it
    key: int = 0  # what its end must agree with

    @property
    def waits(self) -> bool:
        return self.what in ("collective", "wait", "setup", "finalizing")


def step_ns(views: Iterable[RankView]) -> int:
    """The median time of a step over all ranks, 0 where no two steps have ended."""
    found = [np.median(np.diff(ends["t"])) for view in views if len(ends := view.of_kind(K.STEP)) > 1]
    return int(np.median(found)) if found else 0


def window_of(facts: Facts, verdict: dict[str, Any]) -> Window:
    """The last steps before the fault and a part of the silence after it."""
    views = facts.views
    step = step_ns(views.values()) or SECOND // 3
    last = max((view.last_t for view in views.values()), default=0)
    named = [c for c in verdict.get("culprits", []) if c.get("rank") in views]
    fault = min((views[c["rank"]].last_t for c in named), default=last)
    if verdict.get("kind") == "healthy" or (not named and not facts.symptom):
        ended = [int(steps["t"][-1]) + v.offset for v in views.values() if len(steps := v.of_kind(K.STEP))]
        last = max(ended, default=last)  # not the leaving, which is of little interest
        return Window(last - 3 * step, last, last, facts.now)
    if verdict.get("kind") in _LATER and named:
        begun = _step_begin(views[named[0]["rank"]], int(named[0].get("step") or 0))
        if begun is not None and begun < fault - 3 * step:
            return Window(begun - step, begun + 3 * step, begun, facts.now)
    active = min(last, fault + 10 * step)
    end = min(max(facts.now, last), max(fault + 2 * step, active + step))
    return Window(fault - 3 * step, end, fault, facts.now)


def gone_at(facts: Facts, rank: int) -> int:
    """When a rank's process ended (unix ns), 0 if it has not."""
    end = facts.ends.get(rank)
    return end.t if end is not None and end.over else 0


def raised_in(bars: list[Bar], step: int | None) -> list[Bar]:
    """What the exception of a culprit left in its step: the bars that end with the last of those raised."""
    raised = [bar for bar in bars if bar.raised and bar.step == step]
    last = max((bar.end for bar in raised), default=0)
    return [bar for bar in raised if bar.end == last]


def _step_begin(view: RankView, step: int) -> int | None:
    here = view.main[view.main["step"] == step]
    return int(here["t"][0]) + view.offset if len(here) else None


def bars_of(view: RankView, window: Window, gone: int = 0) -> list[Bar]:
    """The bars of a rank that touch the window, parents before children.

    Open ones reach to ``window.now``, or to ``gone``, the moment of the rank's end, where there is one (unix ns).
    """
    records = view.records
    steps = np.flatnonzero((records["kind"] == K.STEP) & (records["t"] + view.offset <= window.begin))
    first = int(steps[-1]) if len(steps) else 0  # nothing but an optimizer was open then
    stacks: dict[int, list[Bar]] = {}
    done: list[Bar] = []
    columns = [records[first:][name].tolist() for name in ("t", "kind", "thread", "step", "name", "module", "seq", "a")]
    for t, kind, thread, step, name, module, seq, a in zip(*columns, strict=True):
        t += view.offset
        stack = stacks.setdefault(thread, [])
        what = "finalizing" if kind == K.BACKWARD_FINAL else _BEGIN.get(kind)
        if what is not None:
            # On an accelerator the nodes run in a thread of their own, within the main thread's backward.
            outer = sum(1 for bar in stacks.get(0, []) if thread and bar.what == "backward")
            key = seq if what in ("node", "backward") else module if what == "forward" else 0
            label = _label(view, what, name, module, seq, a)
            stack.append(Bar(t, 0, what, label, view.text(module), step, len(stack) + outer, thread, key=key))
        elif kind in _END:
            _end(stack, done, t, _END[kind], module, seq, kind in _RAISED)
        elif kind == K.STEP:
            for bar in stack:
                bar.end = t
            done.extend(bar for bar in stack if bar.what != "optimizer")
            stack[:] = [bar for bar in stack if bar.what == "optimizer"]
    for stack in stacks.values():
        for bar in stack:
            bar.end, bar.open = max(gone or window.now, bar.begin), True
            done.append(bar)
    found = [bar for bar in done if bar.end > window.begin and bar.begin < window.end]
    return sorted(found, key=lambda bar: (bar.begin, bar.depth))


def _end(
    stack: list[Bar], done: list[Bar], t: int, ended: tuple[str, ...], module: int, seq: int, raised: bool
) -> None:
    for position in range(len(stack) - 1, -1, -1):
        bar = stack[position]
        if bar.what not in ended or (bar.what in ("node", "backward") and bar.key != seq):
            continue
        if bar.what == "forward" and bar.key != module:
            continue
        for inner in stack[position:]:
            inner.end, inner.raised = t, raised
            done.append(inner)
        del stack[position:]
        return


def _label(view: RankView, what: str, name: int, module: int, seq: int, a: int) -> str:
    if what == "collective":
        return f"{view.text(name)} #{seq & 0xFFFFFFFF}"
    if what == "node":
        return view.text(name)
    if what == "forward":
        return view.text(module) or "(model)"
    if what == "finalizing":
        return "waits"
    if what == "backward":
        return f"backward {seq}"
    return view.text(name) or what
