"""Loads the native recorder into a process that has torch. Nothing is compiled here."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from distdbg.native import build
from distdbg.schema import EventKind

PATH: Path | None = None  # a build to load instead of the one in the cache


def load() -> Any:
    """The extension module, None where no build fits. Raises ImportError where one can't be loaded.

    torch must have been imported: the extension links to its libraries.
    """
    found = PATH or build.find()
    if found is None:
        return None
    known: ModuleType | None = sys.modules.get(build.MODULE)
    if known is not None:
        return known
    loader = importlib.machinery.ExtensionFileLoader(build.MODULE, str(found))
    spec = importlib.util.spec_from_file_location(build.MODULE, found, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    module.set_kinds(int(EventKind.PREHOOK), int(EventKind.POSTHOOK), int(EventKind.BACKWARD_FINAL))
    sys.modules[build.MODULE] = module
    return module
