"""What a shard holds: event kinds, the record's layout, the names table, the CSV's columns.

Everything that writes or reads events derives from this module; it imports nothing heavy.

A run directory::

    RUN_DIR/
      run.json                          written by the launcher: argv, world size, start
      launcher-<host>-<pid>.jsonl       starts, exits and signals of the ranks, stalls, the end
      ranks/rank00002-attempt000-<host>-<pid>/
        meta.json                       who wrote this: rank, world size, host, pid, clock anchor
        names.jsonl                     [id, category, text, extra] a line, in order of first use
        steps.bin                       a digest of each step, which outlasts the oldest segments
        seg-000000.dds, seg-000001.dds  preallocated segments: a header page, then records
        clock.jsonl                     comparisons with the clock of rank 0's host
        exception.json  stacks.json  stacks-native.json  stacks-fatal.txt  flight-recorder.json
                                        evidence in text, where there is some
      bundles/rank2-step3-MulBackward0.bundle/   a failed node: bundle.json, tensors.safetensors
      timeline.csv  verdict.json

A record is committed by its ``kind``, the last field to be written: kind 0 is "nothing here (yet)".
Readers skip such slots and do not stop at one, since another thread may have written past it.
"""

import struct
from enum import IntEnum

SCHEMA_VERSION = 1
MAGIC = b"DISTDBG\x00"

# time, seq, a, b | step, name, module | thread, kind
RECORD = struct.Struct("<qqqqIIIHH")
RECORD_SIZE = RECORD.size  # 48
RECORD_FIELDS = (
    ("t", "<i8"),  # CLOCK_MONOTONIC of the host, ns
    ("seq", "<i8"),  # see EventKind
    ("a", "<i8"),  # see EventKind
    ("b", "<i8"),  # see EventKind
    ("step", "<u4"),  # training step, from 0
    ("name", "<u4"),  # id in the names table, 0 for none
    ("module", "<u4"),  # id in the names table, 0 for none
    ("thread", "<u2"),  # 0 is the main thread, then by order of appearance
    ("kind", "<u2"),  # EventKind
)

# A segment starts with: magic, schema version, header size, record size, capacity (records),
# number of the segment, and a length-prefixed JSON text (rank, pid, attempt, clock anchor).
SEGMENT_HEADER = struct.Struct("<8sIIIIII")
SEGMENT_HEADER_SIZE = 4096
SEGMENT_SUFFIX = ".dds"
SEGMENT_PATTERN = "seg-{:06d}" + SEGMENT_SUFFIX
# One record a step beside the segments, which outlasts the oldest of them: step, 0, hash of the modules entered
# outside of backward, hash of the collectives issued (operation and size of the group), CLOCK_MONOTONIC ns.
STEP_RECORD = struct.Struct("<IIQQq")
STEP_FIELDS = (("step", "<u4"), ("zero", "<u4"), ("modules", "<u8"), ("calls", "<u8"), ("t", "<i8"))
STEPS_FILE = "steps.bin"
META_FILE = "meta.json"
NAMES_FILE = "names.jsonl"
EXCEPTION_FILE = "exception.json"
STACKS_FILE = "stacks.json"
NATIVE_STACKS_FILE = "stacks-native.json"
FATAL_STACKS_FILE = "stacks-fatal.txt"
CLOCK_FILE = "clock.jsonl"  # [t ns, offset ns, error ns, reference rank] a line
FLIGHT_RECORDER_FILE = "flight-recorder.json"
RANKS_FOLDER = "ranks"
RUN_FILE = "run.json"
LAUNCHER_PREFIX = "launcher-"
VERDICT_FILE = "verdict.json"
TIMELINE_FILE = "timeline.csv"
VERDICT_SCHEMA = "distdbg.verdict/1"


class EventKind(IntEnum):
    """The kinds of events. What ``name``, ``seq``, ``a`` and ``b`` hold is said behind each.

    Where nothing is said a field is 0. ``module`` is the innermost module at that moment, if any.
    """

    BACKWARD_BEGIN = 1  # name: source line; seq: number of the backward; a: nodes; b: depth | flags << 8
    BACKWARD_FINAL = 2  # seq: number of the backward; the engine's final callback, before DDP waits
    BACKWARD_END = 3  # seq: number of the backward
    BACKWARD_RAISED = 4  # name: error; seq: number of the backward
    PREHOOK = 5  # name: node; seq: node_index; a: pack(backward, call); b: pack_counts(...)
    POSTHOOK = 6  # as PREHOOK
    FORWARD_BEGIN = 8  # module; seq: call of this module in this step; a: depth; b: elements of the input, at depth 1
    FORWARD_END = 9
    FORWARD_RAISED = 10  # name: error
    DATA_BEGIN = 11  # name: loader
    DATA_END = 12
    DATA_RAISED = 13  # name: error (StopIteration is a DATA_END with a = 1)
    OPTIMIZER_BEGIN = 14  # name: optimizer
    OPTIMIZER_END = 15
    OPTIMIZER_RAISED = 16  # name: error
    COLLECTIVE = 17  # issued. name: operation; seq: pack(collective_seq, source); a: pack(group, signature); b: bytes
    COLLECTIVE_END = 18  # the call that issued it came back; name, seq, a, b as COLLECTIVE
    WAIT_BEGIN = 19  # Python waits for a collective's work; a: WAIT_OF_CALL where the call just issued does
    WAIT_END = 20
    CHECKPOINT_BEGIN = 21  # name: function
    CHECKPOINT_END = 22
    CHECKPOINT_RAISED = 23  # name: error
    GC_BEGIN = 24  # a: generation
    GC_END = 25
    HEARTBEAT = 26  # name: source line of the main thread; seq: see below; a: process CPU ns; b: main thread's CPU ns
    # seq of a HEARTBEAT: ns for which the main thread was ready to run and had no core, 0 where that is not known
    STALL = 27  # nothing moved; name: source line of the main thread; a: ns of silence
    EXCEPTION = 28  # left the script. name: error; a: source line; b: ERROR_* flags
    EXIT = 30  # seq: exit code; name: way ("end of script", "sys.exit", "exception")
    STEP = 31  # the step just ended is `step`
    START = 32  # recording started
    STOP = 33  # recording stopped in order
    SETUP_BEGIN = 34  # name: init_process_group, new_group, destroy_process_group, store.wait, store.get
    SETUP_END = 35
    JOIN_BEGIN = 36  # torch.distributed.algorithms.join
    JOIN_END = 37
    LOST = 38  # a: number of events that could not be recorded
    DESCRIBE = 39  # as the hook before it; b: text, shapes and dtypes of what it received or returned
    MAGNITUDE = 40  # numerics. name: node or 0; seq: pack(node_index, backward); a: MAGNITUDE_*; b: float64's bits
    CALL_RAISED = 42  # a collective, a wait or a setup raised. name: error
    REPLICATE = 43  # a wrapper keeps replicas equal. name: text whose extra lists ranks and parameters
    CLOCK = 44  # this host's clock was compared; seq: reference rank; a: ns to add to get its time; b: error, ns
    # numerics, after a step. name: parameter; a: hash of its bits; b: its largest magnitude, float64's bits
    DIGEST = 41

    @property
    def label(self) -> str:
        """The event's name in the timeline: the lower-case name of the kind."""
        return "final_callback" if self is EventKind.BACKWARD_FINAL else self.name.lower()


WAIT_OF_CALL = 1  # not the script: a call that comes back once it is done

# Flags of EXCEPTION.b and of an error's `extra` in the names table.
ERROR_IN_COLLECTIVE = 1  # raised while a collective or a wait for one was under way
ERROR_CAUGHT = 2

# MAGNITUDE.a: whether it is of a gradient or an activation, received or returned.
MAGNITUDE_ACTIVATION = 1
MAGNITUDE_RECEIVED = 1 << 8
MAGNITUDE_RETURNED = 2 << 8

NAME_CATEGORIES = (
    "node",
    "module",
    "parameter",
    "operation",
    "group",
    "signature",
    "error",
    "source",
    "text",
)

COLUMNS = (
    "time_s",
    "time_unix_ns",
    "rank",
    "attempt",
    "host",
    "thread",
    "step",
    "phase",
    "event",
    "node",
    "node_index",
    "module",
    "parameter",
    "seq",
    "group",
    "collective",
    "collective_seq",
    "bytes",
    "detail",
)
SPAN_COLUMNS = (
    "begin_s",
    "duration_us",
    "own_us",
    "wait_us",
    "open",
    "rank",
    "attempt",
    "host",
    "thread",
    "step",
    "phase",
    "event",
    "node",
    "node_index",
    "module",
    "parameter",
    "seq",
    "group",
    "collective",
    "collective_seq",
    "bytes",
    "detail",
)

KINDS = ("exception", "died", "stalled", "mismatch", "straggler", "numeric", "healthy", "unknown")
PHASES = ("forward", "backward", "optimizer", "checkpoint", "data", "collective", "exit", "loop")


def pack(low: int, high: int) -> int:
    """Two 32-bit numbers in one signed 64-bit word."""
    return low | high << 32


def pack_counts(tensors: int, nones: int, parameter: int) -> int:
    """What a hook received (tensors, entries that are None) and the parameter's name id, in one word."""
    return tensors | nones << 16 | parameter << 32
