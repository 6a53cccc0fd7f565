"""A timeline's columns as a polars frame: codes become categories, empty numbers become nulls."""

from typing import Any

from distdbg.analyze.merge import NONE, TEXT_COLUMNS, Timeline

_NULLABLE = ("node_index", "seq", "collective_seq", "bytes")


def to_polars(timeline: Timeline, columns: tuple[str, ...]) -> Any | None:
    """A polars DataFrame, or None where polars is not installed."""
    try:
        import polars as pl
    except ImportError:
        return None
    data = []
    for name in columns:
        values = timeline.columns[name]
        series = pl.Series(name, values)
        if name in TEXT_COLUMNS:
            # Gathering from the table of texts costs a pointer an event; the texts are never copied in Python.
            series = pl.Series(name, timeline.texts[name], dtype=pl.String).gather(values).rename(name)
            series = series.replace("", None)
        elif name in _NULLABLE:
            series = pl.select(pl.when(series != NONE).then(series).otherwise(None).alias(name)).to_series()
        data.append(series)
    return pl.DataFrame(data)
