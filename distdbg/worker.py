"""What the launcher starts on each rank: set up recording, then run the user's script as `__main__`.

    DISTDBG_RUN_DIR=DIR python -m distdbg.worker SCRIPT [ARGS]
    DISTDBG_RUN_DIR=DIR python -m distdbg.worker -m MODULE [ARGS]

Works under any launcher that exports ranks (torchrun, Slurm, Open MPI). torch is not imported here: its
hooks are put in place at the moment the script has imported it, so that what a script sets up before
(environment variables, say) still counts.
"""

import importlib.abc
import importlib.util
import io
import json
import os
import runpy
import sys
import threading
import time
import traceback
import zipfile
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from distdbg.errors import DistdbgError, say
from distdbg.record import errors
from distdbg.record.session import Kind, Session, Settings, open_session, record_exception

_WATCHED = ("torch", "torch.distributed.checkpoint")


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls back when one of a few modules has been imported; leaves finding and loading to the others."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._looking = threading.local()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        # Looking for a module (`importlib.util.find_spec("torch")`) is not yet importing it: each look finds us anew.
        if name not in _WATCHED or getattr(self._looking, "name", "") == name:
            return None
        self._looking.name = name  # the look-up below comes back here
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking.name = ""
        if spec is not None and spec.loader is not None and name not in sys.modules:
            spec.loader = _Loader(self._session, spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Another's loader, whose whole interface it shows, that tells when the module has been executed."""

    def __init__(self, session: Session, loader: Any) -> None:
        self._session = session
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._session.active:
            attach(self._session, module.__name__)


def attach(session: Session, module: str) -> None:
    """Put hooks in place for a module just imported. A fault of our own stops recording, nothing else."""
    try:
        if module == "torch":
            session.attach_torch()
        else:
            for part in session.parts:
                if hasattr(part, "imported"):
                    part.imported(module)
    except Exception as error:
        session.failed(error)


def _compile(path: str) -> CodeType:
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _new_main(**names: Any) -> ModuleType:
    """A `__main__` for the script, which stays until the process ends: exit handlers may pickle its classes."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __spec__=None, __cached__=None)
    main.__dict__.update(names)
    sys.modules["__main__"] = main
    return main


def _search_first(place: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # python -P, PYTHONSAFEPATH: the user wants no such entry
        sys.path[0] = place


def run_script(path: str, argv: list[str]) -> None:
    """Run a script file, or a directory or archive with a `__main__.py`, as `python path argv...` would."""
    sys.argv = [path, *argv]
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        del sys.path[0:1]
        runpy.run_path(path, run_name="__main__")
        return
    _search_first(os.path.dirname(os.path.realpath(path)))
    full = os.path.abspath(path)
    main = _new_main(__file__=full, __loader__=SourceFileLoader("__main__", full))
    exec(_compile(full), main.__dict__)  # noqa: S102 - running the user's script is what this is for


def run_module(name: str, argv: list[str]) -> None:
    """Run a module as `python -m name argv...` would."""
    sys.argv = ["-m", *argv]
    _search_first(os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        sys.argv = [name, *argv]
        runpy.run_module(name, run_name="__main__", alter_sys=True)  # says what is wrong in Python's words
        return
    sys.argv[0] = spec.origin or name
    main = _new_main(
        __spec__=spec, __file__=spec.origin, __loader__=loader, __package__=spec.parent, __cached__=spec.cached
    )
    exec(code, main.__dict__)  # noqa: S102 - running the user's module is what this is for


def _strip(error: BaseException) -> None:
    """Take this file's and runpy's frames off the top of a traceback: the user's script comes first."""
    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename.startswith(errors.PACKAGE) or "runpy" in trace.tb_frame.f_code.co_filename
    ):
        trace = trace.tb_next
    error.__traceback__ = trace


def _error_file(error: BaseException) -> None:
    """Tell torchrun as torch's own `@record` does, unless the script has done so itself."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    about = {"py_callstack": text, "timestamp": str(int(time.time()))}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": errors.title(error), "extraInfo": about}}, file)
    except OSError:
        pass


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _record_end(session: Session | None, error: BaseException | None) -> None:
    if session is None or not session.active:
        return
    way, code = "end of script", 0
    if isinstance(error, SystemExit):
        way, code = "sys.exit", _exit_code(error)
    elif error is not None:
        record_exception(session, error)
        way, code = "exception", 1
    session.emit(Kind.EXIT, seq=code & 0xFFFF, name=session.intern("text", way), module=session.module_id())


def _begin() -> Session | None:
    try:
        session = open_session(Settings.from_environ())
    except DistdbgError as error:
        say(f"distdbg: not recording: {error}")
        return None
    except Exception as error:  # no thread to be had, no current directory, ...: the job runs all the same
        say(f"distdbg: not recording: {errors.title(error)}")
        return None
    if "torch" in sys.modules:
        attach(session, "torch")
    sys.meta_path.insert(0, _AfterImport(session))
    return session


def main(argv: list[str]) -> None:
    """Run the script; it ends as it would without distdbg (exit code, traceback, signal)."""
    if not argv or (argv[0] == "-m" and len(argv) < 2):
        print("usage: python -m distdbg.worker SCRIPT [ARGS] | -m MODULE [ARGS]", file=sys.stderr)
        sys.exit(2)
    session = _begin()
    try:
        if argv[0] == "-m":
            run_module(argv[1], argv[2:])
        else:
            run_script(argv[0], argv[1:])
    except BaseException as error:
        _record_end(session, error)
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            raise
        _strip(error)
        _error_file(error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    _record_end(session, None)


if __name__ == "__main__":
    main(sys.argv[1:])
