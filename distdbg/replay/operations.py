"""C++ nodes whose operation can be rebuilt from what they saved: forward, then backward, with torch's public functions.

An entry of the table makes the operation's inputs and calls it. A value that the operation does not save
(it needs none for its gradient) is made up: its gradient does not depend on it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional

_Saved = dict[str, Any]
# saved values, shapes of what came in, shapes of what goes out -> (inputs of the operation, its output)
_Rebuild = Callable[[_Saved, Sequence[Any], Sequence[Any]], tuple[list[Any], Any]]


class CannotRebuildError(Exception):
    """The operation cannot be rebuilt from this bundle; the text says why."""


def _leaf(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise CannotRebuildError("a tensor that the operation needs is not in the bundle")
    return value.detach().clone().requires_grad_(value.is_floating_point() or value.is_complex())


def _made(place: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor for an input that is not saved, with the shape that its gradient must have (else as ``like``)."""
    if place is None:
        return torch.ones_like(like).requires_grad_()
    dtype = getattr(torch, place["dtype"], torch.float32)
    return torch.ones(place["shape"], dtype=dtype, device=like.device).requires_grad_()


def _signed(value: Any) -> int:
    """A dimension, as torch stores it: negative ones as unsigned."""
    number = int(value)
    return number - (1 << 64) if number >= 1 << 63 else number


def _dims(value: Any) -> list[int]:
    return [_signed(item) for item in value] if isinstance(value, (tuple, list)) else [_signed(value)]


def _unary(function: Callable[..., torch.Tensor]) -> _Rebuild:
    """Of an operation that saved its input."""

    def rebuild(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
        x = _leaf(saved.get("self"))
        return [x], function(x)

    return rebuild


def _from_result(inverse: Callable[..., torch.Tensor], function: Callable[..., torch.Tensor]) -> _Rebuild:
    """Of an operation that saved its result only: an input that gives this result is made."""

    def rebuild(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
        result = saved.get("result")
        if not isinstance(result, torch.Tensor):
            raise CannotRebuildError("the operation's result is not in the bundle")
        x = _leaf(inverse(result))
        return [x], function(x)

    return rebuild


def _binary(function: Callable[..., torch.Tensor], *names: str) -> _Rebuild:
    """Of an operation of two tensors, each saved only where the other's gradient is wanted."""

    def rebuild(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
        inputs = []
        for index, name in enumerate(names):
            value = saved.get(name)
            inputs.append(_leaf(value) if isinstance(value, torch.Tensor) else _made(_at(places, index), grads[0]))
        return inputs, function(*inputs)

    return rebuild


def _at(items: Sequence[Any], index: int) -> Any:
    return items[index] if index < len(items) else None


def _add(sign: int) -> _Rebuild:
    def rebuild(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
        inputs = [_made(_at(places, index), grads[0]) for index in range(2)]
        return inputs, torch.add(inputs[0], inputs[1], alpha=sign * saved.get("alpha", 1))

    return rebuild


def _matrices(left: Any, right: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both factors of a product; each is saved only where the other's gradient is wanted, and made up else."""
    out = grad.shape
    if isinstance(left, torch.Tensor):
        width = left.shape[-1]
    elif isinstance(right, torch.Tensor):
        width = right.shape[-2]
    else:
        raise CannotRebuildError("neither matrix is in the bundle")
    if not isinstance(left, torch.Tensor):
        left = grad.new_ones((*out[:-1], width))
    if not isinstance(right, torch.Tensor):
        right = grad.new_ones((*out[:-2], width, out[-1]))
    return _leaf(left), _leaf(right)


def _addmm(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
    first, second = _matrices(saved.get("mat1"), saved.get("mat2"), grads[0])
    bias = _made(_at(places, 0), grads[0][:1])
    output = torch.addmm(bias, first, second, beta=saved.get("beta", 1), alpha=saved.get("alpha", 1))
    return [bias, first, second], output


def _matmul(function: Callable[..., torch.Tensor], left: str, right: str) -> _Rebuild:
    def rebuild(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
        inputs = list(_matrices(saved.get(left), saved.get(right), grads[0]))
        return inputs, function(*inputs)

    return rebuild


def _power(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
    x = _leaf(saved.get("self"))
    return [x], x ** saved["exponent"]


def _powers(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
    inputs = [_leaf(saved.get("self")), _leaf(saved.get("exponent"))]
    return inputs, torch.pow(*inputs)


def _gelu(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
    x = _leaf(saved.get("self"))
    return [x], functional.gelu(x, approximate=saved.get("approximate", "none"))


def _softmax(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
    result = saved.get("result")
    if not isinstance(result, torch.Tensor):
        raise CannotRebuildError("the operation's result is not in the bundle")
    x = _leaf(result.clamp_min(torch.finfo(result.dtype).tiny).log())
    return [x], x.softmax(_signed(saved["dim"]))


def _log_softmax(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
    x = _leaf(saved.get("result"))
    return [x], x.log_softmax(_signed(saved["dim"]))


def _embedding(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
    indices = saved.get("indices")
    if not isinstance(indices, torch.Tensor):
        raise CannotRebuildError("the indices are not in the bundle")
    rows = int(saved["weight_sym_argsize_0"])
    weight = torch.ones(rows, grads[0].shape[-1], dtype=grads[0].dtype, device=grads[0].device).requires_grad_()
    padding = _signed(saved["padding_idx"])
    return [weight], functional.embedding(
        indices, weight, padding if padding >= 0 else None, scale_grad_by_freq=bool(saved["scale_grad_by_freq"])
    )


def _layer_norm(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
    x = _leaf(saved.get("input"))
    weight, bias = saved.get("weight"), saved.get("bias")
    inputs = [x, *(_leaf(value) if isinstance(value, torch.Tensor) else None for value in (weight, bias))]
    # eps is not saved, but mean and 1/std are: the reciprocal's square less the variance gives it back
    rstd, dims = saved.get("result2"), tuple(range(x.dim() - len(saved["normalized_shape"]), x.dim()))
    variance = x.detach().double().var(dims, unbiased=False, keepdim=True)
    eps = float((rstd.double().reshape(variance.shape) ** -2 - variance).median()) if rstd is not None else 1e-5
    return inputs, functional.layer_norm(x, list(saved["normalized_shape"]), inputs[1], inputs[2], max(eps, 0.0))


def _convolution(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
    x, weight = _leaf(saved.get("input")), _leaf(saved.get("weight"))
    shape = saved.get("bias_sym_sizes_opt")
    bias = weight.detach().new_ones(shape).requires_grad_() if shape and tuple(shape) != (0,) else None
    output = torch.convolution(
        x, weight, bias, saved["stride"], saved["padding"], saved["dilation"],
        saved["transposed"], saved["output_padding"], saved["groups"],
    )  # fmt: skip
    return [x, weight, bias], output


def _reduction(function: Callable[..., torch.Tensor], with_dims: bool) -> _Rebuild:
    def rebuild(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
        x = torch.ones(saved["self_sym_sizes"], dtype=grads[0].dtype, device=grads[0].device).requires_grad_()
        if not with_dims:
            return [x], function(x)
        return [x], function(x, dim=_dims(saved["dim"]), keepdim=bool(saved["keepdim"]))

    return rebuild


def _mse_loss(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
    x, target = _leaf(saved.get("self")), _leaf(saved.get("target"))
    return [x, target], functional.mse_loss(x, target, reduction=("none", "mean", "sum")[int(saved["reduction"])])


def _nll_loss(saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], Any]:
    x, target = _leaf(saved.get("self")), saved.get("target")
    if not isinstance(target, torch.Tensor):
        raise CannotRebuildError("the targets are not in the bundle")
    reduction = ("none", "mean", "sum")[int(saved["reduction"])]
    output = functional.nll_loss(
        x, target, saved.get("weight"), ignore_index=_signed(saved["ignore_index"]), reduction=reduction
    )
    return [x], output


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def _logit(y: torch.Tensor) -> torch.Tensor:
    return y.logit()


OPERATIONS: dict[str, _Rebuild] = {
    "AddBackward0": _add(1),
    "SubBackward0": _add(-1),
    "MulBackward0": _binary(torch.mul, "self", "other"),
    "DivBackward0": _binary(torch.div, "self", "other"),
    "AddmmBackward0": _addmm,
    "MmBackward0": _matmul(torch.mm, "self", "mat2"),
    "BmmBackward0": _matmul(torch.bmm, "self", "mat2"),
    "PowBackward0": _power,
    "PowBackward1": _powers,
    "ReluBackward0": _from_result(_identity, torch.relu),
    "SqrtBackward0": _from_result(torch.square, torch.sqrt),
    "RsqrtBackward0": _from_result(lambda y: y**-2, torch.rsqrt),
    "ExpBackward0": _from_result(torch.log, torch.exp),
    "TanhBackward0": _from_result(torch.atanh, torch.tanh),
    "SigmoidBackward0": _from_result(_logit, torch.sigmoid),
    "LogBackward0": _unary(torch.log),
    "SiluBackward0": _unary(functional.silu),
    "SinBackward0": _unary(torch.sin),
    "CosBackward0": _unary(torch.cos),
    "AbsBackward0": _unary(torch.abs),
    "GeluBackward0": _gelu,
    "SoftmaxBackward0": _softmax,
    "LogSoftmaxBackward0": _log_softmax,
    "EmbeddingBackward0": _embedding,
    "NativeLayerNormBackward0": _layer_norm,
    "ConvolutionBackward0": _convolution,
    "SumBackward0": _reduction(torch.sum, False),
    "SumBackward1": _reduction(torch.sum, True),
    "MeanBackward0": _reduction(torch.mean, False),
    "MeanBackward1": _reduction(torch.mean, True),
    "MseLossBackward0": _mse_loss,
    "NllLossBackward0": _nll_loss,
}


def gradients(node: str, saved: _Saved, grads: Sequence[Any], places: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients that the rebuilt operation gives for ``grads``, one per input of it.

    ``places`` describe what each should look like (or None). Raises CannotRebuildError, and whatever the
    operation or its backward raises.
    """
    rebuild = OPERATIONS.get(node)
    if rebuild is None:
        raise CannotRebuildError(f"{node} is not among the {len(OPERATIONS)} operations that can be rebuilt")
    if not grads or not isinstance(grads[0], torch.Tensor):
        raise CannotRebuildError("the gradient that came in is not in the bundle")
    with torch.enable_grad():
        try:
            inputs, output = rebuild(saved, grads, places)
        except KeyError as error:
            raise CannotRebuildError(f"the bundle has no saved value {error}") from None
        wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, grads[0], allow_unused=True))
    return tuple(None if tensor is None or not tensor.requires_grad else next(found) for tensor in inputs)
