"""The same node on several ranks: what differs in what came in."""

from pathlib import Path
from typing import Any

import pytest
import torch

from distdbg.errors import BundleError
from distdbg.replay.bundle import Bundle, load_bundle
from distdbg.replay.compare import compare_bundles
from tests.unit.replay import bundles


def of(tmp_path: Path, *grads: Any) -> list[Bundle]:
    """A bundle a rank."""
    return [load_bundle(bundles.write(tmp_path, [grad], rank=rank)) for rank, grad in enumerate(grads)]


@pytest.mark.parametrize(
    ("grads", "told"),
    [
        ([torch.ones(2), torch.ones(2), torch.ones(2)], []),
        ([torch.ones(4, 8), torch.ones(4, 8), torch.ones(2, 8)],
         ["rank 2's incoming gradient is [2, 8] where the others have [4, 8]"]),
        ([torch.ones(2), torch.ones(2).half(), torch.ones(2)],
         ["rank 1's incoming gradient is float16 where the others have float32"]),
        ([torch.ones(2), torch.ones(2), torch.tensor([1.0, float("nan")])],
         ["rank 2's incoming gradient is not finite where the others have finite"]),
        ([torch.ones(2), None, torch.ones(2)], ["rank 1's incoming gradient is None where the others have [2]"]),
        ([torch.ones(1), torch.ones(1), torch.ones(1) * 1000],
         ["rank 2's incoming gradient has norm 1000 where the others have about 1"]),
        ([torch.ones(2), torch.ones(3)], ["the incoming gradient is [2] on rank 0, [3] on rank 1"]),
    ],
)  # fmt: skip
def test_differences(grads: list[Any], told: list[str], tmp_path: Path) -> None:
    """Shape before dtype before finiteness before norm; where there is a majority the odd rank is named."""
    assert compare_bundles(of(tmp_path, *grads)) == told


def test_other_nodes(tmp_path: Path) -> None:
    """Bundles of different nodes are not compared."""
    one = of(tmp_path, torch.ones(1))
    other = load_bundle(bundles.write(tmp_path, [torch.ones(1)], rank=1, step=4))
    with pytest.raises(BundleError, match="not of one node"):
        compare_bundles([*one, other])


def test_two_ranks_from_one_side(tmp_path: Path) -> None:
    """A verdict that knows who failed says so from that rank's side."""
    two = of(tmp_path, torch.ones(16, 4), torch.ones(8, 4))
    assert compare_bundles(two, of=1) == ["rank 1's incoming gradient is [8, 4] where rank 0's is [16, 4]"]
