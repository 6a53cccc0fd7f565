"""A bundle's node run again in a process without the job.

A C++ node by its operation, rebuilt from what it saved; a Python Function by its backward, on a stand-in
for ctx, and only from a file that the caller names: a bundle alone never has code run.
"""

import contextlib
import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from distdbg.errors import BundleError
from distdbg.replay import node as alone
from distdbg.replay.bundle import Bundle
from distdbg.replay.context import StandInContext, backward_of
from distdbg.replay.describe import describe
from distdbg.replay.operations import CannotRebuildError, gradients

# Errors about the graph that the node hung in: a bundle holds no graph.
_OF_THE_GRAPH = ("modified by an inplace operation", "backward through the graph a second time")
RTOL = {"float64": 1e-9, "float32": 1e-5, "float16": 1e-2, "bfloat16": 2e-2}


@dataclass
class Result:
    """What running a bundle's node again came to.

    ``ran`` says whether it really ran; ``same`` whether the outcome was the recorded one (None: not known).
    """

    ran: bool
    same: bool | None
    summary: str
    how: str | None = None
    error: dict[str, Any] | None = None
    outputs: list[dict[str, Any] | None] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rerun(bundle: Bundle, source: Path | None = None, *, debug: bool = False) -> Result:
    """Run the node of a bundle again.

    ``source`` is the user's file (or a folder with it) that defines a custom Function; it is imported, so
    its top level is run. ``debug`` runs backward under pdb. Raises BundleError for a damaged bundle or a
    source that does not define the Function.
    """
    about = bundle.about
    bundle.inputs, bundle.saved, bundle.context  # noqa: B018 - damage shows before anything is run
    for entry in about["inputs"]:
        if entry is not None and entry.get("key") is None:
            return _not_run(f"a gradient that came in is described only: {_why_no_values(entry)}")
    never = alone.why_never(SimpleNamespace(name=lambda: about["node"]))
    if never is not None:
        return _not_run(never)
    if about["function"] is not None:
        return _function(bundle, source, debug)
    reason = _of_the_graph(bundle)
    if reason is not None:
        return _not_run(reason)
    places = about.get("returns") or []
    try:
        with alone.alone():
            outputs = gradients(about["node"], bundle.saved, bundle.inputs, places)
            outputs = alone.checked(about["node"], outputs, [_place(place) for place in places])
    except CannotRebuildError as error:
        return _not_run(str(error))
    except alone.RefusedError as error:
        return _not_run(str(error))
    except Exception as error:
        return _raised(bundle, error, "operation rebuilt")
    return _returned(bundle, outputs, "operation rebuilt")


def _why_no_values(entry: dict[str, Any]) -> str:
    if "class" in entry:
        return f"it was a {entry['class']}, not a plain tensor"
    return "it was sparse" if "layout" in entry else "it was larger than --capture-mb, or memory was short"


def _not_run(why: str) -> Result:
    return Result(False, None, f"not run: {why}")


def _of_the_graph(bundle: Bundle) -> str | None:
    message = str((bundle.about["error"] or {}).get("message", ""))
    if any(part in message for part in _OF_THE_GRAPH):
        return "its error is about the graph that it hung in (what was done to its tensors), which no bundle holds"
    lost = [name for name, entry in bundle.about["saved"].items() if isinstance(entry, dict) and "unreadable" in entry]
    return f"what it had saved could not be read any more ({', '.join(lost)})" if lost else None


def _place(place: Any) -> Any:
    """A description as metadata, for the engine's check."""
    if not isinstance(place, dict):
        return None
    dtype = getattr(torch, str(place.get("dtype")), None)
    if not isinstance(dtype, torch.dtype) or not isinstance(place.get("shape"), list):
        return None
    return SimpleNamespace(shape=tuple(place["shape"]), dtype=dtype, device=torch.device("cpu"))


# ---- a custom Function


def _function(bundle: Bundle, source: Path | None, debug: bool) -> Result:
    about = bundle.about
    where = f"{about['function'].get('file')}:{about['function'].get('line')}"
    if source is None:
        return _not_run(f"its backward is your code ({where}); name it with --source FILE_OR_DIR to have it run")
    reason = _of_the_graph(bundle)
    if reason is not None:
        return _not_run(reason)
    function = _load(bundle, source)
    needs = about.get("needs_input_grad") or []
    context = StandInContext(list(bundle.saved.values()), needs, bundle.context)
    expected = [_place(entry) for entry in about["expects"]]
    grads = [
        alone.zeros(expected[i]) if grad is None and i < len(expected) and expected[i] is not None else grad
        for i, grad in enumerate(bundle.inputs)
    ]
    backward = backward_of(function)
    how = "backward of your code, on a stand-in for ctx"
    left_out: set[str] = set()
    try:
        with _one_rank(bundle), alone.alone(leave_out=about["error"] is not None) as left_out:
            result = _debugged(backward, context, grads) if debug else backward(context, *grads)
            outputs = alone.counted(about["node"], result, needs)
            wanted = iter([_place(place) for place in about.get("returns") or [] if place is not None])
            outputs = alone.checked(about["node"], outputs, [next(wanted, None) if need else None for need in needs])
    except alone.RefusedError as error:
        return _not_run(str(error))
    except Exception as error:
        found = _raised(bundle, error, f"{how}, without {', '.join(sorted(left_out))}" if left_out else how)
        if left_out and not found.same:
            return _not_run(
                f"it issues a collective ({', '.join(sorted(left_out))}), and there are no other ranks here"
            )
        return found
    if left_out:
        return _not_run(f"it issues a collective ({', '.join(sorted(left_out))}), and there are no other ranks here")
    return _returned(bundle, outputs, how)


@contextlib.contextmanager
def _one_rank(bundle: Bundle) -> Iterator[None]:
    """A process group of this process alone, where the node issued collectives: they are left out, none is sent."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    runs = bundle.about["replay"].get("runs") or [{}]
    issues = "collective" in str(bundle.about["replay"].get("why_not")) or any(run.get("left_out") for run in runs)
    if not issues or not dist.is_available() or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _debugged(backward: Any, context: Any, grads: Sequence[Any]) -> Any:
    import pdb

    debugger = pdb.Pdb()
    try:
        return debugger.runcall(backward, context, *grads)
    except Exception as error:
        print(f"{type(error).__name__}: {error}\nentering the debugger where it was raised; q leaves it")
        debugger.reset()
        debugger.interaction(None, error.__traceback__)
        raise


def _load(bundle: Bundle, source: Path) -> Any:
    """The Function's class, from the caller's file. Raises BundleError."""
    function = bundle.about["function"]
    names = str(function.get("qualname", "")).split(".")
    if not all(name.isidentifier() and not name.startswith("__") for name in names):
        raise BundleError(f"{bundle.path}: {'.'.join(names)[:80]} is defined within a function and cannot be imported")
    path = _source_file(bundle, source)
    module = _import(path)
    found: Any = module
    for name in names:
        found = getattr(found, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.autograd.Function)):
        raise BundleError(f"{path} defines no torch.autograd.Function named {'.'.join(names)[:80]}; give its file")
    return found


def _source_file(bundle: Bundle, source: Path) -> Path:
    if source.is_file():
        return source
    if not source.is_dir():
        raise BundleError(f"--source {source}: no such file or folder")
    wanted = Path(str(bundle.about["function"].get("file") or "")).name
    if not wanted.endswith(".py"):
        raise BundleError(f"{bundle.path} does not say in which file its Function is; give the file with --source")
    found = sorted(path for path in source.rglob("*.py") if path.name == wanted and path.is_file())
    if len(found) != 1:
        raise BundleError(f"{source} has {len(found)} files named {wanted}; give the right one with --source")
    return found[0]


def _import(path: Path) -> ModuleType:
    name = f"_distdbg_replayed_{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BundleError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.absolute().parent))  # its neighbours, as when it ran
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise BundleError(
            f"{path} cannot be imported ({type(error).__name__}: {error}, {last.filename}:{last.lineno}); "
            'put what is to run under `if __name__ == "__main__":`'
        ) from error
    finally:
        sys.path.remove(str(path.absolute().parent))
    return module


# ---- outcomes


def _raised(bundle: Bundle, error: Exception, how: str) -> Result:
    kind = type(error)
    plain = kind.__module__ == "builtins" or kind.__module__.startswith("_distdbg_replayed_")
    name = kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"
    found = {"type": name, "message": str(error)[:500]}
    recorded = bundle.about["error"]
    if recorded is None:
        return Result(True, False, f"ran, and raised {name}: {error}; in the job it did not", how, found)
    if alone.same_error(found, {"type": str(recorded.get("type")), "message": str(recorded.get("message"))}):
        return Result(True, True, "ran, and failed with the same error as in the job", how, found)
    return Result(True, False, f"ran, and failed with another error than in the job: {name}: {error}", how, found)


def _returned(bundle: Bundle, outputs: Sequence[Any], how: str) -> Result:
    described = [describe(output) for output in outputs]
    if bundle.about["error"] is not None:
        summary = "ran, and did not fail: the error does not lie in the node and its values alone"
        return Result(True, False, summary, how, None, described)
    pairs = [(new, old) for new, old in zip(outputs, bundle.outputs, strict=False) if old is not None]
    if not pairs:
        return Result(
            True, None, "ran; no gradients that it returned in the job are kept to compare", how, None, described
        )
    if all(alone.equal(new, old) for new, old in pairs):
        return Result(True, True, "ran, and returned the same gradients bit for bit", how, None, described)
    if all(_close(new, old) for new, old in pairs):
        return Result(True, True, "ran, and returned the same gradients but for rounding", how, None, described)
    return Result(True, False, "ran, and returned other gradients than in the job", how, None, described)


def _close(new: Any, old: Any) -> bool:
    if new is None or new.shape != old.shape:
        return False
    scale = float(old.abs().nan_to_num(0, 0, 0).max()) if old.numel() else 0.0
    rtol = RTOL.get(str(old.dtype).removeprefix("torch."), 0.0)
    return bool(torch.allclose(new.to(old.dtype), old, rtol=rtol, atol=rtol * scale, equal_nan=True))
