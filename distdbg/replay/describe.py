"""A tensor in numbers, without a copy of it."""

import math
from typing import Any

import torch

_CHUNK = 1 << 18  # elements looked at at once where masks are needed
PLAIN = (torch.Tensor, torch.nn.Parameter)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(tensor: Any, *, values: bool = True) -> dict[str, Any] | None:
    """Shape, dtype, device, strides, finite or not, min, max and norm (of the finite values); None for None.

    Values of tensor subclasses, of sparse and of meta tensors are not looked at. What fails is noted as
    ``error``: a device after a fault answers nothing any more. Without ``values`` none is read.
    """
    if tensor is None:
        return None
    about: dict[str, Any] = {
        "shape": [int(size) for size in tensor.shape],
        "dtype": short(tensor.dtype),
        "device": str(tensor.device),
        "strides": None,
    }
    if type(tensor) not in PLAIN:
        about["class"] = type(tensor).__name__
        return about
    if tensor.layout is not torch.strided:
        return {**about, "layout": str(tensor.layout)}
    about["strides"] = [int(stride) for stride in tensor.stride()]
    if values and tensor.device.type != "meta" and tensor.numel():
        try:
            with torch.no_grad():
                about.update(_values(tensor.detach()))
        except Exception as error:
            about["error"] = f"{type(error).__name__}: {error}"[:300]
    return about


def _values(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        least, most = torch.aminmax(tensor)
        return {"finite": True, "min": int(least), "max": int(most)}
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)  # torch has no reductions for float8
    low, high = (float(value) for value in torch.aminmax(tensor))
    if math.isfinite(low) and math.isfinite(high):
        norm = float(torch.linalg.vector_norm(tensor, dtype=_wide(tensor.dtype)))
        return {"finite": True, "min": low, "max": high, "norm": norm if math.isfinite(norm) else None}
    return {"finite": False, **_masked(tensor)}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _masked(tensor: torch.Tensor) -> dict[str, Any]:
    """Of a tensor with NaN or infinities: how many there are, and the rest in numbers."""
    nan = infinite = 0
    low, high, squares = math.inf, -math.inf, 0.0
    rows = tensor.reshape(-1) if tensor.is_contiguous() else tensor.flatten()
    for start in range(0, rows.numel(), _CHUNK):
        part = rows[start : start + _CHUNK].to(torch.float64)
        finite = part[torch.isfinite(part)]
        nan += int(torch.isnan(part).sum())
        infinite += int(torch.isinf(part).sum())
        if finite.numel():
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            squares += float((finite * finite).sum())
    some = low <= high
    norm = math.sqrt(squares) if some and math.isfinite(squares) else None
    return {"nan": nan, "inf": infinite, "min": low if some else None, "max": high if some else None, "norm": norm}


def size_of(tensor: Any) -> int:
    """Bytes of a tensor's elements; 0 for None."""
    return int(tensor.numel()) * int(tensor.element_size()) if isinstance(tensor, torch.Tensor) else 0
