"""What a bundle of a living node holds: its gradients, what it saved, its module's parameters, and its replays."""

import platform
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from distdbg.record import errors, replays
from distdbg.replay import node as alone
from distdbg.replay import values
from distdbg.replay.bundle import DTYPES
from distdbg.replay.describe import PLAIN, describe, short, size_of

# Attributes of every Function's ctx that are torch's own.
_CTX_OWN = frozenset(dir(torch.autograd.function.BackwardCFunction))


@dataclass
class Contents:
    """The JSON and the tensors of a bundle, and how many bytes of tensors may still be added."""

    left: int
    about: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, key: str, tensor: Any) -> dict[str, Any] | None:
        """A tensor's description, with the key under which its values are kept where they fit in."""
        about = describe(tensor)
        if about is None:
            return None
        size = size_of(tensor)
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or short(tensor.dtype) not in DTYPES:
            self.left_out.append(f"{key}: a tensor of this kind is not stored")
        elif tensor.device.type == "meta" or "error" in about:
            self.left_out.append(f"{key}: its values cannot be read")
        elif size > self.left:
            self.left_out.append(f"{key}: {size:,} bytes are more than --capture-mb leaves")
        else:
            self.left -= size
            self.tensors[key] = tensor
            about["key"] = key
        return about


def collect(
    node: Any, held: Any, error: Exception | None, module: torch.nn.Module | None, limit: int, deadline: float
) -> Contents:
    """Describe a node (of ``module``) and run it again. ``limit`` in bytes; ``deadline`` as time.monotonic()."""
    contents = Contents(limit)
    about = contents.about
    about["error"] = _error(error)
    about["inputs"] = [contents.add(f"inputs.{i}", grad) for i, grad in enumerate(held.grads)]
    about["expects"] = [alone.metadata_of(metadata) for metadata in node._input_metadata]
    about["returns"] = [alone.metadata_of(edge) for edge in alone.edges(node)]
    about["outputs"] = [contents.add(f"outputs.{i}", out) for i, out in enumerate(held.returned or ())]
    foreign = replays.why_foreign(node, failed=error is not None)
    about["function"] = _function(node)
    about["needs_input_grad"] = list(node.needs_input_grad) if alone.is_function(node) else None
    about["saved"] = {} if foreign else _saved(node, contents)
    about["context"] = _context(node, contents) if alone.is_function(node) else {}
    about["parameters"], about["buffers"] = {}, {}
    if module is not None:
        _add_module(contents, module)
    rng = held.rng if held.rng is not None else torch.get_rng_state()
    about["rng"] = contents.add("rng.cpu", rng)
    about["versions"] = _versions()
    found = replays.replay(node, held, error, foreign, limit, deadline)
    about.update(replay=found, outcome=replays.sentence(alone.name_of(node), found), left_out=contents.left_out)
    about["captured_unix_ns"] = time.time_ns()
    return contents


def _add_module(contents: Contents, module: torch.nn.Module) -> None:
    """The parameters and buffers of a node's module, its own ones only."""
    for part, table in (("parameters", module._parameters), ("buffers", module._buffers)):
        contents.about[part] = {
            name: contents.add(f"{part}.{name}", tensor) for name, tensor in table.items() if tensor is not None
        }


def outline(node: Any, held: Any, error: Exception) -> Contents:
    """As collect(), for when memory is short or the device is lost: shapes and dtypes, no value, no run."""
    contents = Contents(0)
    about = contents.about
    why = "memory was short or the device did not answer"
    about["error"] = _error(error)
    about["inputs"] = [describe(grad, values=False) for grad in held.grads]
    about["expects"] = [alone.metadata_of(metadata) for metadata in node._input_metadata]
    about["returns"] = [alone.metadata_of(edge) for edge in alone.edges(node)]
    about["function"] = _function(node)
    about["needs_input_grad"] = list(node.needs_input_grad) if alone.is_function(node) else None
    about.update(outputs=[], saved={}, context={}, parameters={}, buffers={}, rng=None, versions=_versions())
    about["replay"] = {"ran": False, "why_not": why, "kind": None, "runs": [], "probes": {}, "notes": []}
    about.update(outcome=f"{alone.name_of(node)} was not run again: {why}", left_out=[f"all values: {why}"])
    about["captured_unix_ns"] = time.time_ns()
    return contents


def _error(error: Exception | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {"type": errors.type_name(error), "message": errors.message(error), "title": errors.title(error)}


def _versions() -> dict[str, Any]:
    from distdbg import __version__

    return {
        "distdbg": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
    }


def _function(node: Any) -> dict[str, Any] | None:
    """Where a Function's class is written."""
    function = getattr(node, "_forward_cls", None)
    if function is None:
        return None
    code = getattr(getattr(function, "backward", None), "__code__", None)
    return {
        "module": str(function.__module__),
        "qualname": str(function.__qualname__),
        "file": code.co_filename if code is not None else None,
        "line": code.co_firstlineno if code is not None else None,
    }


def _saved(node: Any, contents: Contents) -> dict[str, Any]:
    """What a node saved, by name; an entry that cannot be read any more says why."""
    if alone.is_function(node):
        try:
            tensors = node.saved_tensors
        except Exception as error:
            return _raw(node, contents, errors.message(error))
        return {f"saved_{i}": contents.add(f"saved.{i}", tensor) for i, tensor in enumerate(tensors)}
    found: dict[str, Any] = {}
    for attribute in dir(node):
        if attribute.startswith("_saved_"):
            name = attribute.removeprefix("_saved_")
            try:
                found[name] = values.encode(getattr(node, attribute), f"saved.{name}", contents.add)
            except values.NotPlainError:
                contents.left_out.append(f"saved {name}: no plain value")
            except Exception as error:
                found[name] = _unreadable(getattr(node, f"_raw{attribute}", None), errors.message(error))
    return found


def _raw(node: Any, contents: Contents, why: str) -> dict[str, Any]:
    try:
        return {f"saved_{i}": _unreadable(raw, why) for i, raw in enumerate(node._raw_saved_tensors)}
    except Exception:
        contents.left_out.append(f"saved tensors: {why[:200]}")
        return {}


def _unreadable(raw: Any, why: str) -> dict[str, Any]:
    """A saved tensor that torch does not hand out any more (changed in place, freed): as it is now, described only."""
    data = getattr(raw, "data", None)
    about = describe(data) if isinstance(data, torch.Tensor) else None
    return {"unreadable": why[:300], "now": about}


def _context(node: Any, contents: Contents) -> dict[str, Any]:
    """The plain values (and tensors) that a Function's forward put on ctx."""
    found: dict[str, Any] = {}
    for name, value in vars(node).items():
        if name in _CTX_OWN or name.startswith("__"):
            continue
        try:
            found[name] = values.encode(value, f"context.{name}", contents.add)
        except values.NotPlainError as error:
            contents.left_out.append(f"ctx.{name}: {error}")
    return found
