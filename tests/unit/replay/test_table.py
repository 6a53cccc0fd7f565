"""The table in docs/replay.md is what running the nodes gives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional

from distdbg.replay import node as alone
from distdbg.replay import operations

PAGE = Path(__file__).resolve().parents[3] / "docs" / "replay.md"


class Two(torch.autograd.Function):
    """Two outputs, of which the loss uses one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.factor = factor
        return x * factor, x + factor

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
        return first * ctx.factor + second, None


class AsyncLinear(torch.autograd.Function):
    """A tensor-parallel linear layer that reduces its input's gradient while it computes its weight's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.mT

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        back = grad @ weight
        work = dist.all_reduce(back, async_op=True)
        outer = grad.mT @ x
        work.wait()
        return back, outer


def makers() -> list[tuple[str, Callable[[], torch.Tensor]]]:
    x, w, b = (torch.randn(*shape, requires_grad=True) for shape in ((2, 3), (4, 3), (3,)))
    table, picture, kernel = torch.randn(7, 3, requires_grad=True), torch.randn(1, 2, 5, 5), torch.randn(4, 2, 3, 3)
    return [
        ("`x + b`", lambda: x + b),
        ("`x * 2.0`", lambda: x * 2.0),
        ("`linear(data, w)`", lambda: torch.addmm(torch.zeros(4, requires_grad=True), x.detach(), w.mT)),
        ("`x.mean()`", lambda: x.mean()),
        ("`embedding(ids, table)`", lambda: functional.embedding(torch.tensor([1, 2]), table)),
        ("`conv2d(data, kernel)`", lambda: functional.conv2d(picture, kernel.requires_grad_())),
        ("attention", lambda: functional.scaled_dot_product_attention(*[x[None, None]] * 3)),
        ("a Function, one of two outputs used", lambda: Two.apply(x, 2.0)[0]),
        ("a Function with an async all_reduce", lambda: AsyncLinear.apply(x, w)),
    ]


def show(tensors: Any) -> str:
    return ", ".join("None" if t is None else str(list(t.shape)) for t in tensors)


def row(what: str, out: torch.Tensor) -> str:
    """One line of the table: what the hooks got, what a replay gave, and whether a bundle alone will do."""
    node: Any = out.grad_fn
    seen: list[Any] = []
    handle = node.register_hook(lambda outputs, inputs: seen.extend([inputs, outputs]))
    (out * 1).backward(torch.ones_like(out), retain_graph=True)
    handle.remove()
    received, returned = seen
    try:
        with alone.alone():
            again = alone.call(node, received)
        same = all(alone.equal(a, b) for a, b in zip(again, returned, strict=False) if b is not None)
        replay = "the same bits" if same else "other values"
    except alone.RefusedError as error:
        replay = f"refused: {error}"
    name = alone.name_of(node)
    bundle = "with `--source`" if alone.is_function(node) else "yes" if name in operations.OPERATIONS else "no"
    return f"| {what} | `{name}` | {show(received)} | {show(returned)} | {replay} | {bundle} |"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_table_on_the_page(tmp_path: Path) -> None:
    """Every line of the table stands on the page as running the nodes gives it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        rows = [row(what, make()) for what, make in makers()]
    finally:
        dist.destroy_process_group()
    text = PAGE.read_text()
    missing = [line for line in rows if line not in text]
    assert not missing, "\n".join(rows)
