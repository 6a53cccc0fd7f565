"""What all rules of a verdict start from: the newest attempt's ranks, their ends, places, failures and waits."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from distdbg.analyze import flight_beside
from distdbg.analyze import waits as waits_module
from distdbg.analyze.ends import End, Failure, cut_of, ends_of, failure_of, interrupt_of
from distdbg.analyze.rank import Open, Place, Raised, RankView, phase_of
from distdbg.analyze.read import Run
from distdbg.analyze.waits import Wait
from distdbg.schema import EventKind as K

_AT_WORK = ("left", "running")


@dataclass
class Facts:
    """One attempt of a run."""

    run: Run
    attempt: int
    world_size: int
    views: dict[int, RankView]
    ends: dict[int, End]
    failures: dict[int, Failure]
    events: list[dict[str, Any]]
    cut: int | None
    failed_attempts: list[int] = field(default_factory=list)

    names = staticmethod(waits_module.names_of)

    # ---- the whole

    @property
    def missing(self) -> set[int]:
        return set(range(self.world_size)) - set(self.views)

    @property
    def problems(self) -> list[str]:
        return list(self.run.problems)

    def apart_ns(self, one: int, other: int) -> int | None:
        """Events of two ranks that are no further apart (ns) can't be told to be one before the other.

        None where their clocks were never compared: then wall clocks are all there is.
        """
        views = [self.views.get(rank) for rank in (one, other)]
        if one == other or len({view.shard.clock if view is not None else None for view in views}) == 1:
            return 0
        every = [view.shard.clock_error_ns for view in self.views.values()]
        errors: list[int] = []
        for view in views:
            for error in [view.shard.clock_error_ns] if view is not None else every:
                if error is None:
                    return None
            errors.append(view.shard.clock_error_ns or 0 if view is not None else max(e or 0 for e in every))
        return sum(errors)

    @property
    def interrupted(self) -> bool:
        return self.cut is not None and not any(e.get("event") == "kill" for e in self.events)

    @property
    def all_left(self) -> bool:
        return bool(self.ends) and all(end.how == "left" and not end.code for end in self.ends.values())

    @cached_property
    def stalled(self) -> bool:
        """Whether the launcher saw a stall that did not recover, or nothing moved for long when the run was ended."""
        state = False
        for event in self.events:
            if event.get("event") == "stall":
                state = True
            elif event.get("event") == "recovered":
                state = False
        return state or self._quiet_at_end

    @cached_property
    def _quiet_at_end(self) -> bool:
        """No rank did anything in the last seconds, somebody waits, and nobody failed."""
        running = [rank for rank, end in self.ends.items() if not end.over and rank in self.views]
        if not running or not any(self.waits[rank] for rank in running):
            return False
        return all(self.now_of(rank) - self.views[rank].last_t > 3_000_000_000 for rank in running)

    @cached_property
    def now(self) -> int:
        """The moment the facts are of: when the run was ended, or the newest beat (unix ns)."""
        newest = max((view.last_beat_t for view in self.views.values()), default=0)
        stalls = [int(e["t_unix_ns"]) for e in self.events if e.get("event") == "stall"]
        return self.cut or max([newest, *stalls])

    def now_of(self, rank: int) -> int:
        """``now`` for a rank: where its host's clock was never compared, the newest beat by that clock (unix ns)."""
        if all(view.shard.clock_error_ns is not None for view in self.views.values()):
            return self.now
        own = self._comparable(rank)
        return max(view.last_beat_t for other, view in self.views.items() if self._comparable(other) == own)

    def _comparable(self, rank: int) -> str:
        """The same for ranks whose times can be compared."""
        shard = self.views[rank].shard
        return shard.clock if shard.clock_error_ns is None else ""

    @cached_property
    def recovered(self) -> list[str]:
        found = [e for e in self.events if e.get("event") == "recovered"]
        return [f"a stall was noticed and recovered ({len(found)} times)"] if found else []

    @cached_property
    def symptom(self) -> str:
        """What went visibly wrong, in words; "" if nothing did."""
        if self.failures:
            rank = min(self.failures, key=lambda r: self.failures[r].t)
            return f"rank {rank} raised {self.failures[rank].title}"
        for rank, end in sorted(self.ends.items(), key=lambda pair: pair[1].t):
            if end.how == "crashed":
                return f"rank {rank} was ended by {end.signal}"
            if end.how == "vanished" and end.code:
                return f"rank {rank} ended with exit code {end.code}"
            if end.how == "left" and end.code:
                return f"rank {rank} left with exit code {end.code}"
        if self.stalled:
            return "nothing moves"
        if any(end.how == "terminated" for end in self.ends.values()) and not self.interrupted:
            return "ranks were terminated"
        return ""

    # ---- waits

    @cached_property
    def waits(self) -> dict[int, list[Wait]]:
        return waits_module.pending(self.views, self.beside.issued())

    @cached_property
    def beside(self) -> flight_beside.Beside:
        """Dumps of torch's Flight Recorder, in place of shards that are missing or stopped."""
        return flight_beside.beside(self.run, self.attempt, self.views, self.world_size)

    @cached_property
    def blocked(self) -> dict[int, Wait]:
        """Ranks that stand (or stood when a peer's end threw them out) in a call others have not answered."""
        found = {}
        for rank, pending in self.waits.items():
            if not pending:
                continue
            failure, end = self.failures.get(rank), self.ends[rank]
            if (failure is not None and failure.from_peer) or (
                failure is None and end.how != "left" and waits_module.blocked_in_wait(self.views[rank], end)
            ):
                found[rank] = self._foremost(pending)
        told = self.beside.waits()
        return {**found, **{r: wait for r, wait in told.items() if r not in self.ends or self.ends[r].how != "left"}}

    def _foremost(self, pending: list[Wait]) -> Wait:
        """The oldest pending call; the newest where all of them wait for ranks without a shard.

        Of such a rank nothing is known, so every call ever seems to wait for it; this rank got as far as the last.
        """
        return pending[-1] if all(set(wait.on) <= self.missing for wait in pending) else pending[0]

    def victims(self, culprits: set[int]) -> list[dict[str, Any]]:
        """Everybody else, with what they wait in and for whom."""
        found = []
        for rank in sorted({*self.views, *self.beside.standing}):
            if rank in culprits:
                continue
            pending = self.waits.get(rank, [])
            wait = self.blocked.get(rank) or (self._foremost(pending) if pending else None)
            failure = self.failures.get(rank)
            if wait is None and failure is None and (rank not in self.ends or self.ends[rank].how in _AT_WORK):
                continue
            on = [r for r in (wait.on if wait else ()) if r != rank]
            where = wait.text if wait else ("its peer's end" if failure else "nothing: it was ended with the others")
            if wait is not None:
                where += self._issued_by(wait)
            found.append({"rank": rank, "waits_for": on or sorted(culprits), "in": where})
        return found

    @staticmethod
    def _issued_by(wait: Wait) -> str:
        item = wait.item
        if item.issuer == "DDP" and item.phase == "backward":
            return f", gradients of backward (the bucket {item.signature})"
        place = f" in {item.module}" if item.module else ""
        return f", {item.signature}{place}" if item.signature and not item.p2p else place

    # ---- places

    def raised_of(self, rank: int) -> Raised | None:
        """The innermost account of the exception that ended a rank."""
        failure = self.failures.get(rank)
        if failure is None:
            return None
        found = [r for r in self.views[rank].raised if r.error == failure.error]
        # The same text may have been caught before: take the first of the last unbroken run of accounts.
        best: Raised | None = None
        for raised in found:
            if best is None or raised.t - best.t > 1_000_000_000 or raised.step != best.step:
                best = raised
        return best

    def next_due(self, rank: int, last: Open | None, backward: Open) -> tuple[str, str]:
        """(node, module) due after the last one run, as equal backwards of this rank or a peer tell, or ("", "")."""
        index = last.seq + 1 if last is not None else 0
        own = self.views[rank]
        for view in [own, *(v for r, v in self.views.items() if r != rank and v.parameters == own.parameters)]:
            pre = view.of_kind(K.PREHOOK)
            runs = pre["a"] & 0xFFFFFFFF
            here = pre[pre["seq"] == index]
            for record in here[::-1]:
                run = int(record["a"]) & 0xFFFFFFFF
                if view is own and run == backward.seq:
                    continue
                if last is not None:
                    before = pre[(runs == run) & (pre["seq"] == last.seq)]
                    if not len(before) or view.text(int(before["name"][0])) != own.text(last.name):
                        continue
                return view.text(int(record["name"])), view.text(int(record["module"]))
        return "", ""

    def culprit(self, rank: int, **fields: Any) -> dict[str, Any]:
        """A culprit's entry with every field of the contract; ``fields`` replace the empty ones."""
        view = self.views.get(rank)
        entry: dict[str, Any] = dict.fromkeys(
            (
                "phase",
                "node",
                "module",
                "parameter",
                "step",
                "collective",
                "group",
                "error",
                "signal",
                "source",
                "since_s",
                "node_index",
                "node_count",
            )
        )
        entry = {
            "rank": rank,
            "host": view.shard.host if view else None,
            "pid": view.shard.pid if view else None,
            **entry,
        }
        entry.update(fields)
        if entry["module"] == "":
            entry["module"] = None
        return entry

    def at(self, rank: int, stack: tuple[Open, ...], place: Place | None = None) -> dict[str, Any]:
        """phase, node, module, source, collective, group of what is open in ``stack``."""
        view = self.views[rank]
        phase = phase_of(stack)
        node = next((o for o in reversed(stack) if o.what == "node"), None)
        fields: dict[str, Any] = {"phase": phase, "node": view.text(node.name) if node else None, "module": None}
        forward = next((o for o in reversed(stack) if o.what == "forward" and o.module), None)
        if node is not None:
            around = next((o for o in stack if o.what == "backward" and o.seq == node.a & 0xFFFFFFFF), None)
            fields["node_index"], fields["node_count"] = node.seq, around.a if around else None
        inner = forward if forward and (node is None or stack.index(forward) > stack.index(node)) else node
        if inner is not None and phase in ("forward", "backward"):
            fields["module"] = view.text(inner.module) or None
            about = view.extra(inner.module)
            fields["source"] = view.extra(node.name).get("source") if node else None
            fields["source"] = fields["source"] or about.get("source")
        backward = next((o for o in reversed(stack) if o.what in ("backward", "node")), None)
        if backward is not None and backward.what == "backward" and phase == "backward" and forward is None:
            finalizing = place.finalizing if place else False
            last = place.last_node if place else None
            if not finalizing:
                name, module = self.next_due(rank, last, backward)
                fields["node"], fields["module"] = name or None, module or None
                if name:
                    fields["node_index"], fields["node_count"] = last.seq + 1 if last else 0, backward.a
        if phase == "collective" and view.at_store(stack):
            fields["phase"] = "loop"  # the script's own affair
        called = next((o for o in reversed(stack) if o.what == "collective"), None)
        if called is not None:
            group = view.groups.get(called.a & 0xFFFFFFFF)
            fields["collective"], fields["group"] = view.text(called.name), group.name if group else None
        elif stack and stack[-1].what == "wait" and view.items:
            # Waiting for the work of a call that has returned: the last one issued, as nearly as can be told.
            fields["collective"], fields["group"] = view.items[-1].op, view.items[-1].group_name or None
        return fields


def gather(run: Run) -> Facts:
    """Facts over the newest attempt of a run."""
    attempts = sorted({shard.attempt for shard in run.shards})
    starts = [int(e.get("attempt", 0) or 0) for e in run.launcher if e.get("event") == "worker_start"]
    attempt = max([*attempts, *starts], default=0)
    cut = cut_of(run.launcher)
    newest: dict[int, Any] = {}
    for shard in run.shards:
        if shard.attempt != attempt:
            continue
        known = newest.get(shard.rank)
        if known is None or shard.anchor_unix_ns > known.anchor_unix_ns:
            newest[shard.rank] = shard
    views = {rank: RankView(shard, cut) for rank, shard in sorted(newest.items())}
    interrupt = interrupt_of(views)
    if interrupt is not None and (cut is None or interrupt <= cut):
        cut = interrupt - 1
        views = {rank: RankView(shard, cut) for rank, shard in sorted(newest.items())}
    ends = ends_of(views, run.launcher, attempt, cut)
    found = {rank: failure for rank, view in views.items() if (failure := failure_of(view)) is not None}
    world = max([shard.world_size for shard in newest.values()] + [rank + 1 for rank in {*views, *ends}] + [1])
    return Facts(run, attempt, world, views, ends, found, run.launcher, cut, list(range(attempt)))
