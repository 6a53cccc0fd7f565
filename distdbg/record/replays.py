"""A failed node run again in the process it failed in, and what that says: the same error, another, or none.

Deterministic or flaky; and, where it can be told, whether values are to blame: the node is run with its
non-finite inputs replaced, and in float64.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from distdbg.record import errors
from distdbg.replay import node as alone
from distdbg.replay import operations
from distdbg.replay.context import StandInContext, backward_of
from distdbg.replay.describe import size_of

TIMES = 3


def why_foreign(node: Any, failed: bool) -> str | None:
    """Why a node's saved tensors are not read: they are unpacked by hooks whose work must not be done twice."""
    try:
        raws = list(node._raw_saved_tensors) if alone.is_function(node) else _raw_of(node)
    except RuntimeError:
        return None  # freed: a replay will say so
    for raw in raws:
        hook = getattr(raw, "unpack_hook", None)
        home = getattr(hook, "__module__", "") or ""
        if home.startswith("torch.utils.checkpoint"):
            return "its saved tensors come from a forward that is recomputed, which would run the module again"
        if hook is not None and not failed and home != "torch.autograd.graph":
            return "its saved tensors are unpacked by a hook of the user's"
    return None


def _raw_of(node: Any) -> list[Any]:
    found: list[Any] = []
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            raw = getattr(node, name)
            found.extend(raw if isinstance(raw, (tuple, list)) else [raw])
    return found


def replay(
    node: Any, held: Any, error: Exception | None, foreign: str | None, limit: int, deadline: float
) -> dict[str, Any]:
    """Run the node up to three times, then its variants; returns the bundle's ``replay``."""
    about: dict[str, Any] = {"ran": False, "why_not": None, "runs": [], "kind": None, "probes": {}, "notes": []}
    grads = [None if grad is None else grad.detach() for grad in held.grads]
    about["why_not"] = (
        alone.why_never(node)
        or foreign
        or ("it ran a backward of its own, which would add to gradients once more" if held.nested else None)
        or alone.plain(grads)
        or _too_large(node, grads, limit)
    )
    if about["why_not"] is not None:
        return about
    outside = _raised_outside(node, error)
    if outside:
        about["notes"].append(outside)
    original = None if error is None else {"type": errors.type_name(error), "message": errors.message(error)}
    for _ in range(TIMES):
        run = attempt(lambda: alone.call(node, _copies(grads)), original, held.returned)
        if run["outcome"] == "refused":
            about["why_not"] = run["error"]["message"]
            return about
        about["ran"] = True
        about["runs"].append(run)
        if time.monotonic() > deadline:
            break
    about["kind"] = _kind(about["runs"], original)
    if original is not None and about["kind"] != "flaky" and time.monotonic() < deadline:
        try:
            about["probes"] = probes(node, grads, original, limit, deadline)
        except Exception as fault:  # an operation that this kind of tensor does not have, say: the runs above stand
            about["probes"] = {"skipped": errors.title(fault)[:300]}
    return about


def attempt(call: Any, original: dict[str, Any] | None, returned: Any = None) -> dict[str, Any]:
    """One run: {"outcome": "same error" | "other error" | "no error" | "refused" | "equal" | "differs"}."""
    began = time.monotonic()
    left_out: set[str] = set()
    try:
        with alone.alone(_devices(), leave_out=original is not None) as left_out:
            outputs = call()
    except alone.RefusedError as refused:
        return {"outcome": "refused", "error": {"type": "RefusedError", "message": str(refused)}}
    except Exception as error:
        found = {"type": errors.type_name(error), "message": errors.message(error)}
        same = original is not None and alone.same_error(found, original)
        if left_out and not same:
            return _without(left_out)
        outcome = "same error" if same else "other error"
        seconds = round(time.monotonic() - began, 6)
        return {"outcome": outcome, "error": found, "seconds": seconds, "left_out": sorted(left_out)}
    if left_out:
        return _without(left_out)
    outcome = "no error"
    if returned is not None:
        pairs = list(zip(outputs, returned, strict=False))
        outcome = "equal" if all(alone.equal(a, b) for a, b in pairs if b is not None) else "differs"
    return {"outcome": outcome, "error": None, "seconds": round(time.monotonic() - began, 6)}


def _without(left_out: set[str]) -> dict[str, Any]:
    """Without what the other ranks give a run says nothing, unless it fails the same way all the same."""
    message = f"it issues a collective ({', '.join(sorted(left_out))})"
    return {"outcome": "refused", "error": {"type": "RefusedError", "message": message}}


def _devices() -> Sequence[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def _copies(grads: Sequence[Any]) -> list[Any]:
    """What a node receives it may change in place."""
    return [None if grad is None else grad.clone() for grad in grads]


def _too_large(node: Any, grads: Sequence[Any], limit: int) -> str | None:
    """Copies of what comes in and what goes out have to fit in three quarters of the limit; the node has the rest."""
    out = sum(
        torch.Size(edge.shape).numel() * torch.empty(0, dtype=edge.dtype).element_size()
        for edge in alone.edges(node)
        if edge is not None
    )
    size = sum(size_of(grad) for grad in grads) + out
    if size > limit * 3 // 4:
        return f"its gradients, in and out, have {size >> 20:,} MB, more than --capture-mb allows"
    return None


def _raised_outside(node: Any, error: Exception | None) -> str | None:
    """Says so where the exception came from Python code around the node: a hook of the user's, not its backward."""
    if error is None:
        return None
    found = errors.frames(error.__traceback__)
    engine = [i for i, (_, _, function) in enumerate(found) if function == "_engine_run_backward"]
    inside = found[engine[-1] + 1 :] if engine else []
    if not inside:
        return None
    code = getattr(getattr(getattr(node, "_forward_cls", None), "backward", None), "__code__", None)
    name = getattr(code, "co_filename", None)
    if alone.is_function(node) and any(file == name or "torch/autograd/function.py" in file for file, _, _ in inside):
        return None
    file, line, function = inside[-1]
    return f"the error was raised in {errors.short_source(file, line)} ({function}), which torch called around the node"


def _kind(runs: list[dict[str, Any]], original: dict[str, Any] | None) -> str:
    outcomes = [run["outcome"] for run in runs]
    if original is None:
        return "equal" if all(outcome == "equal" for outcome in outcomes) else "differs"
    if all(outcome == "same error" for outcome in outcomes):
        return "deterministic"
    if all(outcome == "other error" for outcome in outcomes):
        return "other error"
    return "flaky"


# ---- are values to blame?


def probes(node: Any, grads: Sequence[Any], original: dict[str, Any], limit: int, deadline: float) -> dict[str, Any]:
    """Runs with non-finite inputs replaced (each alone, then all), and one in float64, where those can be had."""
    found: dict[str, Any] = {}
    saved = _saved_of(node)
    everything = {f"gradient {i}": grad for i, grad in enumerate(grads)}
    everything.update({f"saved {name}": tensor for name, tensor in saved.items()})
    bad = [name for name, tensor in everything.items() if _non_finite(tensor)]
    if sum(size_of(tensor) for tensor in everything.values()) * 6 > limit:  # in float64 with copies
        return {"skipped": "copies of what comes in would need more than --capture-mb allows"}
    for names in [[name] for name in bad] + ([bad] if len(bad) > 1 else []):
        if time.monotonic() > deadline:
            break
        changed = {n: _cleaned(t) if n in names else t for n, t in everything.items()}
        found[f"finite: {', '.join(names)}"] = attempt(_variant(node, changed, saved), original)
    # In float64 NaN stays NaN: a wider type says something only where all values are finite.
    if not bad and any(_real(tensor) for tensor in everything.values()) and time.monotonic() < deadline:
        wide = {name: tensor.double() if _real(tensor) else tensor for name, tensor in everything.items()}
        call = _variant(node, wide, saved, wide=True)
        found["float64"] = attempt(call, original)
    return {name: run for name, run in found.items() if not _not_possible(run)}


def _not_possible(run: dict[str, Any]) -> bool:
    error = run["error"]
    return run["outcome"] == "refused" or (error is not None and error["type"].endswith("CannotRebuildError"))


def _real(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.is_floating_point()


def _non_finite(tensor: Any) -> bool:
    return _real(tensor) and tensor.numel() > 0 and not bool(torch.isfinite(tensor).all())


def _cleaned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)


def _saved_of(node: Any) -> dict[str, Any]:
    """What a node saved, tensors and other values; empty where it can't be read."""
    try:
        if alone.is_function(node):
            return {str(i): tensor for i, tensor in enumerate(node.saved_tensors)}
        names = [name for name in dir(node) if name.startswith("_saved_")]
        return {name.removeprefix("_saved_"): getattr(node, name) for name in names}
    except RuntimeError:
        return {}


def _variant(node: Any, changed: dict[str, Any], saved: dict[str, Any], wide: bool = False) -> Any:
    """A call of the node with other inputs: itself where only gradients differ, else a stand-in for it."""
    grads = [value for name, value in changed.items() if name.startswith("gradient ")]
    inside = {name: changed[f"saved {name}"] for name in saved}
    if not wide and all(inside[name] is saved[name] for name in saved):
        return lambda: alone.call(node, _copies(grads))
    if alone.is_function(node):
        return lambda: _stand_in(node, grads, list(inside.values()), wide)
    places = [alone.metadata_of(edge) for edge in alone.edges(node)]
    if wide:
        places = [None if place is None else {**place, "dtype": "float64"} for place in places]
    return lambda: operations.gradients(alone.name_of(node), inside, grads, places)


def _stand_in(node: Any, grads: Sequence[Any], saved: Sequence[Any], wide: bool) -> Any:
    expected = node._input_metadata
    filled = [alone.zeros(expected[i]) if grad is None else grad.clone() for i, grad in enumerate(grads)]
    attributes = {name: value for name, value in vars(node).items() if name.isidentifier()}
    if wide:
        attributes = {name: value.double() if _real(value) else value for name, value in attributes.items()}
    context = StandInContext(saved, node.needs_input_grad, attributes)
    name = alone.name_of(node)
    outputs = alone.counted(name, backward_of(node._forward_cls)(context, *filled), list(node.needs_input_grad))
    wanted = iter([edge for edge in alone.edges(node) if edge is not None])
    return alone.checked(name, outputs, [next(wanted, None) if need else None for need in node.needs_input_grad])


# ---- in words


def sentence(node: str, found: dict[str, Any]) -> str:
    """What the replays came to, for a person and for the verdict."""
    if not found["ran"]:
        return f"{node} was not run again: {found['why_not']}"
    times, kind = len(found["runs"]), found["kind"]
    if kind == "equal":
        return f"{node}, run again {times} times, returned the same gradients bit for bit"
    if kind == "differs":
        return f"{node}, run again {times} times, did not return the same gradients each time: it is not deterministic"
    if kind == "deterministic":
        left_out = found["runs"][0].get("left_out")
        how = f" (without its {', '.join(left_out)})" if left_out else ""
        text = f"{node} failed the same way in {times} of {times} runs alone{how}: the error is deterministic"
    elif kind == "other error":
        text = f"{node} failed in another way when it was run again alone ({_titles(found)[0]})"
    else:
        failed = sum(run["outcome"] != "no error" for run in found["runs"])
        text = (
            f"{node} failed in {failed} of {times} runs alone: the error is flaky, or depends on state around the node"
        )
    return "; ".join([text, *_blame(found["probes"]), *found["notes"]])


def _titles(found: dict[str, Any]) -> list[str]:
    return [f"{run['error']['type']}: {run['error']['message']}"[:200] for run in found["runs"] if run["error"]]


def _blame(found: dict[str, Any]) -> list[str]:
    parts = []
    finite = {name.removeprefix("finite: "): run for name, run in found.items() if name.startswith("finite: ")}
    cured = [name for name, run in finite.items() if run["outcome"] == "no error"]
    if cured:
        parts.append(f"with the non-finite values of {min(cured, key=len)} replaced by 0 it gives no error: "
                     "values are to blame")  # fmt: skip
    elif finite and all(run["outcome"] == "same error" for run in finite.values()):
        parts.append("it fails with its non-finite values replaced, too: they are not to blame")
    wide = found.get("float64")
    if wide is not None and wide["outcome"] == "no error":
        parts.append("in float64 it gives no error")
    elif wide is not None and wide["outcome"] == "same error":
        parts.append("it fails in float64, too")
    return parts
