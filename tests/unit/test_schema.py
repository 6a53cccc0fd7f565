"""The one description of what a shard holds is consistent in itself."""

import numpy as np

from distdbg import schema


def test_record_layout_matches_the_struct() -> None:
    """The numpy fields and the struct describe the same bytes."""
    dtype = np.dtype([(name, kind) for name, kind in schema.RECORD_FIELDS])
    assert dtype.itemsize == schema.RECORD_SIZE == 48
    packed = schema.RECORD.pack(1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert np.frombuffer(packed, dtype=dtype)[0].item() == (1, 2, 3, 4, 5, 6, 7, 8, 9)


def test_kind_is_the_last_field() -> None:
    """A record is committed by its kind, so nothing may be written after it."""
    assert schema.RECORD_FIELDS[-1][0] == "kind"
    assert all(kind > 0 for kind in schema.EventKind)


def test_labels_are_distinct() -> None:
    """Every kind has a name of its own in the timeline."""
    labels = [kind.label for kind in schema.EventKind]
    assert len(set(labels)) == len(labels)
    assert {"prehook", "posthook", "final_callback"} <= set(labels)


def test_pack_keeps_both_halves() -> None:
    """Two numbers in one word come out again."""
    word = schema.pack(0xFFFFFFFF, 0x7FFFFFFF)
    assert (word & 0xFFFFFFFF, word >> 32) == (0xFFFFFFFF, 0x7FFFFFFF)
    counts = schema.pack_counts(3, 2, 7)
    assert (counts & 0xFFFF, counts >> 16 & 0xFFFF, counts >> 32) == (3, 2, 7)


def test_span_columns_contain_the_events_columns() -> None:
    """Spans have the same names, with the times in place of the time."""
    shared = set(schema.COLUMNS) - {"time_s", "time_unix_ns"}
    assert shared < set(schema.SPAN_COLUMNS)
