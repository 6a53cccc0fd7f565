"""Shards -> one timeline over all ranks, sorted by wall time; vectorised, strings only as codes.

Strings repeat: each text column is an array of codes and one table of distinct texts, so that the work per
event is on integers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from distdbg.analyze.read import Run, Shard
from distdbg.schema import EventKind as K

LOW = 0xFFFFFFFF
NONE = -1  # an empty cell of a number column

_PHASES = ("", "loop", "forward", "backward", "optimizer", "checkpoint", "data", "collective", "exit")
_BEGIN = {K.FORWARD_BEGIN: 2, K.BACKWARD_BEGIN: 3, K.OPTIMIZER_BEGIN: 4, K.CHECKPOINT_BEGIN: 5, K.DATA_BEGIN: 6}
_END = (
    K.FORWARD_END,
    K.FORWARD_RAISED,
    K.BACKWARD_END,
    K.BACKWARD_RAISED,
    K.OPTIMIZER_END,
    K.OPTIMIZER_RAISED,
    K.CHECKPOINT_END,
    K.CHECKPOINT_RAISED,
    K.DATA_END,
    K.DATA_RAISED,
)
_HOOKS = (K.PREHOOK, K.POSTHOOK, K.DESCRIBE)
_BACKWARD = (K.BACKWARD_BEGIN, K.BACKWARD_FINAL, K.BACKWARD_END, K.BACKWARD_RAISED)
_CALLS = (K.COLLECTIVE, K.COLLECTIVE_END)
_AROUND_CALLS = (*_CALLS, K.WAIT_BEGIN, K.WAIT_END, K.SETUP_BEGIN, K.SETUP_END, K.CALL_RAISED)


class Texts:
    """Distinct texts of one column, shared by all shards; code 0 is the empty cell."""

    def __init__(self) -> None:
        self.values: list[str] = [""]
        self._codes: dict[str, int] = {"": 0}

    def code(self, text: str) -> int:
        found = self._codes.get(text)
        if found is None:
            found = self._codes[text] = len(self.values)
            self.values.append(text)
        return found


@dataclass
class Timeline:
    """Columns of equal length. ``texts`` holds the tables of those columns that are codes."""

    columns: dict[str, np.ndarray] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["time_unix_ns"]) if self.columns else 0


TEXT_COLUMNS = ("host", "phase", "event", "node", "module", "parameter", "group", "collective", "detail")


def merge(run: Run) -> Timeline:
    """All events of a run as the CSV's columns, sorted by time (ranks that tie keep their order)."""
    tables = {name: Texts() for name in TEXT_COLUMNS}
    parts = [_columns(shard, tables) for shard in run.shards]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(columns["time_unix_ns"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    start = int(columns["time_unix_ns"][0]) if len(order) else 0
    columns["time_s"] = (columns["time_unix_ns"] - start) / 1e9
    return Timeline(columns, {name: table.values for name, table in tables.items()})


def _columns(shard: Shard, tables: dict[str, Texts]) -> dict[str, np.ndarray]:
    r = shard.records
    kind, name, seq, a, b = r["kind"], r["name"].astype(np.int64), r["seq"], r["a"], r["b"]
    size = len(r)
    hooks, calls, backward = np.isin(kind, _HOOKS), np.isin(kind, _CALLS), np.isin(kind, _BACKWARD)
    magnitude = kind == K.MAGNITUDE

    def of_names(column: str, ids: np.ndarray, where: np.ndarray) -> np.ndarray:
        table = tables[column]
        ids = np.where(where, ids, 0)
        used = np.unique(ids)
        lookup = np.zeros(int(used[-1]) + 1 if len(used) else 1, dtype=np.int32)
        for number in used.tolist():
            lookup[number] = table.code(_text(shard, number))
        codes: np.ndarray = lookup[ids]
        return codes

    def constant(column: str, text: str) -> np.ndarray:
        return np.full(size, tables[column].code(text), dtype=np.int32)

    event = np.zeros(int(max(K)) + 1, dtype=np.int32)
    for number in np.unique(kind).tolist():
        event[number] = tables["event"].code(K(number).label)
    parameter_ids = np.where(kind == K.DIGEST, name, b >> 32)
    return {
        "time_unix_ns": r["t"] + (shard.anchor_unix_ns - shard.anchor_mono_ns),
        "rank": np.full(size, shard.rank, dtype=np.int32),
        "attempt": np.full(size, shard.attempt, dtype=np.int32),
        "host": constant("host", shard.host),
        "thread": r["thread"].astype(np.int32),
        "step": r["step"].astype(np.int64),
        "phase": _phases(r, tables["phase"]),
        "event": event[kind],
        "node": of_names("node", name, hooks | magnitude),
        "node_index": np.where(hooks, seq, np.where(magnitude, seq & LOW, NONE)),
        "module": of_names("module", r["module"].astype(np.int64), np.ones(size, dtype=bool)),
        "parameter": of_names("parameter", parameter_ids, (hooks & (kind != K.DESCRIBE)) | (kind == K.DIGEST)),
        "seq": np.where(hooks, a & LOW, np.where(backward, seq, NONE)),
        "group": of_names("group", a & LOW, calls),
        "collective": of_names("collective", name, calls),
        "collective_seq": np.where(calls, seq & LOW, NONE),
        "bytes": np.where(calls, b, NONE),
        "detail": _details(shard, tables["detail"]),
    }


def _text(shard: Shard, number: int) -> str:
    name = shard.names[number] if 0 < number < len(shard.names) else None
    return name.text if name is not None else (f"name {number}" if number else "")


def _phases(records: np.ndarray, table: Texts) -> np.ndarray:
    """The innermost phase of each event: that of the last begin at the same depth, thread by thread."""
    codes = np.array([table.code(phase) for phase in _PHASES], dtype=np.int32)
    phase = np.ones(len(records), dtype=np.int64)
    for thread in np.unique(records["thread"]):
        rows = np.flatnonzero(records["thread"] == thread)
        phase[rows] = _thread_phases(records["kind"][rows])
    loop = phase == 1
    phase[loop & np.isin(records["kind"], _AROUND_CALLS)] = _PHASES.index("collective")
    phase[loop & np.isin(records["kind"], (K.EXIT, K.EXCEPTION))] = _PHASES.index("exit")
    return codes[phase]


def _thread_phases(kind: np.ndarray) -> np.ndarray:
    begun = np.zeros(int(max(K)) + 1, dtype=np.int64)
    for item, number in _BEGIN.items():
        begun[item] = number
    begins, ends = begun[kind] > 0, np.isin(kind, _END)
    depth = np.cumsum(begins.astype(np.int64) - ends)
    # After a step nothing is open: takes back what an optimizer that raised, say, left uncounted.
    steps = np.where(kind == K.STEP, np.arange(len(kind)), -1)
    last = np.maximum.accumulate(steps) if len(steps) else steps
    depth = depth - np.where(last >= 0, depth[last], 0)
    inside = np.maximum(depth + ends, 0)  # the event that ends a phase still belongs to it
    result = np.ones(len(kind), dtype=np.int64)
    order = np.lexsort((np.arange(len(kind)), inside))
    marks = np.where(begins[order], np.arange(len(order)), -1)
    latest = np.maximum.accumulate(marks) if len(marks) else marks
    found = latest >= 0
    result[order[found]] = begun[kind[order[latest[found]]]]
    # A begin of another depth does not count.
    same = np.zeros(len(kind), dtype=bool)
    same[order[found]] = inside[order[latest[found]]] == inside[order[found]]
    result[~same | (inside == 0)] = 1
    return result


# ---- details


def _hook_detail(shard: Shard, key: int) -> str:
    tensors, nones = key & 0xFFFF, key >> 16 & 0xFFFF
    text = f"{tensors} tensor{'s' if tensors != 1 else ''}"
    return f"{text}, {nones} None" if nones else text


def _call_detail(shard: Shard, key: int) -> str:
    signature, source = _text(shard, key & LOW), _text(shard, key >> 32)
    return f"{signature} at {source}" if source else signature


def _backward_detail(shard: Shard, key: int) -> str:
    cut = " (the walk was cut short: what lies deeper is not seen)" if key >> 31 & 1 else ""
    return f"{key & 0x7FFFFFFF} nodes at {_text(shard, key >> 32)}{cut}"


def _float_detail(shard: Shard, key: int) -> str:
    return f"{np.array([key], dtype=np.int64).view(np.float64)[0]:.6g}"


def _clock_detail(shard: Shard, key: int) -> str:
    record = shard.records[shard.records["kind"] == K.CLOCK][key]
    offset, error = int(record["a"]) / 1e9, int(record["b"]) / 1e3
    return f"rank {record['seq']}'s clock is {offset:+.6f} s from this one, give or take {error:.0f} us"


_Detail = tuple[Callable[[np.ndarray], np.ndarray], Callable[[Shard, int], str]]


def _name(r: np.ndarray) -> np.ndarray:
    result: np.ndarray = r["name"].astype(np.int64)
    return result


_DETAILS: dict[int, _Detail] = {
    K.PREHOOK: (lambda r: r["b"] & LOW, _hook_detail),
    K.POSTHOOK: (lambda r: r["b"] & LOW, _hook_detail),
    K.DESCRIBE: (lambda r: r["b"], _text),
    K.COLLECTIVE: (lambda r: (r["a"] >> 32) | (r["seq"] >> 32) << 32, _call_detail),
    K.MAGNITUDE: (lambda r: r["b"], _float_detail),
    K.DIGEST: (lambda r: r["a"], lambda shard, key: f"{key & 0xFFFFFFFFFFFFFFFF:016x}"),
    K.BACKWARD_BEGIN: (
        lambda r: r["a"] | (r["b"] >> 8 & 1) << 31 | r["name"].astype(np.int64) << 32,
        _backward_detail,
    ),
    K.FORWARD_BEGIN: (lambda r: r["seq"], lambda shard, key: f"call {key}"),
    K.CLOCK: (lambda r: np.arange(len(r)), _clock_detail),
    K.GC_BEGIN: (lambda r: r["a"], lambda shard, key: f"generation {key}"),
    K.STALL: (lambda r: r["a"] // 1_000_000_000, lambda shard, key: f"no event for {key} s"),
    K.LOST: (lambda r: r["a"], lambda shard, key: f"{key} events lost"),
    K.EXIT: (
        lambda r: r["seq"] | r["name"].astype(np.int64) << 32,
        lambda shard, key: f"{_text(shard, key >> 32)}, exit code {key & LOW}",
    ),
}


def _details(shard: Shard, table: Texts) -> np.ndarray:
    records = shard.records
    codes = np.zeros(len(records), dtype=np.int32)
    for kind in np.unique(records["kind"]).tolist():
        rows = np.flatnonzero(records["kind"] == kind)
        key_of, text_of = _DETAILS.get(kind, (_name, _text))
        keys, inverse = np.unique(key_of(records[rows]), return_inverse=True)
        texts = np.array([table.code(text_of(shard, int(key))) for key in keys], dtype=np.int32)
        codes[rows] = texts[inverse]
    return codes


__all__ = ["NONE", "TEXT_COLUMNS", "Texts", "Timeline", "merge"]
