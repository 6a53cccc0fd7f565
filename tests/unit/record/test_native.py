"""The native recorder sees what Python's hooks see, event by event, and leaves nothing behind."""

import functools
import gc
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import distdbg
from distdbg import schema
from distdbg.analyze.read import read_run
from distdbg.errors import RecordingError
from distdbg.native import build, load
from distdbg.schema import EventKind
from distdbg.shard import ShardWriter
from tests import native
from tests.unit.shards import identity

COLUMNS = ["event", "step", "phase", "node", "node_index", "module", "parameter", "seq", "detail"]
WATCHDOG = ["heartbeat", "stall", "gc_begin", "gc_end"]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTDBG_NATIVE_DIR", str(native.built().parent))


class Twice(torch.autograd.Function):
    """Doubles its input; its backward fails, returns another shape, or neither."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: str) -> torch.Tensor:
        ctx.how = how
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
        if ctx.how == "raise":
            raise ValueError("no gradient here")
        return (grad[:1, :1] if ctx.how == "shape" else grad * 2), None


class Net(nn.Module):
    """A small network with a custom Function, a shared layer and a part that may be checkpointed."""

    def __init__(self, how: str = "", reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.reentrant = how, reentrant
        self.first, self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Twice.apply(self.shared(torch.relu(self.first(x))), self.how)
        if self.reentrant is not None:
            x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        out: torch.Tensor = self.last(x + self.shared(x))
        return out


def steps(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain() -> None:
    steps(Net())


def reentrant() -> None:
    steps(Net(reentrant=True))


def not_reentrant() -> None:
    steps(Net(reentrant=False))


def raises() -> None:
    with pytest.raises(ValueError, match=r"^no gradient here$"):
        steps(Net("raise"))


def wrong_shape() -> None:
    with pytest.raises(RuntimeError, match="invalid gradient"):
        steps(Net("shape"))


def again_and_again() -> None:
    loss = Net()(torch.ones(2, 4)).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def twice_differentiated() -> None:
    x = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    grad.square().sum().backward()


def some_inputs() -> None:
    net = Net()
    out = net(torch.ones(2, 4))
    torch.autograd.grad(out.sum(), [net.last.weight, net.first.bias], retain_graph=True)
    torch.autograd.backward([out.sum(), out.square().sum()], inputs=[net.shared.weight])


def leaves_and_edges() -> None:
    x = torch.ones(3, requires_grad=True)
    x.backward(torch.ones(3))
    y = (x * 2).sum()
    torch.autograd.backward(y)
    torch.autograd.grad((get_gradient_edge((x * 3).exp()),), [x], grad_outputs=(torch.ones(3),))


def hooks_of_the_user() -> None:
    net = Net()
    out = net(torch.ones(2, 4))
    out.register_hook(lambda grad: grad * 2)
    assert out.grad_fn is not None
    out.grad_fn.register_prehook(lambda grads: tuple(g * 2 for g in grads))
    out.grad_fn.register_hook(lambda outputs, inputs: None)
    net.first.weight.register_post_accumulate_grad_hook(lambda p: None)
    out.sum().backward()


def in_other_threads() -> None:
    nets = [Net() for _ in range(3)]
    for net in nets:
        thread = threading.Thread(target=lambda net=net: net(torch.ones(2, 4)).sum().backward())
        thread.start()
        thread.join()


def compiled() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    torch.compile(net, backend="eager")(torch.ones(2, 4)).sum().backward()


JOBS = [
    plain, reentrant, not_reentrant, raises, wrong_shape, again_and_again, twice_differentiated, some_inputs,
    leaves_and_edges, hooks_of_the_user, in_other_threads, compiled,
]  # fmt: skip


def events(place: Path, job: Callable[[], None], recorder: str, monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    monkeypatch.setenv("DISTDBG_RECORDER", recorder)
    distdbg.start(place)
    try:
        job()
    finally:
        distdbg.stop()
    assert f'"recorder": "{recorder}"' in next(place.glob("ranks/*/meta.json")).read_text()
    found = distdbg.load(place)
    return found[~found["event"].isin(WATCHDOG)].reset_index(drop=True)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_the_same_events(job: Callable[[], None], run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds, order, names, indices, modules, calls, parameters and counts are those of Python's hooks."""
    job()  # what is built at the first call is built
    expected = events(run_dir / "python", job, "python", monkeypatch)
    found = events(run_dir / "native", job, "native", monkeypatch)
    pd.testing.assert_frame_equal(found[COLUMNS].astype(str), expected[COLUMNS].astype(str))
    assert (expected["event"] == "prehook").sum() > 0


def test_gradients_are_bitwise_the_same(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is accumulated with hooks is what is accumulated without, and no gradient is cloned on the way."""

    def gradients(net: Net) -> list[torch.Tensor]:
        net(torch.linspace(-1, 1, 8).reshape(2, 4)).square().sum().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    expected = gradients(Net())
    monkeypatch.setenv("DISTDBG_RECORDER", "native")
    distdbg.start(run_dir)
    try:
        found = gradients(Net())
        given = torch.full((8,), 2.0)
        x = torch.ones(8, requires_grad=True)
        x.backward(given)
    finally:
        distdbg.stop()
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_leaves_are_left_clean(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After many recordings a leaf has no hook of ours: nothing is recorded any more, and memory does not grow."""
    monkeypatch.setenv("DISTDBG_RECORDER", "native")
    x = torch.ones(64, requires_grad=True)
    used = []
    for number in range(60):
        distdbg.start(run_dir / str(number))
        for _ in range(20):
            (x * 2).exp().sum().backward()
        before = distdbg_position()
        distdbg.stop()
        (x * 2).exp().sum().backward()
        assert distdbg_position() is None
        assert before is not None
        gc.collect()
        used.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert used[-1] - used[20] < 20_000  # KB


def distdbg_position() -> int | None:
    from distdbg.record import session

    found = session.current()
    return found.writer.position() if found is not None else None


def test_a_chain_of_400_000_nodes(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph so deep that wrappers of its nodes would overflow the stack is recorded whole and torn down."""
    monkeypatch.setenv("DISTDBG_RECORDER", "native")
    monkeypatch.setenv("DISTDBG_KEEP", "all")
    distdbg.start(run_dir)
    x = torch.ones(1, requires_grad=True)
    y = x
    for _ in range(200_000):
        y = (y * 1.0) + 0.0
    y.sum().backward()
    del y
    distdbg.stop()
    found = distdbg.load(run_dir)["event"].value_counts()
    assert found["prehook"] == found["posthook"] == 400_002


def expected_nodes(net: Net) -> dict[str, int]:
    """The nodes of a backward without the leaves, by name."""
    found: dict[str, int] = {}
    seen, stack = set(), [net(torch.ones(2, 4)).sum().grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if "AccumulateGrad" not in node.name():
                found[node.name()] = found.get(node.name(), 0) + 1
            stack.extend(following for following, _ in node.next_functions)
    return found


def test_threads_that_share_parameters(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards of several threads at once over the same leaves: all recorded, none lost, gradients as they are."""
    monkeypatch.setenv("DISTDBG_RECORDER", "native")
    net = Net()
    distdbg.start(run_dir)

    def work() -> None:
        for _ in range(40):
            net(torch.ones(2, 4)).sum().backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    distdbg.stop()
    events = distdbg.load(run_dir)
    found = events[events["node"].astype(str) != "AccumulateGrad"]["event"].value_counts()
    assert found["backward_begin"] == found["backward_end"] == 160
    assert found["prehook"] == found["posthook"] == 160 * sum(expected_nodes(net).values())
    assert set(events["thread"]) >= {1, 2, 3, 4}


@pytest.mark.parametrize("where", ["tensor hook", "posthook", "prehook", "leaf"])
def test_recording_stops_within_a_backward(where: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the engine is among a node's hooks just then, it comes to its end, and nothing stays behind."""
    monkeypatch.setenv("DISTDBG_RECORDER", "native")
    x = torch.ones(3, requires_grad=True)
    for number in range(20):
        distdbg.start(run_dir / str(number))
        y = x * 2
        assert y.grad_fn is not None
        handle = None
        if where == "tensor hook":
            y.register_hook(lambda grad: distdbg.stop())
        elif where == "posthook":
            y.grad_fn.register_hook(lambda outputs, inputs: distdbg.stop())
        elif where == "prehook":
            y.grad_fn.register_prehook(lambda grads: distdbg.stop())
        else:
            handle = x.register_post_accumulate_grad_hook(lambda p: distdbg.stop())
        y.exp().sum().backward()
        if handle is not None:
            handle.remove()
        assert distdbg_position() is None
        (x * 3).sum().backward()
    assert x.grad is not None


def test_a_child_forked_in_a_backward(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on with its backward and writes nothing to its parent's shard."""
    monkeypatch.setenv("DISTDBG_RECORDER", "native")
    distdbg.start(run_dir)
    parent, children = os.getpid(), []
    x = torch.ones(3, requires_grad=True)
    y = (x * 2).exp()
    y.register_hook(lambda grad: children.append(os.fork()) if os.getpid() == parent else None)
    y.sum().backward()
    if os.getpid() != parent:
        (x * 3).sum().backward()
        os._exit(7 if distdbg_position() is None else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
    distdbg.stop()
    found = distdbg.load(run_dir)["event"].value_counts()
    assert found["prehook"] == found["posthook"] == 4


@pytest.mark.parametrize("way", ["pass", "os._exit(3)", "sys.exit(3)"])
def test_the_process_ends_while_it_records(way: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from within a backward it ends with its own exit code, and what was recorded is there."""
    script = f"""
import os, sys, torch, distdbg
distdbg.start({str(run_dir)!r})
x = torch.ones(3, requires_grad=True)
for _ in range(50):
    (x * 2).exp().sum().backward()
def leave(grad):
    {way}
y = x * 2
y.register_hook(leave)
y.sum().backward()
"""
    env = {**os.environ, "DISTDBG_RECORDER": "native", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == (0 if way == "pass" else 3), done.stderr
    assert (distdbg.load(run_dir)["event"] == "prehook").sum() >= 200


def test_segments_change_under_several_threads(run_dir: Path) -> None:
    """Native and Python's writing share a segment's free offset: over many segments no record is lost or torn."""
    small = schema.SEGMENT_HEADER_SIZE + 10 * schema.RECORD_SIZE
    writer = ShardWriter(run_dir, identity(), {}, segment_bytes=small, keep_bytes=None)
    writer.emit(EventKind.STEP, seq=1)
    writer.use_native(load.load())

    def work(base: int) -> None:
        for number in range(300):
            (writer.emit if number % 2 else functools.partial(ShardWriter.emit, writer))(
                EventKind.STEP, seq=base + number
            )
            if number % 50 == 0:
                writer.maintain()

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.position() >= 1201
    writer.advance()
    writer.emit(EventKind.EXIT, 0, module=0, seq=2, a=-1, b=1 << 40)
    with pytest.raises(TypeError):
        writer.emit(EventKind.EXIT, nonsense=1)  # type: ignore[call-arg]
    writer.close()
    writer.emit(EventKind.STEP)
    assert writer.lost == 1
    records = read_run(run_dir).shards[0].records
    wanted = [1, 2, *(1000 * i + n for i in range(1, 5) for n in range(300))]
    assert sorted(records["seq"].tolist()) == sorted(wanted)
    assert records[records["kind"] == EventKind.EXIT][["a", "b", "step"]].tolist() == [(-1, 1 << 40, 1)]


def test_a_build_that_cannot_be_loaded(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leaves one line, and Python records."""
    monkeypatch.setenv("DISTDBG_NATIVE_DIR", str(tmp_path))
    monkeypatch.setenv("DISTDBG_RECORDER", "auto")
    monkeypatch.delitem(sys.modules, build.MODULE, raising=False)
    (tmp_path / build.file_name()).write_bytes(b"no library")
    distdbg.start(run_dir)
    plain()
    distdbg.stop()
    assert capsys.readouterr().err.count("can't be loaded") == 1
    assert '"recorder": "python"' in next(run_dir.glob("ranks/*/meta.json")).read_text()


def test_a_forked_child_records_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard is the parent's; a child's backward runs unrecorded and unharmed."""
    monkeypatch.setenv("DISTDBG_RECORDER", "native")
    torch.set_num_threads(1)
    distdbg.start(run_dir)
    plain()
    pid = os.fork()
    if pid == 0:
        try:
            plain()
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    plain()
    distdbg.stop()
    assert (distdbg.load(run_dir)["event"] == "backward_begin").sum() == 6


def test_native_is_asked_for_and_not_there(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no build fits, `native` is an error that says what to do, and `auto` records in Python."""
    monkeypatch.setenv("DISTDBG_NATIVE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("DISTDBG_RECORDER", "native")
    with pytest.raises(RecordingError, match="distdbg build-native"):
        distdbg.start(run_dir / "a")
    monkeypatch.setenv("DISTDBG_RECORDER", "auto")
    distdbg.start(run_dir / "b")
    plain()
    distdbg.stop()
    assert '"recorder": "python"' in next((run_dir / "b").glob("ranks/*/meta.json")).read_text()


def test_values_are_pythons_business(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --describe nodes have Python's hooks, and the rest is still written natively."""
    monkeypatch.setenv("DISTDBG_RECORDER", "native")
    monkeypatch.setenv("DISTDBG_DESCRIBE", "1")
    distdbg.start(run_dir)
    plain()
    distdbg.stop()
    found = distdbg.load(run_dir)["event"].value_counts()
    assert found["describe"] == 2 * found["prehook"]
