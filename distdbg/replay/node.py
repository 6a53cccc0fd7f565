"""One node called alone: as the engine calls it, with the checks that the engine makes of what it returns.

A call fires no hooks and runs no other node. What a replay must not do is refused while it runs:
collectives (the other ranks take no part in them) and backward passes that write to ``.grad``.
"""

import re
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distdbg.replay.describe import PLAIN, short

_REFUSED_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
_NEVER = {
    "AccumulateGrad": "it would add to the parameter's gradient once more",
    "CheckpointFunctionBackward": "it runs a backward of its own, which would add to gradients once more",
    "CompiledFunctionBackward": "compiled code may have reused the memory of what it saved",
}
_FUNCTION_BASE: Any = torch._C._FunctionBase

replaying = threading.local()  # .on is True in a thread that runs a node again


class RefusedError(Exception):
    """A node did, when called alone, what a replay must not do."""


def refuse_accumulation(options: dict[str, Any]) -> None:
    """A backward within a replay may compute gradients, and not add them to any ``.grad``. Raises RefusedError."""
    if options.get("accumulate_grad"):
        raise RefusedError("it runs a backward of its own, which would add to gradients once more")


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses collectives, or leaves them out: the rank's own values stand for the group's, and are done at once."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its whole compiler at the first call: 70 MB, in a process that fails

    def __init__(self, leave_out: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._leave_out = leave_out
        self.left_out: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in _REFUSED_NAMESPACES:
            return func(*args, **(kwargs or {}))
        operator = func.__name__.split(".")[0]
        name, stand_in = _COLLECTIVES.get(operator, (operator.strip("_"), None))
        done = getattr(getattr(torch._C, "_distributed_c10d", None), "FakeWork", None)
        if not self._leave_out or stand_in is None or done is None or func.namespace != "c10d":
            raise RefusedError(f"it issues a collective ({name})")
        stand_in(*args[:2])
        self.left_out.add(name)
        return args[0], done().boxed()


def _as_it_is(tensors: Any, group: Any) -> None:
    """The rank's own values stay."""


def _repeated(output: torch.Tensor, own: torch.Tensor) -> None:
    output.view(-1, own.numel()).copy_(own.reshape(1, -1))


def _own_part(output: torch.Tensor, whole: torch.Tensor) -> None:
    output.copy_(whole.reshape(-1)[: output.numel()].view_as(output))


_COLLECTIVES: dict[str, tuple[str, Any]] = {  # operator -> (name, what stands in for it)
    "allreduce_": ("all_reduce", _as_it_is),
    "allreduce_coalesced_": ("all_reduce", _as_it_is),
    "broadcast_": ("broadcast", _as_it_is),
    "_allgather_base_": ("all_gather", _repeated),
    "_reduce_scatter_base_": ("reduce_scatter", _own_part),
}


class alone:  # noqa: N801 - a context manager, named for what it reads like
    """For the time of a replay: no gradients recorded, the random state put back, nothing that reaches outside."""

    def __init__(self, devices: Sequence[int] = (), *, leave_out: bool = False) -> None:
        self._devices = devices
        self._leave_out = leave_out

    def __enter__(self) -> set[str]:
        """Returns the names of the collectives left out so far."""
        guard = _Guard(self._leave_out)
        self._parts: list[Any] = [
            torch.random.fork_rng(devices=self._devices, enabled=True),
            torch.set_grad_enabled(False),
            guard,
        ]
        replaying.on = True
        for part in self._parts:
            part.__enter__()
        return guard.left_out

    def __exit__(self, *about: Any) -> None:
        for part in reversed(self._parts):
            part.__exit__(*about)
        replaying.on = False


def name_of(node: Any) -> str:
    return str(node.name()).removeprefix("torch::autograd::")


def is_function(node: Any) -> bool:
    """Whether a node is a Python Function's (user's or library's), not a C++ one."""
    return isinstance(node, _FUNCTION_BASE)


def why_never(node: Any) -> str | None:
    """Why this node is never run again, or None."""
    name = name_of(node)
    if name in _NEVER:
        return _NEVER[name]
    function = getattr(node, "_forward_cls", None)
    home = str(getattr(function, "__module__", ""))
    if home.startswith(("torch.distributed.fsdp", "torch.utils.checkpoint", "torch._functorch", "torch._dynamo")):
        return f"it belongs to {home}, which does more in it than compute gradients"
    if name.startswith("CheckpointFunction"):
        return _NEVER["CheckpointFunctionBackward"]
    return None


def call(node: Any, grads: Sequence[Any], *, materialize: bool = True) -> tuple[Any, ...]:
    """What the node returns for these gradients, checked and reduced as the engine does. Raises what it raises."""
    if not is_function(node):
        result = node(*grads)
        outputs = result if isinstance(result, tuple) else (result,)
        return checked(name_of(node), outputs, edges(node))
    expected = node._input_metadata
    if materialize:
        grads = [zeros(expected[i]) if grad is None and i < len(expected) else grad for i, grad in enumerate(grads)]
    outputs = counted(name_of(node), node.apply(*grads), list(node.needs_input_grad))
    wanted = iter([edge for edge in edges(node) if edge is not None])
    places = [next(wanted, None) if needed else None for needed in node.needs_input_grad]
    return checked(name_of(node), outputs, places)


def edges(node: Any) -> list[Any]:
    """For each gradient that a node returns what the next node expects: its input's metadata, or None."""
    found = []
    for following, index in node.next_functions:
        metadata = following._input_metadata if following is not None else ()
        found.append(metadata[index] if index < len(metadata) else None)
    return found


def zeros(metadata: Any) -> torch.Tensor:
    return torch.zeros(tuple(metadata.shape), dtype=metadata.dtype, device=metadata.device)


def counted(name: str, result: Any, needs: Sequence[bool]) -> tuple[Any, ...]:
    """A Function's results as a tuple with one entry per argument of forward; torch's own errors where they are not."""
    outputs = result if isinstance(result, tuple) else (result,)
    while len(outputs) > len(needs) and outputs[-1] is None:
        outputs = outputs[:-1]
    if len(outputs) != len(needs):
        raise RuntimeError(
            f"function {name} returned an incorrect number of gradients (expected {len(needs)}, got {len(outputs)})"
        )
    for output in outputs:
        if output is not None and not isinstance(output, torch.Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(output).__name__})")
    return outputs


def checked(name: str, outputs: Sequence[Any], places: Sequence[Any]) -> tuple[Any, ...]:
    """The engine's own check of shapes, with its error's text, and its reduction of broadcast gradients."""
    done, index = [], -1
    for output, metadata in zip(outputs, places, strict=False):
        index += 1
        if output is None or metadata is None:
            done.append(None if metadata is None else output)
            continue
        shape = tuple(metadata.shape)
        if tuple(output.shape) != shape:
            if not _expands(shape, tuple(output.shape)):
                got = list(output.shape)
                raise RuntimeError(
                    f"Function {name} returned an invalid gradient at index {index} - got {got} but expected "
                    f"shape compatible with {list(shape)}"
                )
            output = output.sum_to_size(shape)
        done.append(output if output.dtype == metadata.dtype else output.to(metadata.dtype))
    return tuple(done)


def _expands(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    if len(shape) > len(to):
        return False
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return all(size in (1, wanted) for size, wanted in pairs)


def same_error(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two errors ({"type", "message"}) are the same but for addresses in their text."""
    texts = [re.sub(r"0x[0-9a-f]+", "0x", str(error["message"])).strip() for error in (one, other)]
    return bool(one["type"] == other["type"]) and texts[0] == texts[1]


def equal(one: Any, other: Any) -> bool:
    """Bitwise equality of two results; NaN equals NaN."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


def plain(tensors: Sequence[Any]) -> str | None:
    """Why tensors are not ones to call a node with (a subclass may do anything), or None."""
    for tensor in tensors:
        if tensor is not None and type(tensor) not in PLAIN:
            return f"a gradient is a {type(tensor).__name__}, not a plain tensor"
    return None


def metadata_of(metadata: Any) -> dict[str, Any] | None:
    """Shape, dtype and device that a node's input or output has by its forward."""
    if metadata is None:
        return None
    return {"shape": [int(n) for n in metadata.shape], "dtype": short(metadata.dtype), "device": str(metadata.device)}
