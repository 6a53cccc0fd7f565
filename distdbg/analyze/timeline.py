"""The merged timeline as a pandas DataFrame: events, or spans (a begin and its end in one row)."""

import os
from pathlib import Path

import pandas as pd

from distdbg import schema
from distdbg.analyze.merge import NONE, TEXT_COLUMNS, Timeline, merge
from distdbg.analyze.read import read_run
from distdbg.analyze.spans import spans_of

_NULLABLE = ("node_index", "seq", "collective_seq", "bytes")


def load(run_dir: str | os.PathLike[str], *, spans: bool = False) -> pd.DataFrame:
    """The timeline of a run, one row an event (or, with ``spans``, a begin/end pair), sorted by time.

    Columns as in the CSV (schema.COLUMNS, schema.SPAN_COLUMNS): times in s from the start of the run or unix ns,
    durations in us; texts are categoricals, numbers that do not apply are <NA>. Raises DistdbgError where the
    directory holds no run or nothing in it can be read.
    """
    run = read_run(Path(run_dir))
    timeline = spans_of(run) if spans else merge(run)
    return to_pandas(timeline, schema.SPAN_COLUMNS if spans else schema.COLUMNS)


def to_pandas(timeline: Timeline, columns: tuple[str, ...]) -> pd.DataFrame:
    data: dict[str, object] = {}
    for name in columns:
        values = timeline.columns[name]
        if name in TEXT_COLUMNS:
            # Code 0 is the empty text: a missing value to pandas.
            data[name] = pd.Categorical.from_codes(
                values - 1, categories=pd.Index(timeline.texts[name][1:], dtype=object)
            )
        elif name in _NULLABLE:
            data[name] = pd.arrays.IntegerArray(values.astype("int64"), values == NONE)
        else:
            data[name] = values
    return pd.DataFrame(data)
