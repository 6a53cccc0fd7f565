"""Bundles that are wrong in one place: a clear error or an answer, never a traceback, and nothing is run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distdbg.cli.replay import main
from distdbg.errors import BundleError
from tests.unit.replay import bundles

DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
WRONG: list[Any] = [
    None, True, -1, 10**400, 1.5, "text", "\ud800\x1b[2J", "../../../etc/passwd", [], [1], [[]], {}, {"shape": [1]},
    {"shape": [1 << 70], "dtype": "float32"}, {"shape": [2], "dtype": "float32", "key": "../../etc/passwd"},
    {"shape": [2], "dtype": "float32", "norm": 10**400}, {"list": 5}, {"dict": [1]}, {"tensor": "x"}, DEEP,
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each value of a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inner for found in places(item, (*path, key)))]


@pytest.mark.parametrize("wrong", range(len(WRONG)))
def test_one_wrong_value(wrong: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each value of bundle.json replaced by each kind of nonsense."""
    path = bundles.write(
        tmp_path, [torch.ones(2), None], error=dict(bundles.ERROR), saved={"result": torch.ones(2)},
        context={"level": 1.0, "sizes": {"list": [1, 2]}}, left_out=["saved.x: too large"], rng=None,
        function={"module": "train", "qualname": "Level", "file": "/train.py"}, source="train.py:1",
        module_class="Gate", needs_input_grad=[True],
    )  # fmt: skip
    source = tmp_path / "train.py"
    source.write_text(
        "import torch\nclass Level(torch.autograd.Function):\n  backward = staticmethod(lambda c, g: g)\n"
    )
    about = json.loads((path / "bundle.json").read_text())
    for place in places(about)[1:]:
        changed = json.loads(json.dumps(about))
        holder = changed
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = WRONG[wrong]
        (path / "bundle.json").write_text(json.dumps(changed))
        for options in ([], ["--json"], ["--source", str(source)]):
            try:
                main([str(path), *options])
            except BundleError:
                pass
            assert "\x1b" not in capsys.readouterr().out, place


def test_sizes_and_offsets(tmp_path: Path) -> None:
    """A tensors' header that lies about sizes, names a file, overlaps or leaves holes is refused; no file appears."""
    path = bundles.write(tmp_path / "bundles", [torch.ones(2)], saved={"result": torch.ones(2)})
    raw = (path / "tensors.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    one, two = sorted(header)
    outside = {"../../../outside": header[one], two: header[two]}
    overlap = {**header, two: {**header[two], "data_offsets": header[one]["data_offsets"]}}
    hole = {**header, two: {**header[two], "data_offsets": [9, 17]}}
    wide = {**header, two: {**header[two], "shape": [1 << 61, 8]}}
    for wrong in (outside, overlap, hole, wide):
        text = json.dumps(wrong).encode()
        (path / "tensors.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
        with pytest.raises(BundleError, match=path.name):
            main([str(path)])
    assert sorted(found.name for found in tmp_path.iterdir()) == ["bundles"]


def test_a_hundred_bundles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All ranks of a large job beside each other, one odd, one damaged: the odd one is named, the other left out."""
    for rank in range(100):
        path = bundles.write(tmp_path, [torch.ones(3 if rank == 42 else 2)], rank=rank)
    (path / "bundle.json").write_text("{")
    main([str(tmp_path / "rank0-step3-ExpBackward0.bundle")])
    out = capsys.readouterr().out
    assert "rank 42's incoming gradient is [3] where the others have [2]" in out
