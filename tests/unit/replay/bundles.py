"""Writes bundles as the recorder does, without a failure."""

from pathlib import Path
from typing import Any

import torch

from distdbg.replay.bundle import bundle_name, write_bundle
from distdbg.replay.describe import describe

ERROR = {"type": "ValueError", "message": "level must be positive", "title": "ValueError: level must be positive"}


def about(grads: list[Any], **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON and the tensors of a bundle of an ExpBackward0 that received these gradients."""
    tensors = {f"inputs.{i}": grad for i, grad in enumerate(grads) if grad is not None}
    inputs = [
        None if grad is None else {**(describe(grad) or {}), "key": f"inputs.{i}"} for i, grad in enumerate(grads)
    ]
    place = [None if grad is None else {"shape": list(grad.shape), "dtype": "float32"} for grad in grads]
    found: dict[str, Any] = {
        "reason": "failure", "rank": 0, "step": 3, "attempt": 0, "backward": 3, "call": 0, "node": "ExpBackward0",
        "node_index": 1, "module": "act", "error": None, "inputs": inputs, "expects": place, "returns": place,
        "outputs": [], "function": None, "needs_input_grad": None, "saved": {}, "context": {}, "parameters": {},
        "buffers": {}, "versions": {}, "replay": {"ran": False}, "outcome": "ExpBackward0 was not run again: a test",
    }  # fmt: skip
    return {**found, **changes}, tensors


def write(folder: Path, grads: list[Any], **changes: Any) -> Path:
    """Write such a bundle; returns its path."""
    content, tensors = about(grads, **changes)
    for name in list(content["saved"]):
        value = content["saved"][name]
        if isinstance(value, torch.Tensor):
            tensors[f"saved.{name}"] = value
            content["saved"][name] = {**(describe(value) or {}), "key": f"saved.{name}"}
    for index, value in enumerate(content["outputs"]):
        tensors[f"outputs.{index}"] = value
        content["outputs"][index] = {**(describe(value) or {}), "key": f"outputs.{index}"}
    return write_bundle(folder, bundle_name(content["rank"], content["step"], content["node"]), content, tensors)
