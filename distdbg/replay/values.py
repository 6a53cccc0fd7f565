"""Plain values as JSON and back: what a Function puts on its ctx, what a C++ node saved besides tensors.

Numbers, text, None, torch.dtype, torch.device, torch.Size and lists, tuples and dicts of them; a tensor
becomes a reference to its key. Anything else is no plain value and is left out by name.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH = 6
MAX_ITEMS = 10_000
MAX_TEXT = 100_000


class NotPlainError(ValueError):
    """A value that is not stored: it could only be pickled."""


def encode(value: Any, key: str, tensor: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """JSON for a value; ``tensor(key, t)`` stores a tensor and returns what stands for it. Raises NotPlainError."""
    kind = type(value)
    if value is None or kind in (bool, int) or (kind is str and len(value) <= MAX_TEXT):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if hasattr(value, "grad_fn") and hasattr(value, "untyped_storage"):
        return tensor(key, value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in ("torch.dtype", "torch.device"):
        return {kind.__name__: str(value).removeprefix("torch.")}
    if depth < MAX_DEPTH and hasattr(value, "__len__") and len(value) <= MAX_ITEMS:
        if kind in (list, tuple) or name == "torch.Size":
            items = [encode(item, f"{key}.{i}", tensor, depth + 1) for i, item in enumerate(value)]
            return {"size" if name == "torch.Size" else kind.__name__: items}
        if kind is dict:
            pairs = [(encode(k, "", _no_tensor), v) for k, v in value.items()]
            return {"dict": [[k, encode(v, f"{key}.{i}", tensor, depth + 1)] for i, (k, v) in enumerate(pairs)]}
    raise NotPlainError(f"a {kind.__qualname__} is no plain value")


def _no_tensor(key: str, value: Any) -> Any:
    raise NotPlainError("a tensor as the key of a dict")


def decode(value: Any, tensors: Mapping[str, Any], depth: int = 0) -> Any:
    """What encode() made JSON of. Raises ValueError for what it never makes, KeyError for a lost tensor."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth > 2 * MAX_DEPTH or not isinstance(value, dict):
        raise ValueError("no stored value")
    if "shape" in value:
        return tensors[value["key"]]
    if len(value) != 1:
        raise ValueError("no stored value")
    kind, content = next(iter(value.items()))
    if kind == "float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if kind in ("dtype", "device") and isinstance(content, str):
        return _torch_name(kind, content)
    if kind in ("list", "tuple", "size") and isinstance(content, list):
        items = [decode(item, tensors, depth + 1) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict" and isinstance(content, list):
        return {decode(k, {}, depth + 1): decode(v, tensors, depth + 1) for k, v in content}
    raise ValueError("no stored value")


def _torch_name(kind: str, content: str) -> Any:
    import torch

    found = getattr(torch, content, None) if kind == "dtype" and content.isidentifier() else None
    if kind == "dtype":
        if not isinstance(found, torch.dtype):
            raise ValueError(f"no dtype: {content}")
        return found
    try:
        return torch.device(content)
    except RuntimeError:
        raise ValueError(f"no device: {content}") from None
