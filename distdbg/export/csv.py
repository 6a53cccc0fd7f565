"""The timeline as CSV, with polars where it is installed (many times faster), else with pandas."""

from pathlib import Path

from distdbg.analyze.merge import Timeline
from distdbg.export.frame import to_polars


def write_csv(timeline: Timeline, columns: tuple[str, ...], path: Path) -> None:
    """Write a CSV file with a header. Raises OSError."""
    frame = to_polars(timeline, columns)
    if frame is not None:
        frame.write_csv(path)
        return
    from distdbg.analyze.timeline import to_pandas

    to_pandas(timeline, columns).to_csv(path, index=False)
