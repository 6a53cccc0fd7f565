"""Values (`--numerics`): the first node or module with non-finite values, and digests of the parameters.

A check reads one number per tensor. On the CPU that is cheap; on a device the number stays there until
the step ends, so no node waits for its device.
"""

import struct
from typing import Any

import torch

from distdbg.record.engine import NodeHook
from distdbg.record.session import Kind, Session
from distdbg.schema import MAGNITUDE_ACTIVATION, MAGNITUDE_RECEIVED, MAGNITUDE_RETURNED

GRADIENT = 0
_LOOKED_AT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # for float8 there is no minimum


def _being_traced() -> bool:
    """Whether operations go elsewhere than to a backend: vmap, make_fx, fake tensors, jit.trace, a dispatch mode."""
    return (
        torch._C._functorch.maybe_current_level() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def _values(tensor: Any) -> torch.Tensor | None:
    """The values of this process, None where there are none to look at.

    Of a DTensor its local part: to look at all of it would be a collective. What other subclasses do is theirs.
    """
    if type(tensor).__name__ == "DTensor":
        tensor = tensor._local_tensor
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype not in _LOOKED_AT:
        return None
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return None
    values: torch.Tensor = tensor.detach()
    return values


def magnitude(tensors: Any) -> float:
    """The largest magnitude in the tensors, inf or nan where a value is; 0.0 where there is nothing."""
    largest = 0.0
    for tensor in tensors:
        values = _values(tensor)
        if values is not None:
            low, high = torch.aminmax(values)
            value = max(abs(float(low)), abs(float(high)))
            if value != value:
                return value
            largest = max(largest, value)
    return largest


def float_bits(value: float) -> int:
    """A float64 as a signed 64-bit word."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def device_magnitude(tensors: Any) -> Any:
    """As magnitude(), as a tensor that stays on its device; None where there is nothing to look at."""
    largest = None
    for tensor in tensors:
        values = _values(tensor)
        if values is not None:
            low, high = torch.aminmax(values)
            value = torch.maximum(low.abs(), high.abs()).float()
            largest = value if largest is None else torch.maximum(largest, value.to(largest.device))
    return largest


def digest(parameter: torch.Tensor) -> torch.Tensor | None:
    """A hash of a parameter's bits, equal on equal values, int64 [2] on its device; None for other than plain tensors.

    The second number is the bits of its largest magnitude (float64), which tell whether all values are finite.
    """
    data = parameter.detach()
    if type(parameter) not in (torch.nn.Parameter, torch.Tensor) or data.layout is not torch.strided:
        return None
    views = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = views.get(data.element_size())
    if kind is None or data.device.type == "meta" or not data.numel():
        return None
    largest = device_magnitude([data])
    if largest is None:
        largest = torch.zeros((), device=data.device)
    return torch.stack([data.contiguous().view(kind).sum(dtype=torch.int64), largest.double().view(torch.int64)])


class NumericsHook(NodeHook):
    """As NodeHook, and notes the largest magnitude of what the node returned and received."""

    __slots__ = ("received", "session")
    session: Session
    received: Any

    def pre(self, grads: Any) -> None:
        super().pre(grads)
        self.received = self.session.numerics.look(grads)

    def post(self, outputs: Any, inputs: Any) -> None:
        super().post(outputs, inputs)
        numerics = self.session.numerics
        numerics.note(GRADIENT, self, self.received, numerics.look(outputs))
        self.received = None


class Numerics:
    """Looks at gradients in the nodes' hooks, at activations in a forward hook, at weights after a step."""

    hook_type = NumericsHook

    def __init__(self, session: Session, modules: Any) -> None:
        self._session = session
        self._modules = modules
        self._pending: list[tuple[int, int, int, int, int, Any]] = []
        self._handle: Any = None
        session.numerics = self

    def attach(self) -> None:
        self._handle = torch.nn.modules.module.register_module_forward_hook(self._forward)
        self._modules.other_hooks.add(self._handle.id)

    def detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._pending.clear()

    forget = detach

    @staticmethod
    def look(tensors: Any) -> Any:
        """A float for tensors on the CPU, a tensor for others, None for nothing."""
        if _being_traced():
            return None
        if any(isinstance(t, torch.Tensor) and t.device.type != "cpu" for t in tensors):
            return device_magnitude(tensors)
        return magnitude(tensors)

    def note(self, what: int, hook: Any, received: Any, returned: Any) -> None:
        for flag, value in ((MAGNITUDE_RECEIVED, received), (MAGNITUDE_RETURNED, returned)):
            if value is None:
                continue
            words = (hook.name, hook.module, hook.index, what | flag, hook.run.number)
            if isinstance(value, float):
                self._emit(words, value)
            else:
                self._pending.append((*words, value))

    def _emit(self, words: Any, value: float) -> None:
        name, module, index, what, run = words
        self._session.emit(Kind.MAGNITUDE, name, module, index | run << 32, what, float_bits(value))

    def _forward(self, module: Any, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        name = self._modules.name_of(module)
        for flag, tensors in ((MAGNITUDE_RECEIVED, args), (MAGNITUDE_RETURNED, output)):
            found = self.look(_flat(tensors))
            words = (0, name, 0, MAGNITUDE_ACTIVATION | flag, 0)
            if isinstance(found, float):
                self._emit(words, found)
            elif found is not None:
                self._pending.append((*words, found))

    def step_ended(self, optimizer: Any) -> None:
        """Called once a step, on the training thread: one transfer for all that waits on a device."""
        pending, self._pending = self._pending, []
        if pending:
            values = torch.stack([entry[-1].reshape(()).cpu() for entry in pending]).tolist()
            for entry, value in zip(pending, values, strict=True):
                self._emit(entry[:-1], value)
        self._digests(optimizer)

    def _digests(self, optimizer: Any) -> None:
        """Digests of the optimizer's parameters: one transfer for all of a device."""
        found: dict[Any, list[tuple[int, int, torch.Tensor]]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name, module = self._modules.of_parameter(parameter)
                words = digest(parameter) if name else None
                if words is not None:
                    found.setdefault(words.device, []).append((name, module, words))
        for entries in found.values():
            values = torch.stack([words for _, _, words in entries]).tolist()
            for (name, module, _), (bits, largest) in zip(entries, values, strict=True):
                self._session.emit(Kind.DIGEST, name, module, a=bits, b=largest)


def _flat(value: Any, depth: int = 0) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if depth > 3:
        return []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _flat(item, depth + 1)]
    return []
