"""A stand-in for a Function's ctx, made of what a node had saved."""

from collections.abc import Mapping, Sequence
from typing import Any


class StandInContext:
    """Has ``saved_tensors``, ``needs_input_grad`` and the attributes that forward put on ctx; keeps nothing else."""

    def __init__(self, saved: Sequence[Any], needs_input_grad: Sequence[bool], attributes: Mapping[str, Any]) -> None:
        self.saved_tensors = tuple(saved)
        self.saved_variables = self.saved_tensors
        self.needs_input_grad = tuple(needs_input_grad)
        for name, value in attributes.items():
            setattr(self, name, value)

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Of no use in backward."""

    def set_materialize_grads(self, value: bool) -> None:
        """Of no use in backward."""

    def maybe_clear_saved_tensors(self) -> None:
        """Nothing is cleared: the tensors are the bundle's."""


def backward_of(function: Any) -> Any:
    """The user's backward of a Function's class (``vjp`` where that is what it defines)."""
    import torch

    if getattr(function, "vjp", None) is not torch.autograd.Function.vjp and "vjp" in vars(function):
        return function.vjp
    return function.backward
