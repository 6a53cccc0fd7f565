"""A failed node: its bundle, its replays, and a training that notices nothing of it."""

import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import distdbg
from distdbg.record import current
from distdbg.record.capture import parse_requests
from distdbg.replay import Bundle, load_bundle


class Step(torch.autograd.Function):
    """Identity whose backward is what the test puts here."""

    does: Callable[..., Any]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, level: float = 1.0) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.level = level
        ctx.parts = (1, [2.5, "text"], torch.float16, {"a": None})
        ctx.thing = object()
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Step.does(ctx, grad), None


@pytest.fixture
def start(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Starts a recording with an environment, to the run directory."""

    def begin(**environ: str) -> Path:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        distdbg.start(run_dir)
        return run_dir

    yield begin
    distdbg.stop()


def fail(does: Callable[..., Any], x: torch.Tensor | None = None, **options: Any) -> BaseException:
    """Run a backward that fails in a Step; returns the exception."""
    Step.does = staticmethod(does)
    x = torch.arange(6.0).reshape(2, 3).requires_grad_() if x is None else x
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the callers look at it
        (Step.apply(x * 2, *options.values()) * 3).sum().backward()
    return caught.value


def bundles(run_dir: Path) -> list[Bundle]:
    return [load_bundle(path) for path in sorted((run_dir / "bundles").glob("*.bundle"))]


def only(run_dir: Path) -> Bundle:
    (found,) = bundles(run_dir)
    return found


def refuse(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"level must be positive, got {ctx.level}")


def test_a_deterministic_failure(start: Callable[..., Path]) -> None:
    """The bundle holds what the node received and saved, its context, and that it failed alike three times."""
    run_dir = start()
    fail(refuse, level=0.0)
    bundle = only(run_dir)
    about = bundle.about
    assert bundle.path.name == "rank0-step0-StepBackward.bundle"
    assert (about["rank"], about["step"], about["node"], about["reason"]) == (0, 0, "StepBackward", "failure")
    assert about["replay"]["kind"] == "deterministic"
    assert [run["outcome"] for run in about["replay"]["runs"]] == ["same error"] * 3
    assert about["outcome"].startswith("StepBackward failed the same way in 3 of 3 runs alone")
    assert about["error"]["title"] == "ValueError: level must be positive, got 0.0"
    assert about["source"].startswith("tests/unit/record/test_capture.py:")
    assert torch.equal(bundle.inputs[0], torch.full((2, 3), 3.0))
    assert torch.equal(bundle.saved["saved_0"], torch.arange(6.0).reshape(2, 3) * 2)
    assert bundle.context == {"level": 0.0, "parts": (1, [2.5, "text"], torch.float16, {"a": None})}
    assert any("ctx.thing" in text for text in about["left_out"])
    (gradient,) = about["inputs"]
    assert (gradient["shape"], gradient["dtype"], gradient["strides"]) == ([2, 3], "float32", [3, 1])
    assert (gradient["finite"], gradient["min"], gradient["max"]) == (True, 3.0, 3.0)


def test_the_exception_stays_as_it_was(start: Callable[..., Path]) -> None:
    """Type, text, traceback and context are those of a run without capture."""

    def seen() -> tuple[Any, ...]:
        error = fail(refuse)
        frames = [f.name for f in traceback.extract_tb(error.__traceback__) if "/record/engine.py" not in f.filename]
        return type(error), str(error), frames, error.__context__, error.__cause__

    plain = seen()
    start()
    assert seen() == plain


def test_a_flaky_node(start: Callable[..., Path]) -> None:
    """A node that raises once is told from one that always does."""
    run_dir = start()
    calls: list[int] = []

    def once(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("a passing trouble")
        return grad

    fail(once)
    assert len(calls) == 4
    about = only(run_dir).about
    assert about["replay"]["kind"] == "flaky"
    assert "failed in 0 of 3 runs alone: the error is flaky" in about["outcome"]


def test_values_to_blame(start: Callable[..., Path]) -> None:
    """A node that raises on NaN gives no error with the NaN replaced, and the outcome says so."""
    run_dir = start()

    def strict(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if ctx.saved_tensors[0].isnan().any():
            raise FloatingPointError("not a number")
        return grad

    fail(strict, torch.tensor([1.0, float("nan"), float("inf")]).requires_grad_())
    bundle = only(run_dir)
    assert "values of saved 0 replaced by 0 it gives no error: values are to blame" in bundle.outcome
    saved = bundle.about["saved"]["saved_0"]
    assert (saved["finite"], saved["nan"], saved["inf"], saved["min"], saved["max"]) == (False, 1, 1, 2.0, 2.0)


def test_values_not_to_blame(start: Callable[..., Path]) -> None:
    """Where the error stays with all values finite they are not blamed."""
    run_dir = start()
    fail(refuse, torch.tensor([float("nan")]).requires_grad_(), level=0.0)
    assert "they are not to blame" in only(run_dir).outcome


def test_a_wrong_shape(start: Callable[..., Path]) -> None:
    """What only the engine checks fails the same way in a replay."""
    run_dir = start()
    error = fail(lambda ctx, grad: grad[:, :2])
    assert "returned an invalid gradient at index 0 - got [2, 2]" in str(error)
    assert only(run_dir).about["replay"]["kind"] == "deterministic"


def test_c_plus_plus_nodes(start: Callable[..., Path]) -> None:
    """A tensor changed in place and a graph used twice: the node fails alike, what it saved is told as lost."""
    run_dir = start()
    y = torch.ones(3, requires_grad=True).exp()
    loss = (y * 2).sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
    bundle = only(run_dir)
    assert bundle.about["node"] == "ExpBackward0"
    assert bundle.about["replay"]["kind"] == "deterministic"
    assert bundle.about["saved"]["result"]["now"]["shape"] == [3]
    assert not bundle.replay().ran
    loss = torch.ones(3, requires_grad=True).exp().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert [found.about["replay"]["kind"] for found in bundles(run_dir)] == ["deterministic"] * 2


def test_the_module_is_in_it(start: Callable[..., Path]) -> None:
    """The node's module is named, with its own parameters and buffers."""
    run_dir = start()

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor([1.0, 2.0]))
            self.register_buffer("seen", torch.tensor(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Step.apply(x * self.factor)
            return out

    Step.does = staticmethod(refuse)
    model = nn.Sequential(nn.Linear(2, 2), Scale())
    with pytest.raises(ValueError, match="level"):
        model(torch.ones(1, 2)).sum().backward()
    bundle = only(run_dir)
    assert (bundle.about["module"], bundle.about["module_class"]) == ("1", "Scale")
    assert torch.equal(bundle.parameters["factor"], torch.tensor([1.0, 2.0]))
    assert int(bundle.buffers["seen"]) == 3


def test_checkpointed(start: Callable[..., Path]) -> None:
    """In reentrant checkpointing the inner node is captured, once; the outer one is never run again."""
    run_dir = start()
    Step.does = staticmethod(refuse)
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="level"):
        checkpoint(lambda x: Step.apply(x * weight), weight * 2, use_reentrant=True).sum().backward()
    assert [bundle.about["node"] for bundle in bundles(run_dir)] == ["StepBackward"]
    assert weight.grad is None


def test_recomputation_is_not_run_again(start: Callable[..., Path]) -> None:
    """What a checkpointed forward recomputes is not recomputed once more: it would run the user's module."""
    run_dir = start()
    calls: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        out: torch.Tensor = Step.apply(x.exp())
        return out.sin()

    Step.does = staticmethod(refuse)
    with pytest.raises(ValueError, match="level"):
        checkpoint(forward, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
    assert len(calls) == 2
    assert "recomputed" in only(run_dir).outcome


def test_no_gradient_is_added_twice(start: Callable[..., Path]) -> None:
    """A node that ran a backward of its own is not run again: no parameter's gradient changes."""
    run_dir = start()
    weight = torch.ones(2, requires_grad=True)

    def accumulates(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            (weight * 5).sum().backward()
        raise ValueError("after it")

    fail(accumulates)
    assert weight.grad is not None
    assert weight.grad.tolist() == [5.0, 5.0]
    assert "ran a backward of its own" in only(run_dir).outcome


def test_a_backward_that_only_the_replay_runs(start: Callable[..., Path]) -> None:
    """A replay that begins a backward which would add to gradients is stopped there."""
    run_dir = start()
    weight = torch.ones(2, requires_grad=True)
    calls: list[int] = []

    def later(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            with torch.enable_grad():
                (weight * 5).sum().backward()
        raise ValueError("after it")

    fail(later)
    assert weight.grad is None
    assert "was not run again" in only(run_dir).outcome


def test_no_collective_is_issued(start: Callable[..., Path], tmp_path: Path) -> None:
    """A replay issues no collective: it is left out where the node fails alike without, else nothing is said."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        run_dir = start()
        calls: list[int] = []
        later: list[int] = []

        def reduces(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            grad = grad.clone()
            dist.all_reduce(grad)
            calls.append(1)
            raise ValueError("after it")

        def passes_later(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(grad.clone(), async_op=True).wait()
            later.append(1)
            if len(later) == 1:
                raise ValueError("once")
            return grad

        def gathers(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            dist.all_gather([torch.empty_like(grad)], grad)
            raise ValueError("after it")

        fail(reduces)
        assert len(calls) == 5  # the job's, three alone, one in float64
        fail(passes_later)
        fail(gathers)
        distdbg.stop()
        told = [bundle.outcome for bundle in sorted(bundles(run_dir), key=lambda b: b.about["captured_unix_ns"])]
        assert "3 of 3 runs alone (without its all_reduce): the error is deterministic" in told[0]
        assert "issues a collective (all_reduce)" in told[1]
        assert "issues a collective (allgather)" in told[2]
        events = distdbg.load(run_dir)
        assert (events["event"] == "collective").sum() == 3
    finally:
        dist.destroy_process_group()


def test_gradients_changed_in_place(start: Callable[..., Path]) -> None:
    """Each run gets a copy of what came in: one that works in place sees the same values each time."""
    run_dir = start()
    seen: list[float] = []

    def doubles(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        seen.append(float(grad.reshape(-1)[0]))
        if len(seen) > 1:
            grad.mul_(2)
        raise ValueError("after it")

    fail(doubles)
    assert seen[:4] == [3.0] * 4
    assert only(run_dir).inputs[0].tolist() == [[3.0] * 3] * 2


def test_nothing_is_kept_alive(start: Callable[..., Path]) -> None:
    """Gradient, saved tensor and graph go as soon as the user lets go of the exception."""
    start()
    alive: list[weakref.ref[Any]] = []

    def noting(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        alive.extend([weakref.ref(grad), weakref.ref(ctx.saved_tensors[0]), weakref.ref(ctx)])
        raise ValueError("here")

    fail(noting)
    gc.collect()
    assert len(alive) >= 12
    assert not [ref for ref in alive if ref() is not None]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("distdbg-capture")]


def test_no_leaf_gradient_is_copied(start: Callable[..., Path]) -> None:
    """With capture on a leaf's gradient is still moved, not copied, into .grad."""
    start()
    places: list[int] = []

    class Notes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            out = grad * 2
            places.append(out.data_ptr())
            return out

    x = torch.ones(100, requires_grad=True)
    Notes.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.data_ptr() == places[0]


def test_switched_off(start: Callable[..., Path]) -> None:
    """With capture off there is no bundle, and no node is run again."""
    run_dir = start(DISTDBG_CAPTURE="0")
    calls: list[int] = []

    def counts(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        raise ValueError("here")

    fail(counts)
    assert calls == [1]
    assert not (run_dir / "bundles").exists()


def test_out_of_memory(start: Callable[..., Path]) -> None:
    """Where memory ran out nothing is run and no value read: the bundle has shapes and the error."""
    run_dir = start()
    calls: list[int] = []

    def allocates(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.empty(1 << 50)

    error = fail(allocates)
    assert "allocate memory" in str(error)
    assert calls == [1]
    bundle = only(run_dir)
    assert bundle.about["error"]["message"] == str(error)
    assert bundle.about["inputs"][0]["shape"] == [2, 3]
    assert (bundle.tensors, bundle.about["replay"]["ran"], bundle.replay().ran) == ({}, False, False)


def test_a_sparse_gradient(start: Callable[..., Path]) -> None:
    """A node that received a sparse gradient is run again with it, and leaves a bundle that describes it."""
    run_dir = start()
    Step.does = staticmethod(refuse)
    table = Step.apply(torch.ones(5, 2, requires_grad=True) * 2, 0.0)
    with pytest.raises(ValueError, match="level must be positive"):
        torch.nn.functional.embedding(torch.tensor([1, 2]), table, sparse=True).sum().backward()
    bundle = only(run_dir)
    assert (bundle.about["replay"]["kind"], bundle.inputs) == ("deterministic", [None])
    assert "it was sparse" in bundle.replay().summary


@pytest.mark.parametrize(
    ("x", "change"),
    [
        (torch.ones(0, 2), lambda y: y),
        (torch.ones(4, 2, dtype=torch.complex64), lambda y: y.abs()),
        (torch.ones(4, 2, dtype=torch.bfloat16), lambda y: y),
        (torch.ones(4, 2), lambda y: y.t() @ torch.ones(4, 3)),
        (torch.ones(4, 2), lambda y: y.sum().expand(4, 4)),
    ],
    ids=["zero-size", "complex", "bfloat16", "strided", "expanded"],
)
def test_gradients_of_all_kinds(x: torch.Tensor, change: Callable[[Any], Any], start: Callable[..., Path]) -> None:
    """Zero-size, complex, bfloat16, strided and expanded: the node fails again, and its bundle opens."""
    run_dir = start()
    Step.does = staticmethod(refuse)
    x.requires_grad_()
    with pytest.raises(ValueError, match="level must be positive"):
        change(Step.apply(x * 2, 0.0)).sum().backward()
    bundle = only(run_dir)
    assert bundle.about["replay"]["kind"] == "deterministic"
    assert (bundle.inputs[0].shape, bundle.inputs[0].dtype) == (x.shape, x.dtype)
    assert "--source" in bundle.replay().summary


def test_bounded_in_size(start: Callable[..., Path]) -> None:
    """Tensors above --capture-mb are described only, and a node with such gradients is not run again."""
    run_dir = start(DISTDBG_CAPTURE_MB="0.5")
    fail(refuse, torch.ones(1 << 18, requires_grad=True), level=0.0)
    bundle = only(run_dir)
    assert sum(file.stat().st_size for file in bundle.path.iterdir()) < 1 << 20
    (gradient,) = bundle.about["inputs"]
    assert (gradient["shape"], gradient.get("key"), bundle.inputs) == ([1 << 18], None, [None])
    assert "more than --capture-mb allows" in bundle.outcome


def test_bounded_in_number(start: Callable[..., Path]) -> None:
    """A script that catches the same failure at every step leaves three bundles."""
    run_dir = start()
    for _ in range(5):
        fail(refuse)
    assert len(bundles(run_dir)) == 3


def test_a_run_directory_that_is_gone(
    start: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no bundle can be written one line says so, and the exception is the user's."""
    run_dir = start()
    (run_dir / "bundles").write_text("in the way")
    assert str(fail(refuse)) == "level must be positive, got 1.0"
    assert "no bundle of the failed node" in capsys.readouterr().err


def test_a_hook_around_the_node(start: Callable[..., Path]) -> None:
    """An error of a user's hook on the node is not taken for the node's own."""
    run_dir = start()
    x = torch.ones(3, requires_grad=True)
    y = x.exp()

    def hook(outputs: Any, inputs: Any) -> None:
        raise ValueError("in a hook")

    y.grad_fn.register_hook(hook)
    with pytest.raises(ValueError, match="in a hook"):
        y.sum().backward()
    assert "(hook), which torch called around the node" in only(run_dir).outcome


def test_asked_for(start: Callable[..., Path]) -> None:
    """--capture writes a bundle of a node that does not fail, with what it returned, once, without changing results."""
    plain = torch.arange(3.0, requires_grad=True)
    (plain.exp() * 2).sum().backward()
    run_dir = start(DISTDBG_CAPTURE="ExpBackward0")
    x = torch.arange(3.0, requires_grad=True)
    (x.exp() * 2).sum().backward()
    (torch.arange(3.0, requires_grad=True).exp() * 2).sum().backward()
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)
    bundle = only(run_dir)
    assert (bundle.about["reason"], bundle.about["replay"]["kind"]) == ("asked", "equal")
    assert torch.equal(bundle.outputs[0], x.grad)
    assert bundle.outcome == "ExpBackward0, run again 3 times, returned the same gradients bit for bit"


def test_asked_for_a_module_at_a_step(start: Callable[..., Path]) -> None:
    """MODULE@STEP takes all nodes of the module in that step; another rank's request is none of ours."""
    run_dir = start(DISTDBG_CAPTURE="0.act@1 AddmmBackward0#7")
    model = nn.Sequential(nn.Sequential())
    model[0].add_module("act", nn.Softplus())
    for _ in range(3):
        model(torch.ones(2, requires_grad=True)).sum().backward()
        distdbg.step()
    assert [(b.about["node"], b.about["step"]) for b in bundles(run_dir)] == [("SoftplusBackward0", 1)]


def test_a_node_that_stands(start: Callable[..., Path]) -> None:
    """While a node runs another thread is told which it is and what it received; after it nothing is held."""
    start()
    session = current()
    assert session is not None
    engine = next(part for part in session.parts if hasattr(part, "open_nodes"))
    seen: list[Any] = []

    def looks(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: seen.extend(engine.open_nodes()))
        thread.start()
        thread.join()
        return grad

    Step.does = staticmethod(looks)
    (Step.apply(torch.ones(2, requires_grad=True)) * 3).sum().backward()
    (node,) = seen
    assert (node["node"], node["node_index"]) == ("StepBackward", 2)
    assert [(about["shape"], about["max"]) for about in node["received"]] == [([2], 3.0)]
    assert engine.open_nodes() == []


def test_requests() -> None:
    """NODE@STEP#RANK is taken apart; what is none is refused."""
    (request,) = parse_requests("blocks.1.gate@3#2")
    assert (request.target, request.step, request.rank) == ("blocks.1.gate", 3, 2)
    assert [r.target for r in parse_requests("A B#1")] == ["A", "B"]
    with pytest.raises(ValueError, match="NODE or MODULE"):
        parse_requests("x@y")
