"""The format: what is written is read; what is damaged, foreign or hostile is refused, and nothing of it runs."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import distdbg
from distdbg.errors import BundleError
from distdbg.replay import values
from distdbg.replay.bundle import DTYPES, bundle_name, load_bundle, write_bundle
from distdbg.replay.describe import describe
from tests.unit.replay import bundles


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    """Tensors of all stored dtypes, also views, scalars and empty ones, are read with the same bits."""
    tensors = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)).mT for name in DTYPES}
    tensors["scalar"], tensors["empty"] = torch.tensor(2.5), torch.empty(0, 3)
    path = write_bundle(tmp_path, "a.bundle", bundles.about([])[0], tensors)
    found = load_file(path / "tensors.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        raw = [value.contiguous().reshape(-1).view(torch.uint8) for value in (found[name], tensor)]
        assert torch.equal(*raw), name


def test_public_name(tmp_path: Path) -> None:
    """distdbg.load_bundle gives the tensors, None where None came in."""
    path = bundles.write(tmp_path, [torch.ones(2), None])
    bundle = distdbg.load_bundle(str(path))
    assert torch.equal(bundle.inputs[0], torch.ones(2))
    assert bundle.inputs[1] is None
    assert list(bundle.tensors) == ["inputs.0"]


def test_names(tmp_path: Path) -> None:
    """A node's name cannot lead out of the folder, and a name that is taken gets a number."""
    assert bundle_name(2, 3, "../../etc/Pass wd<1>") == "rank2-step3-_.._etc_Pass_wd_1_.bundle"
    first, second = (bundles.write(tmp_path, [torch.ones(1)]) for _ in range(2))
    assert (first.name, second.name) == ("rank0-step3-ExpBackward0.bundle", "rank0-step3-ExpBackward0-2.bundle")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_plain_values() -> None:
    """Numbers, text, containers and torch's small types come back; everything else is refused by name."""
    value = (1, [2.5, float("inf")], {"a": None, 3: (True,)}, torch.bfloat16, torch.device("cpu"), "text")
    stored = json.loads(json.dumps(values.encode(value, "x", lambda key, tensor: {}), allow_nan=False))
    assert values.decode(stored, {}) == value
    assert values.encode(float("nan"), "x", lambda key, tensor: {}) == {"float": "nan"}
    nested: Any = 1
    for _ in range(20):
        nested = [nested]
    for other in (object(), len, {1}, b"bytes", nested, type("Text", (str,), {})("text")):
        with pytest.raises(values.NotPlainError):
            values.encode(other, "x", lambda key, tensor: {})


def test_description() -> None:
    """Counts of NaN and infinities, and the rest in numbers; what has no values says only what it is."""
    about = describe(torch.tensor([3.0, float("nan"), -4.0, float("-inf")]))
    assert about is not None
    assert [about[key] for key in ("finite", "nan", "inf", "min", "max", "norm")] == [False, 1, 1, -4.0, 3.0, 5.0]
    whole = describe(torch.tensor([[1, -2]]))
    assert whole is not None
    assert (whole["min"], whole["max"]) == (-2, 1)
    for tensor in (torch.empty(3, device="meta"), torch.empty(0), torch.eye(2).to_sparse()):
        found = describe(tensor)
        assert found is not None
        assert "min" not in found
    assert describe(None) is None
    assert (describe(torch.tensor([float("nan")])) or {})["norm"] is None


def _json(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        about = json.loads((path / "bundle.json").read_text())
        changed = change(about)
        (path / "bundle.json").write_text(json.dumps(about if changed is None else changed))

    return damage


def _cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, size)


def _raw(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).write_bytes(content)

    return damage


def _pipe(path: Path) -> None:
    (path / "bundle.json").unlink()
    os.mkfifo(path / "bundle.json")


def _link(path: Path) -> None:
    (path / "tensors.safetensors").unlink()
    (path / "tensors.safetensors").symlink_to("/dev/zero")


class Evil:
    """What a pickle would run."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("pickle-was-run",))


HUGE = struct.pack("<Q", 1 << 62) + b"{}"
OVERLAP = json.dumps({"inputs.0": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 8]}}).encode()
DAMAGES: dict[str, Callable[[Path], None]] = {
    "json cut": _cut("bundle.json", 100),
    "json empty": _cut("bundle.json", 0),
    "json of another tool": _raw("bundle.json", b'{"schema": "other"}'),
    "json is a list": _raw("bundle.json", b"[]"),
    "json is binary": _raw("bundle.json", bytes(range(256))),
    "json nested without end": _raw("bundle.json", b"[" * 200_000),
    "json with NaN": _raw("bundle.json", b'{"schema": NaN}'),
    "a newer version": _json(lambda about: {**about, "schema": "distdbg.bundle/2"}),
    "a pipe": _pipe,
    "a link to a device": _link,
    "a missing part": _json(lambda about: about.pop("inputs") and None),
    "a part of another type": _json(lambda about: about.update(saved=[1])),
    "inputs of another type": _json(lambda about: about.update(inputs=["text", {"shape": "x"}])),
    "a shape below zero": _json(lambda about: about["inputs"][0].update(shape=[-1])),
    "a lost tensor": _json(lambda about: about["inputs"][0].update(key="inputs.7")),
    "another shape": _json(lambda about: about["inputs"][0].update(shape=[3])),
    "another dtype": _json(lambda about: about["inputs"][0].update(dtype="int32")),
    "an attribute of ctx": _json(lambda about: about["context"].update(__class__=1)),
    "a value of no kind": _json(lambda about: about["context"].update(a={"eval": "1"})),
    "a dtype that is none": _json(lambda about: about["context"].update(a={"dtype": "load"})),
    "an unhashable key": _json(lambda about: about["context"].update(a={"dict": [[{"list": []}, 1]]})),
    "tensors cut": _cut("tensors.safetensors", 40),
    "tensors empty": _cut("tensors.safetensors", 0),
    "tensors of a pickle": _raw("tensors.safetensors", pickle.dumps(Evil())),
    "a header without end": _raw("tensors.safetensors", HUGE),
    "a tensor over the end": _raw("tensors.safetensors", struct.pack("<Q", len(OVERLAP)) + OVERLAP + bytes(8)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged(damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clear error names the bundle, whatever is wrong with it, and nothing of it is run."""
    monkeypatch.chdir(tmp_path)
    path = bundles.write(tmp_path / "bundles", [torch.ones(2)], saved={"result": torch.ones(2)})
    assert load_bundle(path).replay().ran
    damage(path)
    with pytest.raises(BundleError, match=path.name):
        load_bundle(path).replay()
    assert not (tmp_path / "pickle-was-run").exists()


def test_no_bundle(tmp_path: Path) -> None:
    """A missing path, a file and an empty folder are told apart."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, text in (("none", "no such bundle"), ("file", "is a file"), ("empty", "No such file")):
        with pytest.raises(BundleError, match=text):
            load_bundle(tmp_path / name)
