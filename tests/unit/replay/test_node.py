"""A node called alone gives what the engine got from it, and reaches nothing outside."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from distdbg.record.engine import root_nodes, walk
from distdbg.replay import node as alone
from distdbg.replay import operations
from tests.unit.replay import graphs

Passed = dict[Any, tuple[tuple[Any, ...], tuple[Any, ...]]]


def backward(loss: torch.Tensor) -> tuple[list[Any], Passed]:
    """Run a backward that keeps the graph; what each node received and returned."""
    nodes, _ = walk(root_nodes([loss]))
    passed: Passed = {}
    handles = [
        node.register_hook(lambda outputs, inputs, node=node: passed.update({node: (inputs, outputs)}))
        for node in nodes
    ]
    loss.backward(retain_graph=True)
    for handle in handles:
        handle.remove()
    return nodes, passed


@pytest.mark.parametrize("make", [graphs.gpt_loss, graphs.resnet_loss, graphs.function_loss])
def test_all_nodes_replay_bit_for_bit(make: Callable[[], torch.Tensor]) -> None:
    """Every node but the leaves returns the same bits again, after the engine's own reductions."""
    nodes, passed = backward(make())
    replayed = 0
    for node in nodes:
        if alone.why_never(node) is not None:
            continue
        received, returned = passed[node]
        with alone.alone():
            again = alone.call(node, received)
        pairs = [(a, b) for a, b in zip(again, returned, strict=False) if b is not None]
        assert pairs, node.name()
        assert all(alone.equal(a, b) for a, b in pairs), node.name()
        replayed += 1
    leaves = sum(alone.name_of(node) == "AccumulateGrad" for node in nodes)
    assert replayed == len(nodes) - leaves > 5


@pytest.mark.parametrize("make", [graphs.gpt_loss, graphs.resnet_loss])
def test_rebuilt_operations_agree(make: Callable[[], torch.Tensor]) -> None:
    """Operations of the table, rebuilt from what their nodes saved, give the node's gradients but for rounding."""
    nodes, passed = backward(make())
    rebuilt = set()
    for node in nodes:
        name = alone.name_of(node)
        if name not in operations.OPERATIONS:
            continue
        saved = {key.removeprefix("_saved_"): getattr(node, key) for key in dir(node) if key.startswith("_saved_")}
        places = [alone.metadata_of(edge) for edge in alone.edges(node)]
        received, returned = passed[node]
        found = alone.checked(name, operations.gradients(name, saved, received, places), alone.edges(node))
        for new, old in zip(found, returned, strict=False):
            if old is not None:
                torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5, msg=name)
        rebuilt.add(name)
    assert len(rebuilt) >= 4


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: x * y, lambda x, y: x / y, lambda x, y: x - y, lambda x, y: x**3, lambda x, y: x**y,
        lambda x, y: x.sqrt(), lambda x, y: x.rsqrt(), lambda x, y: x.log(), lambda x, y: x.exp(),
        lambda x, y: (x / 9).tanh(), lambda x, y: x.sigmoid(), lambda x, y: x.relu(), lambda x, y: x.mm(y.mT),
        lambda x, y: torch.bmm(x[None], y.mT[None]), lambda x, y: torch.addmm(x[:, :1], x, y.mT),
        lambda x, y: x.softmax(-1), lambda x, y: x.log_softmax(0), lambda x, y: x.sum(0, keepdim=True),
        lambda x, y: x.sum(), lambda x, y: x.mean(), lambda x, y: x.mean((0, 1)),
        lambda x, y: torch.nn.functional.mse_loss(x, y), lambda x, y: torch.nn.functional.gelu(x, approximate="tanh"),
        lambda x, y: torch.nn.functional.silu(x), lambda x, y: torch.nn.functional.layer_norm(x, (4,), y[0], y[1]),
    ],
)  # fmt: skip
def test_operations_of_the_table(make: Callable[[Any, Any], torch.Tensor]) -> None:
    """Each operation gives the gradients of the real node."""
    torch.manual_seed(0)
    x, y = (torch.rand(3, 4, dtype=torch.float64) + 0.5 for _ in range(2))
    out = make(x.requires_grad_(), y.requires_grad_())
    node, name = out.grad_fn, alone.name_of(out.grad_fn)
    assert name in operations.OPERATIONS
    grad = torch.randn_like(out)
    saved = {key.removeprefix("_saved_"): getattr(node, key) for key in dir(node) if key.startswith("_saved_")}
    with alone.alone():
        want = alone.call(node, (grad,))
    places = [alone.metadata_of(edge) for edge in alone.edges(node)]
    found = alone.checked(name, operations.gradients(name, saved, (grad,), places), alone.edges(node))
    for new, old in zip(found, want, strict=False):
        if old is not None:
            torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-7)


def test_leaves_and_checkpoints_are_never_run() -> None:
    """AccumulateGrad and CheckpointFunction say why they are not run again."""
    x = torch.ones(2, requires_grad=True)
    leaf = (x * 2).grad_fn.next_functions[0][0]
    assert "parameter's gradient" in str(alone.why_never(leaf))
    node = checkpoint(torch.exp, x, use_reentrant=True).grad_fn
    assert alone.name_of(node) == "CheckpointFunctionBackward"
    assert "gradients once more" in str(alone.why_never(node))


def test_the_random_state_is_put_back() -> None:
    """A replay that draws random numbers leaves the generator as it was."""
    before = torch.get_rng_state()
    with alone.alone():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_engines_errors() -> None:
    """Wrong shapes, wrong numbers of gradients and what is no gradient get torch's own words."""

    class Wrong(torch.autograd.Function):
        result: Any = None

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return Wrong.result

    for result in (torch.ones(2), (torch.ones(3), torch.ones(3)), "text"):
        Wrong.result = result
        y = Wrong.apply(torch.ones(3, requires_grad=True))
        with pytest.raises(RuntimeError) as torchs:
            y.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError) as ours, alone.alone():
            alone.call(y.grad_fn, (torch.ones(3),))
        assert (type(ours.value), str(ours.value)) == (type(torchs.value), str(torchs.value))
