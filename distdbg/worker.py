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
import time
import traceback
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from distdbg.errors import DistdbgError
from distdbg.record import errors
from distdbg.record.session import Kind, Session, Settings, open_session, record_exception

_WATCHED = ("torch", "torch.distributed.checkpoint")


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls back when one of a few modules has been imported; leaves finding and loading to the others."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loaders: dict[str, Any] = {}

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _WATCHED or name in self._loaders:
            return None
        self._loaders[name] = None  # the look-up below comes back here
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            del self._loaders[name]
            return None
        self._loaders[name] = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loaders[spec.name].create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        loader = self._loaders[name]
        if module.__spec__ is not None:
            module.__spec__.loader = loader
        module.__loader__ = loader
        loader.exec_module(module)
        if self._session.active:
            attach(self._session, name)


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
        return compile(file.read(), path, "exec")


def run_script(path: str, argv: list[str]) -> None:
    """Run a script file as `python path argv...` would."""
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __spec__=None, __cached__=None)
    sys.argv = [path, *argv]
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    sys.modules["__main__"] = main
    exec(_compile(path), main.__dict__)  # noqa: S102 - running the user's script is what this is for


def run_module(name: str, argv: list[str]) -> None:
    """Run a module as `python -m name argv...` would."""
    sys.argv = [name, *argv]
    sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


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
        print(f"distdbg: not recording: {error}", file=sys.stderr)
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
