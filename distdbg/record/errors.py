"""What an exception was and where it came from, from its traceback; no torch is needed for it."""

import os
import sys
import sysconfig
import traceback
from types import CodeType, FrameType, TracebackType
from typing import Any

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = tuple(
    os.path.abspath(path) + os.sep
    for path in {sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
)
MAX_TEXT = 500

# Whose code an exception passed through, innermost first; the first of these that matches wins.
_ORIGINS = (
    ("data", ("torch/utils/data/",)),
    ("checkpoint", ("torch/serialization.py", "torch/distributed/checkpoint/")),
    ("optimizer", ("torch/optim/",)),
    ("collective", ("torch/distributed/",)),
)

_user_code: dict[CodeType, bool] = {}


def is_user_code(code: CodeType) -> bool:
    """Whether code is the user's: neither ours, nor the standard library's, nor an installed package's."""
    known = _user_code.get(code)
    if known is None:
        name = code.co_filename
        library = name.startswith(("<", PACKAGE))
        library = library or any(name.startswith(root) for root in _LIBRARY) or "site-packages" in name
        known = _user_code[code] = not library
    return known


def short_source(filename: str, line: int) -> str:
    """ "train.py:41": the file relative to the current directory or the script's, where it lies below one of them."""
    # Not sys.argv[0]: it may be relative, and the script have changed its directory.
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    for base in (os.curdir, os.path.dirname(script) if isinstance(script, str) and script else os.curdir):
        try:
            relative = os.path.relpath(filename, base)
        except (OSError, ValueError):
            continue
        if not relative.startswith(".."):
            return f"{relative}:{line}"
    return f"{filename}:{line}"


def current_directory() -> str:
    """The current directory, "" where it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost of the user's frames, from ``frame`` outwards."""
    while frame is not None and not is_user_code(frame.f_code):
        frame = frame.f_back
    return frame


def caller_source(depth: int = 1) -> str:
    """Where the user's code is, as "file:line"; "" where there is none."""
    frame = user_frame(sys._getframe(depth))
    return short_source(frame.f_code.co_filename, frame.f_lineno) if frame else ""


def own_fault(error: BaseException) -> bool:
    """Whether an exception arose in our own code: its innermost frame is ours.

    A signal handler of the user's can raise while our code runs; that exception is not ours to catch.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE)


def type_name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def message(error: BaseException) -> str:
    """The exception's text, shortened; a broken ``__str__`` gives a note instead."""
    try:
        text = str(error)
    except Exception as broken:  # the user's own __str__ may raise anything
        text = f"<no text: {type(broken).__name__} in __str__>"
    text = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
    return text.encode("utf-8", "backslashreplace").decode()  # lone surrogates can't be written anywhere


def title(error: BaseException) -> str:
    """ "ValueError: level must be positive"."""
    text = message(error)
    return f"{type_name(error)}: {text}" if text else type_name(error)


def frames(trace: TracebackType | None) -> list[tuple[str, int, str]]:
    """(file, line, function) of a traceback, outermost first, without distdbg's own frames."""
    found = []
    for frame, line in traceback.walk_tb(trace):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            found.append((frame.f_code.co_filename, line, frame.f_code.co_name))
    return found


def describe(error: BaseException) -> dict[str, Any]:
    """type, source (the user's innermost line), where (the innermost line), origin (whose code raised).

    ``origin`` is "data", "checkpoint", "optimizer", "collective" or "" and says in whose library code the
    innermost frames lie; a DataLoader worker's death is "data" wherever its signal handler raised.
    """
    found = frames(error.__traceback__)
    source, origin = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_user_code(frame.f_code):
            source = short_source(frame.f_code.co_filename, line)
    for filename, _, function in reversed(found):
        origin = next((name for name, parts in _ORIGINS if any(part in filename for part in parts)), "")
        if origin or not _is_library(filename):
            break
        if function == "_engine_run_backward":
            break
    where = "{}:{} in {}".format(*found[-1]) if found else ""
    return {"type": type_name(error), "source": source, "where": where, "origin": origin, "causes": _causes(error)}


def _causes(error: BaseException) -> list[str]:
    """The exceptions behind it (`raise ... from`, or raised while handling one), nearest first."""
    found: list[str] = []
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while behind is not None and len(found) < 5:
        found.append(title(behind))
        behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)
    return found


def _is_library(filename: str) -> bool:
    return filename.startswith("<") or "site-packages" in filename or any(filename.startswith(r) for r in _LIBRARY)


def report(error: BaseException) -> dict[str, Any]:
    """All of it, for exception.json: also the formatted traceback without distdbg's own frames."""
    summary = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = summary
    while part is not None:
        part.stack = traceback.StackSummary.from_list([f for f in part.stack if not f.filename.startswith(PACKAGE)])
        part = part.__cause__ or part.__context__
    return {
        **describe(error),
        "message": message(error),
        "frames": [list(frame) for frame in frames(error.__traceback__)],
        "traceback": "".join(summary.format()),
    }
