"""The native recorder for tests: built once, and kept in the system's temporary folder for the next run."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from distdbg.errors import BuildError
from distdbg.native import build

FOLDER = Path(tempfile.gettempdir()) / f"distdbg-tests-native-{os.getuid()}"


@contextmanager
def cache() -> Iterator[Path]:
    """DISTDBG_NATIVE_DIR is the tests' own folder."""
    with mock.patch.dict(os.environ, {"DISTDBG_NATIVE_DIR": str(FOLDER)}):
        yield FOLDER


def built() -> Path:
    """The native recorder, compiled if need be; skips the test where there is no compiler."""
    with cache():
        try:
            return build.build()[0]
        except BuildError as error:
            if "no C++ compiler" in str(error):
                pytest.skip(str(error))
            raise
