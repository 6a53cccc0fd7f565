"""A recording in this process, and its events."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

import distdbg


@pytest.fixture
def recording(run_dir: Path) -> Iterator[Callable[[], pd.DataFrame]]:
    """Recording is on; calling the fixture stops it and gives the events without the watchdog's."""
    distdbg.start(run_dir)

    def events() -> pd.DataFrame:
        distdbg.stop()
        found = distdbg.load(run_dir)
        return found[~found["event"].isin(["heartbeat", "stall", "gc_begin", "gc_end"])]

    yield events
    distdbg.stop()
