"""The timeline as Parquet, with polars where it is installed, else with pandas (which needs pyarrow)."""

from pathlib import Path

from distdbg.analyze.merge import Timeline
from distdbg.errors import DistdbgError
from distdbg.export.frame import to_polars


def write_parquet(timeline: Timeline, columns: tuple[str, ...], path: Path) -> None:
    """Write a Parquet file. Raises OSError, and DistdbgError where no library can write one."""
    frame = to_polars(timeline, columns)
    if frame is not None:
        frame.write_parquet(path)
        return
    from distdbg.analyze.timeline import to_pandas

    try:
        to_pandas(timeline, columns).to_parquet(path, index=False)
    except ImportError as error:
        raise DistdbgError("Parquet needs polars or pyarrow: pip install 'distdbg[fast]', or write CSV") from error
