"""What one rank did and where it is: its shard, seen as a detector wants it.

Streams (collectives, modules entered) are cut out of the records with numpy; the place, the stack of what
was begun and not ended, is replayed event by event from the last moment at which nothing was open.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from distdbg.analyze.read import Name, Shard
from distdbg.schema import STEP_FIELDS, STEP_RECORD, STEPS_FILE
from distdbg.schema import EventKind as K

LOW = 0xFFFFFFFF

_BEGINS = {
    K.BACKWARD_BEGIN: "backward",
    K.FORWARD_BEGIN: "forward",
    K.DATA_BEGIN: "data",
    K.OPTIMIZER_BEGIN: "optimizer",
    K.CHECKPOINT_BEGIN: "checkpoint",
    K.COLLECTIVE: "collective",
    K.WAIT_BEGIN: "wait",
    K.SETUP_BEGIN: "setup",
    K.PREHOOK: "node",
}
_ENDS = {
    K.BACKWARD_END: "backward",
    K.BACKWARD_RAISED: "backward",
    K.FORWARD_END: "forward",
    K.FORWARD_RAISED: "forward",
    K.DATA_END: "data",
    K.DATA_RAISED: "data",
    K.OPTIMIZER_END: "optimizer",
    K.OPTIMIZER_RAISED: "optimizer",
    K.CHECKPOINT_END: "checkpoint",
    K.CHECKPOINT_RAISED: "checkpoint",
    K.COLLECTIVE_END: "collective",
    K.WAIT_END: "wait",
    K.SETUP_END: "setup",
    K.POSTHOOK: "node",
    K.CALL_RAISED: "call",
}
_RAISED = (K.CALL_RAISED, K.BACKWARD_RAISED, K.FORWARD_RAISED, K.DATA_RAISED, K.OPTIMIZER_RAISED, K.CHECKPOINT_RAISED)
_WATCHDOG = (K.HEARTBEAT, K.STALL, K.LOST, K.GC_BEGIN, K.GC_END, K.CLOCK, K.MAGNITUDE, K.DIGEST, K.DESCRIBE)
_PHASE_OF = {"forward", "backward", "optimizer", "checkpoint", "data"}


@dataclass(frozen=True)
class Open:
    """Something begun and not ended."""

    what: str  # forward, backward, node, data, optimizer, checkpoint, collective, wait, setup
    name: int
    module: int
    seq: int
    a: int
    b: int
    t: int  # unix ns
    step: int


@dataclass(frozen=True)
class Raised:
    """An exception that left a module, a node or another bracket; ``opened`` is what was open, outermost first."""

    error: int  # name id
    t: int
    step: int
    opened: tuple[Open, ...]


@dataclass(frozen=True)
class Item:
    """A collective or point-to-point call that a rank issued."""

    t: int  # unix ns
    step: int
    index: int  # position in the records
    op: str
    seq: int
    group: str  # key of the group: its ranks
    group_name: str
    signature: str
    about: dict[str, Any]  # numel, dtypes, root, peer, tag, splits
    bytes: int
    phase: str
    node: str | None
    module: str
    issuer: str  # script, DDP, FSDP, DTensor, checkpoint, join
    source: str
    joining: bool  # within torch.distributed.algorithms.join
    backward: int  # ordinal of the backward in its step, -1 outside of one

    @property
    def p2p(self) -> bool:
        return self.op in ("send", "recv")

    @property
    def site(self) -> tuple[str, str, str]:
        """Where it was issued from, as peers can be compared by: wrappers' calls only by their phase.

        Hooks on a gradient that has become ready, and what follows a call that has ended, run where it happens.
        """
        if self.issuer in ("DDP", "join"):
            return (self.phase, self.issuer, "")
        if self.node == "AccumulateGrad" or (self.phase == "backward" and self.node is None):
            return (self.phase, "", "")
        return (self.phase, self.module, self.node or "")


@dataclass
class Place:
    """Where a rank is (or was last)."""

    phase: str
    stack: tuple[Open, ...] = ()
    finalizing: bool = False
    between: bool = False  # in a backward, between two nodes
    last_node: Open | None = None  # the last node that ended in the open backward


@dataclass
class Group:
    """A process group: the ranks in it, as they number it."""

    key: str
    ranks: tuple[int, ...]
    name: str
    label: str  # comparable between ranks that are in different groups of one mesh dimension


class RankView:
    """One rank's shard. ``until`` cuts off what happened after a moment (unix ns), such as a teardown."""

    def __init__(self, shard: Shard, until: int | None = None) -> None:
        self.shard = shard
        self.rank: int = shard.rank
        self.names: Sequence[Name | None] = shard.names
        records = shard.records
        self.offset = int(shard.anchor_unix_ns) - int(shard.anchor_mono_ns)
        self._until = (1 << 62) if until is None else until
        if until is not None:
            records = records[records["t"] + self.offset <= until]
        self.records = records

    # ---- names

    def text(self, number: int) -> str:
        name = self.names[number] if 0 < number < len(self.names) else None
        return name.text if name is not None else ""

    def extra(self, number: int) -> dict[str, Any]:
        name = self.names[number] if 0 < number < len(self.names) else None
        return (name.extra or {}) if name is not None else {}

    def at_store(self, stack: Sequence[Open]) -> bool:
        """Whether the innermost thing open is a wait in the job's store."""
        return bool(stack) and stack[-1].what == "setup" and self.text(stack[-1].name).startswith("store.")

    # ---- simple facts

    @cached_property
    def kinds(self) -> np.ndarray:
        """The kinds of ``main``, packed: what most questions begin with."""
        return np.ascontiguousarray(self.main["kind"])

    @cached_property
    def main(self) -> np.ndarray:
        """The records without the watchdog's."""
        theirs = _marked(self.records["kind"], _WATCHDOG)
        return self.records[~theirs] if theirs.any() else self.records

    @cached_property
    def last_t(self) -> int:
        """When the rank last did anything (unix ns); 0 if never."""
        return int(self.main["t"][-1]) + self.offset if len(self.main) else 0

    @cached_property
    def last_beat_t(self) -> int:
        return int(self.records["t"][-1]) + self.offset if len(self.records) else 0

    @cached_property
    def step(self) -> int:
        """The step the rank is in."""
        return max(int(self.main["step"][-1]), self.steps_ended) if len(self.main) else 0

    @cached_property
    def first_step(self) -> int:
        """The oldest step that is still there whole."""
        if self.shard.first_step is not None:
            return self.shard.first_step
        if not len(self.main):
            return 0
        first = int(self.main["step"][0])
        return first if self.main["kind"][0] == K.START else first + 1

    def of_kind(self, *kinds: int) -> np.ndarray:
        found: np.ndarray = self.main[_marked(self.kinds, kinds)]
        return found

    @cached_property
    def exit_record(self) -> tuple[int, str, int] | None:
        """(exit code, way, unix ns) if the script came to its end."""
        found = self.of_kind(K.EXIT)
        if not len(found):
            return None
        last = found[-1]
        return int(last["seq"]), self.text(int(last["name"])), int(last["t"]) + self.offset

    @cached_property
    def stop_reason(self) -> str | None:
        found = self.of_kind(K.STOP)
        return self.text(int(found[-1]["name"])) if len(found) else None

    @cached_property
    def uncaught(self) -> tuple[int, int, int] | None:
        """(name id of the error, unix ns, name id of the source) of the exception that left the script."""
        found = self.of_kind(K.EXCEPTION)
        if not len(found):
            return None
        return int(found[-1]["name"]), int(found[-1]["t"]) + self.offset, int(found[-1]["a"])

    @cached_property
    def steps_ended(self) -> int:
        """The number of steps that have ended (the next one's number)."""
        found = self.of_kind(K.STEP)
        return int(found["step"][-1]) + 1 if len(found) else 0

    @cached_property
    def digests(self) -> np.ndarray:
        """schema.STEP_FIELDS of the steps that have ended, by step; also of those whose events are gone."""
        try:
            data = (self.shard.folder / STEPS_FILE).read_bytes()
        except OSError:
            data = b""
        found = np.frombuffer(data[: len(data) // STEP_RECORD.size * STEP_RECORD.size], dtype=list(STEP_FIELDS))
        return found[found["t"] + self.offset <= self._until]

    @cached_property
    def last_source(self) -> str:
        """The main thread's line at the last beat."""
        beats = self.records[np.isin(self.records["kind"], (K.HEARTBEAT, K.STALL)) & (self.records["name"] > 0)]
        return self.text(int(beats["name"][-1])) if len(beats) else ""

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Names and shapes of the parameters: ranks with the same ones have the same role."""
        return frozenset(
            f"{name.text}{(name.extra or {}).get('shape', '')}"
            for name in self.names
            if name is not None and name.category == "parameter"
        )

    # ---- groups

    @cached_property
    def groups(self) -> dict[int, Group]:
        found: dict[int, Group] = {}
        for number, name in enumerate(self.names):
            if name is None or name.category != "group":
                continue
            about = name.extra or {}
            ranks = tuple(int(rank) for rank in about.get("ranks", ()))
            desc = str(about.get("desc", ""))
            label = f"{desc if desc not in ('', 'undefined') else 'group'} of {len(ranks)} {_strides(ranks)}"
            found[number] = Group(f"{about.get('key', '')}:{','.join(map(str, ranks))}", ranks, name.text, label)
        return found

    # ---- replay

    @cached_property
    def _replayed(self) -> "Replay":
        replay = Replay(self)
        replay.run()
        return replay

    @property
    def items(self) -> list[Item]:
        """All collectives and point-to-point calls issued, in order."""
        return self._replayed.items

    @property
    def raised(self) -> list[Raised]:
        """Exceptions that left a module, a backward, an optimizer, ... innermost account of each."""
        return self._replayed.raised

    @cached_property
    def entered(self) -> dict[int, list[tuple[str, int]]]:
        """By step, the modules entered outside of backward: (name, position in the records)."""
        replay = Replay(self)
        replay.run(every=True)
        return replay.entered

    @property
    def place(self) -> Place:
        return self._replayed.place

    def node_total(self, backward: Open) -> int:
        return backward.a


@dataclass
class Replay:
    """Runs through a rank's events once, thread by thread, keeping what is open.

    Only ``every`` event tells ``entered``; for all else what was begun and ended with nothing between is left out.
    """

    view: RankView
    items: list[Item] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)
    entered: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    place: Place = field(default_factory=lambda: Place("loop"))

    def run(self, *, every: bool = False) -> None:
        view = self.view
        last_nodes: dict[int, Open | None] = {}
        finals: dict[int, set[int]] = {}
        joining = 0
        last_error: tuple[int, int] | None = None
        backwards: dict[int, int] = {}
        ordinal = -1
        positions = np.flatnonzero(~_uneventful(view.main))
        # Where several threads have something open their order counts, whatever is left out.
        stacks: dict[int, list[Open]] = {thread: [] for thread in _threads(view.main[positions])}
        if not every:
            positions = _eventful(view.main, positions)
        main = view.main[positions]
        columns = [main[name].tolist() for name in ("kind", "thread", "name", "module", "seq", "a", "b", "t", "step")]
        rows = zip(positions.tolist(), *columns, strict=True)
        for index, kind, thread, name, module, seq, a, b, t, step in rows:
            stack = stacks.get(thread)
            if stack is None:
                stack = stacks[thread] = []
            what = _BEGINS.get(kind)
            if what is not None:
                if what == "optimizer" and a == 1:
                    stack[:] = [o for o in stack if o.what in ("checkpoint", "data")]
                opened = Open(what, name, module, seq, a, b, t + view.offset, step)
                stack.append(opened)
                if what == "forward":
                    if not any(o.what == "backward" for o in stack):
                        self.entered.setdefault(step, []).append((view.text(module), index))
                elif what == "backward":
                    last_nodes[thread] = None
                    ordinal = backwards[step] = backwards.get(step, -1) + 1
                elif what == "collective":
                    around = self._context(stacks, stack)
                    if around is not stack:  # of another thread: which node that is in just then is chance
                        around = [o for o in around if o.what != "node"]
                    self._issue(opened, index, around, joining > 0, ordinal)
                continue
            what = _ENDS.get(kind)
            if what is not None:
                if kind in _RAISED:
                    key = (name, thread)
                    if last_error != key or not self.raised or self.raised[-1].error != name:
                        self.raised.append(Raised(name, t + view.offset, step, tuple(stack)))
                    last_error = key
                for position in range(len(stack) - 1, -1, -1):
                    o = stack[position]
                    if what == "call" and o.what in ("collective", "wait", "setup"):
                        del stack[position:]
                        break
                    if o.what == what and (what not in ("node", "backward", "forward") or _same(o, what, seq, module)):
                        if what == "node":
                            last_nodes[thread] = o
                        del stack[position:]
                        break
                if not stack:
                    last_error = None
                continue
            if kind == K.BACKWARD_FINAL:
                finals.setdefault(thread, set()).add(seq)
            elif kind == K.STEP:
                stack[:] = [o for o in stack if o.what == "optimizer"]
                last_error = None
            elif kind == K.JOIN_BEGIN:
                joining += 1
            elif kind == K.JOIN_END:
                joining = max(0, joining - 1)
        self.place = self._last_place(stacks, last_nodes, finals)

    def _context(self, stacks: dict[int, list[Open]], stack: list[Open]) -> list[Open]:
        """What surrounds a call: this thread's stack, or a backward's that runs in another thread."""
        if any(o.what in ("backward", "forward", "node") for o in stack):
            return stack
        return next((s for s in stacks.values() if any(o.what == "backward" for o in s)), stack)

    def _issue(self, opened: Open, index: int, stack: list[Open], joining: bool, ordinal: int) -> None:
        view = self.view
        group_id, signature_id = opened.a & LOW, opened.a >> 32
        seq, source_id = opened.seq & LOW, opened.seq >> 32
        group = view.groups.get(group_id)
        phase = phase_of(stack)
        node = next((o for o in reversed(stack) if o.what == "node"), None)
        inner = next((o for o in reversed(stack) if o.what in ("forward", "node") and o.module), None)
        extra = view.extra(source_id)
        in_backward = any(o.what == "backward" for o in stack)
        self.items.append(
            Item(
                t=opened.t,
                step=opened.step,
                index=index,
                op=view.text(opened.name),
                seq=seq,
                group=group.key if group else "",
                group_name=group.name if group else "",
                signature=view.text(signature_id),
                about=view.extra(signature_id),
                bytes=opened.b,
                phase=phase,
                node=view.text(node.name) if node else None,
                module=view.text(inner.module) if inner else "",
                issuer=str(extra.get("issuer", "script")),
                source=view.text(source_id),
                joining=joining,
                backward=ordinal if in_backward else -1,
            )
        )

    def _last_place(
        self, stacks: dict[int, list[Open]], last_nodes: dict[int, Open | None], finals: dict[int, set[int]]
    ) -> Place:
        thread = 0
        if not stacks.get(0):
            busy = [k for k, s in stacks.items() if s]
            thread = max(busy, key=lambda k: stacks[k][-1].t) if busy else 0
        stack = stacks.get(thread, [])
        place = Place(phase_of(stack), tuple(stack))
        innermost = next((o for o in reversed(stack) if o.what in ("backward", "node", "forward")), None)
        if innermost is not None and innermost.what == "backward":
            done = innermost.seq in finals.get(thread, set())
            place.finalizing, place.between = done, not done
            place.last_node = last_nodes.get(thread)
        return place


def _strides(ranks: tuple[int, ...]) -> str:
    """The rows of a grid of ranks are alike, and so are its columns: told by the steps from rank to rank."""
    return ",".join(str(b - a) for a, b in itertools.pairwise(ranks)) if len(ranks) <= 64 else ""


def _uneventful(records: np.ndarray) -> np.ndarray:
    """Marks nodes in which nothing happened (a prehook and its posthook in a row): most of all events.

    Of each run of them the last is kept, since where a rank is between two nodes hangs on it.
    """
    marks = np.zeros(len(records), dtype=bool)
    if len(records) < 4:
        return marks
    kind, thread, seq, word = (np.ascontiguousarray(records[name]) for name in ("kind", "thread", "seq", "a"))
    pair = (kind[:-1] == K.PREHOOK) & (kind[1:] == K.POSTHOOK) & (seq[:-1] == seq[1:]) & (word[:-1] == word[1:])
    pair &= thread[:-1] == thread[1:]
    # A pair goes if another pair of the same thread follows at once.
    goes = np.zeros(len(records) - 1, dtype=bool)
    goes[:-2] = pair[:-2] & pair[2:] & (thread[:-3] == thread[2:-1])
    marks[:-1] |= goes
    marks[1:] |= goes
    return marks


def _threads(records: np.ndarray) -> list[int]:
    """The threads, by their first event."""
    found, first = np.unique(records["thread"], return_index=True)
    return [int(thread) for thread in found[np.argsort(first)]]


def _marked(kinds: np.ndarray, wanted: Iterable[int]) -> np.ndarray:
    """Marks the records of some kinds."""
    table = np.zeros(1 << 16, dtype=bool)
    table[list(wanted)] = True
    found: np.ndarray = table[kinds]
    return found


def _eventful(records: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Of the positions those without pairs of a begin and its end in a row, and without what held nothing but these.

    A rank's last backward stays whole, since the last node in it tells which is next. Collectives and backwards stay,
    which are counted; so does an optimizer that closes what was open before it.
    """
    records = records[positions]
    kind, thread = np.ascontiguousarray(records["kind"]), np.ascontiguousarray(records["thread"])
    module, a = np.ascontiguousarray(records["module"]), np.ascontiguousarray(records["a"])
    key = np.where(_marked(kind, (K.FORWARD_BEGIN, K.FORWARD_END)), module, 0).astype(np.int64)
    key = np.where(_marked(kind, (K.PREHOOK, K.POSTHOOK)), records["seq"], key)
    begun, ended = _PAIR_BEGINS[kind].copy(), _PAIR_ENDS[kind]
    begun[(kind == K.OPTIMIZER_BEGIN) & (a == 1)] = 0
    begun[_kept(kind, thread)] = 0
    rows = np.arange(len(kind))
    while len(rows) > 1:
        left, right = rows[:-1], rows[1:]
        pair = (begun[left] > 0) & (begun[left] == ended[right])
        pair &= (key[left] == key[right]) & (thread[left] == thread[right])
        if not pair.any():
            break
        gone = np.zeros(len(rows), dtype=bool)
        gone[:-1] |= pair
        gone[1:] |= pair
        rows = rows[~gone]
    found: np.ndarray = positions[rows]
    return found


def _kept(kind: np.ndarray, thread: np.ndarray) -> np.ndarray:
    """Marks what must not be left out: all since a thread's last backward, and what tells exceptions apart."""
    kept = np.zeros(len(kind), dtype=bool)
    threads = np.unique(thread)
    for one in threads.tolist():
        last = np.flatnonzero((kind == K.BACKWARD_BEGIN) & (thread == one))
        if len(last):
            kept[last[-1] :] |= thread[last[-1] :] == one
    raised = np.flatnonzero(_marked(kind, _RAISED))
    if len(raised) and len(threads) > 1:
        # An account of an exception ends where any thread has nothing open any more.
        kept[raised[0] : raised[-1] + 1] = True
    return kept


def _pair_tables() -> tuple[np.ndarray, np.ndarray]:
    """By kind, a number of the pair that it begins, and of that it ends; 0 for none."""
    pairs = (
        (K.FORWARD_BEGIN, K.FORWARD_END),
        (K.PREHOOK, K.POSTHOOK),
        (K.DATA_BEGIN, K.DATA_END),
        (K.OPTIMIZER_BEGIN, K.OPTIMIZER_END),
        (K.CHECKPOINT_BEGIN, K.CHECKPOINT_END),
        (K.WAIT_BEGIN, K.WAIT_END),
        (K.SETUP_BEGIN, K.SETUP_END),
    )
    begins, ends = np.zeros(1 << 16, dtype=np.int8), np.zeros(1 << 16, dtype=np.int8)
    for number, (begin, end) in enumerate(pairs, 1):
        begins[begin], ends[end] = number, number
    return begins, ends


_PAIR_BEGINS, _PAIR_ENDS = _pair_tables()


def _same(opened: Open, what: str, seq: int, module: int) -> bool:
    return opened.module == module if what == "forward" else opened.seq == seq


def phase_of(stack: Sequence[Open]) -> str:
    """The innermost phase of a stack; "collective" for a call outside of all, else "loop".

    A forward within a backward is a recomputation: part of backward.
    """
    in_backward = any(opened.what in ("backward", "node") for opened in stack)
    for opened in reversed(stack):
        if opened.what in _PHASE_OF:
            return "backward" if opened.what == "forward" and in_backward else opened.what
        if opened.what == "node":
            return "backward"
    return "collective" if any(o.what in ("collective", "wait", "setup") for o in stack) else "loop"
