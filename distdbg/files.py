"""Small files of a run directory: written at once, read whatever they hold."""

import json
import os
import threading
from pathlib import Path
from typing import Any

from distdbg import schema


def replace_text(path: Path, text: str) -> None:
    """Write a file's text in place of what is there, all at once. Raises OSError, and leaves nothing then."""
    temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_verdict(run_dir: Path) -> dict[str, Any]:
    """RUN_DIR/verdict.json, {} where there is none that can be read."""
    try:
        found = json.loads((run_dir / schema.VERDICT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
