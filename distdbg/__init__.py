"""distdbg: which rank of a distributed PyTorch job stalled or failed, in which backward node, and why the others wait.

Importing this loads nothing heavy and changes nothing; the names below are loaded when they are first used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "DistdbgError": "distdbg.errors",
    "compare": "distdbg.analyze.compare",
    "diagnose": "distdbg.analyze.verdict",
    "load": "distdbg.analyze.timeline",
    "load_bundle": "distdbg.replay.bundle",
    "start": "distdbg.record",
    "step": "distdbg.record",
    "stop": "distdbg.record",
    "trace": "distdbg.record.trace",
}

__all__ = ["DistdbgError", "compare", "diagnose", "load", "load_bundle", "start", "step", "stop", "trace"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'distdbg' has no attribute {name!r}")
    value = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
