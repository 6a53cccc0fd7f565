"""Backward passes as the recorder sees them."""

import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from distdbg.record import engine
from distdbg.record.engine import root_nodes, walk

Recording = Callable[[], pd.DataFrame]


class Fails(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient here")


def hooks(events: pd.DataFrame) -> list[tuple[str, str]]:
    found = events[events["event"].isin(["prehook", "posthook"])]
    return list(zip(found["event"], found["node"], strict=True))


def test_every_node_is_entered_and_left_in_order(recording: Recording) -> None:
    """Each node has a prehook and a posthook, numbered in order of execution, between begin, final and end."""
    x = torch.ones(3, requires_grad=True)
    ((x * 2).exp() + 1).sum().backward()
    events = recording()
    names = ["SumBackward0", "AddBackward0", "ExpBackward0", "MulBackward0", "AccumulateGrad"]
    assert hooks(events) == [(event, name) for name in names for event in ("prehook", "posthook")]
    assert events[events["event"] == "prehook"]["node_index"].tolist() == [0, 1, 2, 3, 4]
    kinds = events["event"].tolist()
    assert kinds[1] == "backward_begin"
    assert kinds[-3:] == ["final_callback", "backward_end", "stop"]


def test_a_node_that_raises_stays_open(recording: Recording) -> None:
    """The failing node has a prehook and no posthook; the exception is the user's, unchanged."""
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"^no gradient here$"):
        (Fails.apply(x) * 2).sum().backward()
    events = recording()
    assert hooks(events)[-1] == ("prehook", "FailsBackward")
    raised = events[events["event"] == "backward_raised"]
    assert raised["detail"].tolist() == ["ValueError: no gradient here"]


def test_what_a_hook_received(recording: Recording) -> None:
    """Tensors and Nones are counted: a second output that was not used gives a None."""
    x = torch.ones(4, 4, requires_grad=True)
    torch.split(x.unbind()[0] * 2, 2)[0].sum().backward()
    details = recording().query("event == 'prehook'").set_index("node")["detail"]
    assert details["SplitBackward0"] == "1 tensor, 1 None"
    assert details["UnbindBackward0"] == "1 tensor, 3 None"


def test_all_ways_into_the_engine(recording: Recording) -> None:
    """backward, autograd.backward, autograd.grad, edges as roots, leaves, repeated and double backward are seen."""
    x = torch.ones(3, requires_grad=True)
    y = (x**3).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    torch.autograd.backward([y], retain_graph=True)
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    g.sum().backward()
    torch.autograd.grad([get_gradient_edge((x * 2).sum())], [x], grad_outputs=[torch.ones(())])
    x.sum().backward(inputs=[x])
    torch.ones(2, requires_grad=True).backward(torch.ones(2))
    torch.func.grad(lambda t: (t**2).sum())(torch.ones(2))
    events = recording()
    begins, ends = (events[events["event"] == f"backward_{what}"] for what in ("begin", "end"))
    assert len(begins) == len(ends) == 8
    assert len(events[events["event"] == "prehook"]) == len(events[events["event"] == "posthook"]) > 15


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(recording: Recording, reentrant: bool) -> None:
    """Recomputed modules are within the backward, and a reentrant backward within a backward."""
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.ones(2, 3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    events = recording()
    assert (events["event"] == "backward_begin").sum() == (2 if reentrant else 1)
    inside = events[(events["event"] == "forward_begin") & (events["module"] == "1")]
    assert len(inside) == 2
    assert (events["event"] == "prehook").sum() == (events["event"] == "posthook").sum()


def test_threads_keep_apart(recording: Recording) -> None:
    """Two backwards at once have numbers and threads of their own, and all their nodes come in pairs."""
    barrier = threading.Barrier(2)

    def work() -> None:
        x = torch.ones(3, requires_grad=True)
        y = (x * 2).exp().sum()
        barrier.wait()
        for _ in range(20):
            y.backward(retain_graph=True)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = recording()
    nodes = events[events["event"].isin(["prehook", "posthook"])]
    for (_, _), group in nodes.groupby(["thread", "seq"]):
        assert group["event"].tolist() == ["prehook", "posthook"] * 4
    assert nodes.groupby("seq")["thread"].nunique().max() == 1
    assert nodes["seq"].nunique() == 40


def test_the_users_hooks_stay_and_ours_go(recording: Recording) -> None:
    """Hooks of the user's on the same nodes run as before, and are all that is left afterwards."""
    calls: list[str] = []
    x = torch.ones(3, requires_grad=True)
    y = (x * 2).exp()
    node = y.grad_fn
    assert node is not None
    node.register_hook(lambda *_: calls.append("post"))
    node.register_prehook(lambda _: calls.append("pre"))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    recording()
    assert calls == ["pre", "post"] * 2
    x.grad = None
    (x * 2).sum().backward()
    assert calls == ["pre", "post"] * 2


def test_nothing_is_kept_alive(recording: Recording) -> None:
    """After a backward neither the graph nor a gradient lives on because of the recorder."""
    x = torch.ones(3, requires_grad=True)
    y = (x * 2).exp().sum()
    saved = weakref.ref(y)
    y.backward()
    gradient = weakref.ref(x.grad)
    x.grad = None
    del y
    gc.collect()
    assert saved() is None
    assert gradient() is None
    recording()


def test_results_are_bitwise_the_same(run_dir: Any) -> None:
    """Gradients with and without recording are equal to the last bit."""
    import distdbg

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 4))
        model(torch.randn(5, 8)).logsumexp(-1).sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = gradients()
    distdbg.start(run_dir)
    recorded = gradients()
    distdbg.stop()
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


def test_a_walk_visits_each_node_once() -> None:
    """Eighteen residual adds have 2^18 paths and a few dozen nodes."""
    x = y = torch.ones(2, requires_grad=True)
    for _ in range(18):
        y = y + y.sin()
    nodes, truncated = walk(root_nodes([y]))
    assert len(nodes) == len(set(nodes)) == 18 * 2 + 1
    assert not truncated
    assert x.grad is None


def test_a_deep_chain_is_cut_and_said(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what can be walked safely the walk stops, the backward runs, and the record says so."""
    monkeypatch.setattr(engine, "safe_nodes", lambda: 50)
    monkeypatch.setattr(engine, "SAFE_DEPTH", 50)
    x = y = torch.ones(2, requires_grad=True)
    for _ in range(200):
        y = y * 1.0
    y.sum().backward()
    assert x.grad is not None
    begin = recording().query("event == 'backward_begin'")
    assert begin["detail"].str.contains("^5. nodes .*cut short").all()


def test_sixty_thousand_nodes_do_not_crash(recording: Recording) -> None:
    """A chain that would overflow the stack when its wrappers are torn down is walked only in part."""
    x = y = torch.ones(1, requires_grad=True)
    for _ in range(60_000):
        y = y * 1.0
    y.backward()
    del y
    gc.collect()
    assert x.grad is not None
    recording()


def test_roots_of_all_kinds() -> None:
    """Tensors, leaves and gradient edges are roots; what has no graph is none."""
    x = torch.ones(2, requires_grad=True)
    found = root_nodes([x * 2, x, get_gradient_edge(x.exp()), torch.ones(1)])
    assert [type(node).__name__ for node in found] == ["MulBackward0", "AccumulateGrad", "ExpBackward0"]


def test_describe_notes_shapes(run_dir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --describe shapes and dtypes of what a node receives and returns are there, too."""
    import distdbg

    monkeypatch.setenv("DISTDBG_DESCRIBE", "1")
    distdbg.start(run_dir)
    x = torch.ones(2, 3, requires_grad=True)
    (x @ torch.ones(3, 4)).sum().backward()
    distdbg.stop()
    described = distdbg.load(run_dir).query("event == 'describe' and node == 'MmBackward0'")
    assert described["detail"].tolist() == ["received (float32[2, 4])", "returned (float32[2, 3], None)"]


def test_a_signal_handlers_exception_passes_through(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user's handler raises while our code runs is not caught: it is theirs."""
    counter = itertools.count()

    def handler_like(*_: object) -> int:
        exec(compile("raise InterruptedError('from a handler')", "user_handler.py", "exec"))
        return next(counter)

    monkeypatch.setattr(engine, "walk", handler_like)
    with pytest.raises(InterruptedError):
        torch.ones(1, requires_grad=True).sum().backward()
    recording()


def test_a_fault_of_our_own_stops_recording_only(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the recorder itself breaks, it says so once, stops, and training goes on."""

    def broken(self: engine.Engine) -> type[engine.NodeHook]:
        return {}["no such key"]  # type: ignore[index,return-value]

    monkeypatch.setattr(engine, "root_nodes", lambda outputs: [object()])
    x = torch.ones(1, requires_grad=True)
    x.sum().backward()
    x.sum().backward()
    assert x.grad is not None
    assert capsys.readouterr().err.count("recording stopped") == 1
    assert broken is not None
