"""Compiles the native recorder and finds what was compiled. Imports no torch: `find` asks files alone.

A build is named after all that must fit: the source's hash, torch's version and C++ ABI, Python's ABI, the machine.
What does not fit is not found; so a cached build can't be loaded into a torch that it was not made for.
"""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distdbg.errors import BuildError

SOURCE = Path(__file__).with_name("recorder.cpp")
MODULE = "distdbg_native"
BUILD_S = 900  # a compiler that takes longer hangs

_SMOKE = """
import os, sys, tempfile
from pathlib import Path
import torch
import distdbg
from distdbg.native import load
load.PATH = Path(sys.argv[1])
os.environ["DISTDBG_RECORDER"] = "native"
with tempfile.TemporaryDirectory() as place:
    distdbg.start(place)
    x = torch.ones(3, requires_grad=True)
    ((x * 2).exp() + 1).sum().backward()
    distdbg.stop()
    events = distdbg.load(place)["event"].tolist()
    assert events.count("prehook") == events.count("posthook") == 5, events
    assert x.grad is not None and x.grad.allclose(2 * torch.tensor(2.0).exp())
"""


def cache_folder() -> Path:
    """Where builds lie: DISTDBG_NATIVE_DIR, else distdbg/native in the user's cache."""
    given = os.environ.get("DISTDBG_NATIVE_DIR")
    if given:
        return Path(given).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distdbg" / "native"


def torch_version() -> str:
    """The installed torch's version, without importing it; "" where there is none."""
    folder = _torch_folder()
    try:
        text = (folder / "version.py").read_text(encoding="utf-8") if folder is not None else ""
    except OSError:
        return ""
    found = re.search(r"""^__version__ = ['"]([^'"]+)""", text, re.M)
    return found.group(1) if found else ""


def file_name() -> str:
    """The name of a build that fits this torch, Python and machine."""
    torch_folder = _torch_folder()
    library = torch_folder / "lib" / "libtorch_python.so" if torch_folder else None
    size = library.stat().st_size if library is not None and library.exists() else 0
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    # The library's size tells two builds of one version apart (CPU and CUDA, both C++ ABIs).
    torch = f"torch{torch_version()}-{size:x}"
    return f"{MODULE}-{source}-{torch}{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def find() -> Path | None:
    """The build that fits, None where there is none."""
    path = cache_folder() / file_name()
    return path if path.is_file() else None


def stale() -> list[Path]:
    """Builds that do not fit this torch, Python or source."""
    name = file_name()
    return sorted(path for path in cache_folder().glob(f"{MODULE}-*.so") if path.name != name)


def build() -> tuple[Path, bool]:
    """(the build that fits, whether it was made just now). Raises BuildError with what to do."""
    folder = cache_folder()
    path = folder / file_name()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder):
            if path.is_file():
                return path, False
            _compile(path)
    except OSError as error:
        raise BuildError(
            f"cannot write {folder}: {error.strerror or error}; set DISTDBG_NATIVE_DIR to a folder that can be written"
        ) from error
    return path, True


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Ranks, or users of one home, that build at once wait for the first."""
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildError("no C++ compiler: install g++ or clang++ (or set CXX); until then recording goes on in Python")


def _torch_folder() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _compile(path: Path) -> None:
    compiler, torch_folder = _compiler(), _torch_folder()
    if torch_folder is None:
        raise BuildError("torch is not installed: install it, then run `distdbg build-native` again")
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        made = Path(place) / path.name
        command = [compiler, *flags(torch_folder), str(SOURCE), "-o", str(made), *libraries(torch_folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=BUILD_S)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{compiler} has not come to an end after {BUILD_S} s") from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line][:8] or done.stderr.splitlines()[-8:]
            raise BuildError("\n  ".join([f"{compiler} failed; recording goes on in Python. It said:", *lines]))
        _try_out(made)
        os.replace(made, path)


def flags(torch_folder: Path) -> list[str]:
    """What a torch extension is compiled with."""
    include = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include"]
    python = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    # What torch's own extensions are compiled with.
    text = (torch_folder / "utils" / "cpp_extension.py").read_text(encoding="utf-8")
    standard = max(re.findall(r"-std=c\+\+\d\d", text), default="-std=c++17")
    return [
        "-O2", "-g0", "-shared", "-fPIC", standard, "-fvisibility=hidden", "-D_GLIBCXX_USE_CXX11_ABI=1",
        f"-DDISTDBG_MODULE={MODULE}", *(f"-isystem{path}" for path in (*include, *sorted(python))),
    ]  # fmt: skip


def libraries(torch_folder: Path) -> list[str]:
    return [f"-L{torch_folder / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]


def _try_out(made: Path) -> None:
    """Record one backward in a process of its own: what can't be loaded, or crashes, is not installed."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DISTDBG_")}
    environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", _SMOKE, str(made)], capture_output=True, text=True, timeout=BUILD_S, env=environ
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise BuildError(f"what was compiled does not record: {last}; recording goes on in Python")
