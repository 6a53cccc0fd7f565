"""A bundle: a folder with ``bundle.json`` and ``tensors.safetensors``, all that is needed to look at a node later.

Nothing in it is code or is ever unpickled. Whatever is wrong with one when it is read is a BundleError,
told before anything of it is used.
"""

import json
import os
import re
import shutil
import stat
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from distdbg.errors import BundleError
from distdbg.replay import values

BUNDLE_SCHEMA = "distdbg.bundle/1"
BUNDLES_FOLDER = "bundles"
BUNDLE_SUFFIX = ".bundle"
ABOUT_FILE = "bundle.json"
TENSORS_FILE = "tensors.safetensors"
MAX_ABOUT_BYTES = 32 << 20
MAX_DEPTH = 64  # of its JSON; readers and printers recurse

# torch's dtype -> the name that safetensors gives it; tensors of other dtypes are described only
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip

_LISTS = ("inputs", "expects", "outputs")
_DICTS = ("saved", "context", "parameters", "buffers", "versions", "replay")
_TEXTS = ("node", "outcome", "reason")
_NUMBERS = ("rank", "step", "attempt")
_MAYBE_NUMBERS = ("backward", "call", "node_index")
_MAYBE_TEXTS = ("module", "module_class", "source")
_MEASURES = ("min", "max", "norm", "nan", "inf")


# ---- writing


def bundle_name(rank: int, step: int, node: str) -> str:
    """ "rank2-step3-LevelGateFnBackward.bundle"."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", node)[:100].strip(".") or "node"
    return f"rank{rank}-step{step}-{plain}{BUNDLE_SUFFIX}"


def write_bundle(folder: Path, name: str, about: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """Write a bundle below ``folder``; returns its path, with a number added where the name is taken.

    Tensors are written one after the other, without a second copy of them all. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _write_tensors(temporary / TENSORS_FILE, tensors)
        text = json.dumps({"schema": BUNDLE_SCHEMA, **about}, indent=1, allow_nan=False)
        (temporary / ABOUT_FILE).write_text(text + "\n", encoding="utf-8", errors="replace")
        for number in range(1, 1000):
            path = folder / (name if number == 1 else f"{name.removesuffix(BUNDLE_SUFFIX)}-{number}{BUNDLE_SUFFIX}")
            if not path.exists():
                os.rename(temporary, path)
                return path
        raise OSError(f"too many bundles named {name} in {folder}")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    import torch

    header: dict[str, Any] = {}
    offset = 0
    for key, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        kind = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        header[key] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file, torch.no_grad():
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            if plain.numel():
                file.write(memoryview(plain.reshape(-1).view(torch.uint8).numpy()))


# ---- reading


@dataclass(frozen=True)
class Bundle:
    """A bundle as read: ``about`` is its JSON, checked; tensors are loaded at first use.

    ``inputs`` are the gradients that came in (None where None came, or where one was too large to keep),
    ``saved`` what the node had saved, ``context`` the plain values on a Function's ctx, ``parameters``
    and ``buffers`` those of its module.
    """

    path: Path
    about: dict[str, Any]

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """All stored tensors by key, on the CPU. Raises BundleError."""
        return _read_tensors(self.path, self.about)

    @cached_property
    def inputs(self) -> list[Any]:
        return [self._value(entry) for entry in self.about["inputs"]]

    @cached_property
    def outputs(self) -> list[Any]:
        return [self._value(entry) for entry in self.about["outputs"]]

    @cached_property
    def saved(self) -> dict[str, Any]:
        return self._values("saved")

    @cached_property
    def context(self) -> dict[str, Any]:
        return self._values("context")

    @cached_property
    def parameters(self) -> dict[str, Any]:
        return self._values("parameters")

    @cached_property
    def buffers(self) -> dict[str, Any]:
        return self._values("buffers")

    @property
    def outcome(self) -> str:
        """What the replays in the training process came to, in a sentence."""
        return str(self.about["outcome"])

    def replay(self, source: str | os.PathLike[str] | None = None, *, debug: bool = False) -> Any:
        """Run the node again here; see distdbg.replay.rerun.rerun()."""
        from distdbg.replay.rerun import rerun

        return rerun(self, None if source is None else Path(source), debug=debug)

    def _values(self, part: str) -> dict[str, Any]:
        return {name: self._value(entry) for name, entry in self.about[part].items()}

    def _value(self, entry: Any) -> Any:
        if isinstance(entry, dict) and ("shape" in entry or "unreadable" in entry) and not entry.get("key"):
            return None  # described only: its values were not kept
        try:
            return values.decode(entry, self.tensors)
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(self.path, f"an entry of {ABOUT_FILE} is no stored value ({error})") from None


def load_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Open a bundle (RUN_DIR/bundles/*.bundle). Nothing of it is run. Raises BundleError."""
    folder = Path(path)
    if not folder.exists():
        raise BundleError(f"{folder}: no such bundle; they lie in RUN_DIR/{BUNDLES_FOLDER}/")
    if not folder.is_dir():
        raise BundleError(f"{folder} is a file; a bundle is a folder with {ABOUT_FILE} and {TENSORS_FILE}")
    raw = _read_regular(folder / ABOUT_FILE, MAX_ABOUT_BYTES)
    try:
        about = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"{ABOUT_FILE} is no JSON ({str(error)[:100]})") from None
    _check(folder, about)
    return Bundle(folder, about)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _damaged(path: Path, what: str) -> BundleError:
    return BundleError(f"{path} cannot be read: {what}; copy the bundle again, or capture the node again")


def _read_regular(path: Path, limit: int) -> bytes:
    """A file's bytes; links, pipes and devices are not opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _damaged(path.parent, f"{path.name}: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _damaged(path.parent, f"{path.name} is not a regular file")
        if status.st_size > limit:
            raise _damaged(path.parent, f"{path.name} has {status.st_size:,} bytes, more than {limit:,}")
        return file.read(status.st_size)


def _check(path: Path, about: Any) -> None:
    """Whether a bundle's JSON has the types that everything else relies on. Raises BundleError."""
    if not isinstance(about, dict) or not str(about.get("schema", "")).startswith("distdbg.bundle/"):
        raise BundleError(f"{path} is no bundle of distdbg: its {ABOUT_FILE} names no schema distdbg.bundle/...")
    if about["schema"] != BUNDLE_SCHEMA:
        raise BundleError(f"{path} is a {about['schema'][:40]!r}, this version reads {BUNDLE_SCHEMA}; update distdbg")
    kinds: tuple[tuple[tuple[str, ...], type], ...] = ((_LISTS, list), (_DICTS, dict), (_TEXTS, str), (_NUMBERS, int))
    for names, kind in kinds:
        for name in names:
            if not isinstance(about.get(name), kind):
                raise _damaged(path, f"{ABOUT_FILE} has no {kind.__name__} {name!r}")
    if not isinstance(about.get("error"), (dict, type(None))) or not isinstance(
        about.get("function"), (dict, type(None))
    ):
        raise _damaged(path, f"'error' and 'function' of {ABOUT_FILE} are objects or null")
    _check_more(path, about)
    for name in [*about["context"], *about["saved"]]:
        if not name.isidentifier() or name.startswith("__"):
            raise _damaged(path, f"{name[:60]!r} is no name of an attribute")
    entries = [*about["inputs"], *about["outputs"], *about["saved"].values(), *about["parameters"].values()]
    for entry in [*about["inputs"], *about["expects"]]:
        if not (entry is None or (isinstance(entry, dict) and "shape" in entry)):
            raise _damaged(path, f"an entry of 'inputs' or 'expects' of {ABOUT_FILE} is no tensor's description")
    for entry in [*entries, *about["buffers"].values(), *about["context"].values(), *about["expects"]]:
        if isinstance(entry, dict) and "shape" in entry:
            _check_description(path, entry)


def _check_more(path: Path, about: dict[str, Any]) -> None:
    """What may be left out, the size of numbers, and how deep it goes."""
    level, depth = [about[name] for name in about], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _damaged(path, f"{ABOUT_FILE} is nested more than {MAX_DEPTH} deep")
        inner = [item for item in level if isinstance(item, (dict, list))]
        level = [found for item in inner for found in (item.values() if isinstance(item, dict) else item)]
    for name in (*_NUMBERS, *_MAYBE_NUMBERS):
        number = about.get(name)
        if number is not None and (type(number) is not int or not 0 <= number < 1 << 63):
            raise _damaged(path, f"{name!r} of {ABOUT_FILE} is no number of that kind")
    for name in _MAYBE_TEXTS:
        if not isinstance(about.get(name), (str, type(None))):
            raise _damaged(path, f"{name!r} of {ABOUT_FILE} is no text")
    for name in ("left_out", "needs_input_grad"):
        if not isinstance(about.get(name), (list, type(None))):
            raise _damaged(path, f"{name!r} of {ABOUT_FILE} is no list")


def _check_description(path: Path, entry: dict[str, Any]) -> None:
    shape = entry["shape"]
    whole = isinstance(shape, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in shape)
    if not whole or not isinstance(entry.get("dtype"), str) or not isinstance(entry.get("key"), (str, type(None))):
        raise _damaged(path, "a tensor's description has no shape or no dtype")
    for name in _MEASURES:
        value = entry.get(name)
        if value is not None and not (type(value) in (int, float) and abs(value) <= sys.float_info.max):
            raise _damaged(path, f"a tensor's description has a {name!r} that is no number")


def _described(about: Any, depth: int = 0) -> list[dict[str, Any]]:
    """All descriptions of stored tensors in a bundle's JSON."""
    if depth > 20:
        return []
    if isinstance(about, dict):
        if isinstance(about.get("key"), str) and isinstance(about.get("shape"), list):
            return [about]
        about = list(about.values())
    if isinstance(about, list):
        return [found for item in about for found in _described(item, depth + 1)]
    return []


def _read_tensors(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    from safetensors.torch import load

    raw = _read_regular(path / TENSORS_FILE, 1 << 40)
    try:
        tensors: dict[str, Any] = load(raw)
    except Exception as error:  # the library raises several types, all of them about the file
        raise _damaged(path, f"{TENSORS_FILE} is truncated or foreign ({str(error)[:120]})") from None
    for entry in _described(about):
        found = tensors.get(entry["key"])
        if found is None:
            raise _damaged(path, f"{TENSORS_FILE} has no tensor {entry['key'][:60]!r}")
        if list(found.shape) != entry["shape"] or str(found.dtype) != f"torch.{entry.get('dtype')}":
            raise _damaged(path, f"the tensor {entry['key'][:60]!r} is not the one that {ABOUT_FILE} describes")
    return tensors
