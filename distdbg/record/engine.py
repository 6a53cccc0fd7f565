"""Steps in where the autograd engine is called, and hooks every node of the graph it is about to run.

A hook's pair of events brackets the node: a prehook with no posthook is a node entered and not left.
Hooks hold no tensor and no node (a hook that refers to its node keeps the whole graph alive for good),
return None, and do nothing that can fail: so they catch nothing, since an exception that arises while
one runs is a user's signal handler's.
"""

import functools
import gc
import itertools
import resource
from typing import Any

import torch
import torch.autograd
import torch.autograd.graph

from distdbg.record import errors
from distdbg.record.capture import Capture, Held, Wanted, describe_open
from distdbg.record.modules import Modules
from distdbg.record.native import NativeBackward, NativeGraphs
from distdbg.record.session import Kind, Patches, Session
from distdbg.replay.node import refuse_accumulation, replaying
from distdbg.schema import pack_counts

_LEAF = "AccumulateGrad"
_NO_SEQUENCE = 1 << 63  # AccumulateGrad's sequence number is the largest there is
FLAG_TRUNCATED = 1

HARD_CAP = 1_000_000
SAFE_DEPTH = 2_000


def safe_nodes() -> int:
    """How many nodes may be walked in Python whatever their arrangement.

    A walk makes Python wrappers, and those of a long chain are torn down recursively: some 200 bytes
    of C stack a node were seen, and 60,000 nodes overflowed 8 MB. A quarter of that is taken.
    """
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    stack = 8 << 20 if soft == resource.RLIM_INFINITY else min(soft, 64 << 20)
    return max(2_000, 20_000 * stack // (8 << 20))


class Backward:
    """One call of the engine: its number, the counter of nodes executed, the handles to remove."""

    __slots__ = (
        "emit", "grads", "handles", "leaves", "nested_in", "next_index", "nodes", "number", "open", "outputs", "queued",
        "truncated",
    )  # fmt: skip

    def __init__(self, number: int, emit: Any) -> None:
        self.number = number
        self.emit = emit
        self.next_index = itertools.count().__next__
        self.handles: list[Any] = []
        self.leaves: list[Any] = []
        self.queued = False
        self.truncated = False
        self.nodes = 0
        self.open: NodeHook | None = None  # the node that runs, where its gradients are held ...
        self.grads: Any = None  # ... only while it runs
        self.nested_in: NodeHook | None = None  # a node that ran a backward of its own
        self.outputs: Any = None  # what the backward started from, while it runs

    def final(self) -> None:
        self.emit(Kind.BACKWARD_FINAL, 0, 0, self.number)


class NodeHook:
    """Both hooks of one node; ``word`` and ``parameter`` are its events' constant parts."""

    __slots__ = ("holds", "index", "module", "name", "parameter", "run", "sequence", "word")

    def __init__(
        self, run: Backward, name: int, module: int, word: int, parameter: int, sequence: int = 0, holds: bool = False
    ) -> None:
        self.run = run
        self.name = name
        self.module = module
        self.word = word
        self.parameter = parameter
        self.index = -1
        self.sequence = sequence
        self.holds = holds

    def pre(self, grads: Any) -> None:
        run = self.run
        self.index = index = run.next_index()
        if not run.queued:
            run.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(run.final)
        nones = 0
        for grad in grads:
            if grad is None:
                nones += 1
        if self.holds:
            run.open = self
            run.grads = grads
        run.emit(
            Kind.PREHOOK, self.name, self.module, index, self.word, len(grads) - nones | nones << 16 | self.parameter
        )

    def post(self, outputs: Any, inputs: Any) -> None:
        nones = 0
        for grad in outputs:
            if grad is None:
                nones += 1
        run = self.run
        run.open = run.grads = None
        run.emit(
            Kind.POSTHOOK,
            self.name,
            self.module,
            self.index,
            self.word,
            len(outputs) - nones | nones << 16 | self.parameter,
        )


class DescribingHook(NodeHook):
    """As NodeHook, and notes shapes and dtypes of what it receives (`--describe`)."""

    __slots__ = ("session",)
    session: Session

    def pre(self, grads: Any) -> None:
        super().pre(grads)
        self._describe("received", grads)

    def post(self, outputs: Any, inputs: Any) -> None:
        super().post(outputs, inputs)
        self._describe("returned", outputs)

    def _describe(self, what: str, tensors: Any) -> None:
        parts = []
        for tensor in tensors:
            if tensor is None:
                parts.append("None")
            else:
                parts.append(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
        text = f"{what} ({', '.join(parts)})"
        self.session.emit(
            Kind.DESCRIBE, self.name, self.module, self.index, self.word, self.session.intern("text", text)
        )


def walk(roots: list[Any]) -> tuple[list[Any], bool]:
    """All nodes reachable from the roots, breadth first, and whether a cap cut the walk short."""
    seen = set(roots)
    order = list(seen)
    level = order
    cap, depth = safe_nodes(), 0
    while level:
        depth += 1
        below = []
        for node in level:
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    below.append(following)
        order.extend(below)
        if len(order) > cap and (depth > SAFE_DEPTH or len(order) > HARD_CAP):
            return order, True
        level = below
    return order, False


def root_nodes(outputs: Any) -> list[Any]:
    """The nodes a backward starts from: of tensors, of leaves (their AccumulateGrad), of GradientEdges."""
    roots = []
    for output in outputs:
        node = getattr(output, "node", None) if not isinstance(output, torch.Tensor) else output.grad_fn
        if node is None and isinstance(output, torch.Tensor) and output.requires_grad:
            node = torch.autograd.graph.get_gradient_edge(output).node
        if node is not None and hasattr(node, "next_functions"):
            roots.append(node)
    return roots


class Engine:
    """Wraps the one function through which every backward reaches the engine."""

    def __init__(self, session: Session, modules: Modules, numerics: Any = None, native: Any = None) -> None:
        self._session = session
        self._modules = modules
        self._numerics = numerics
        self._capture = Capture(session) if session.settings.capture else None
        self._patches = Patches()
        self._numbers = itertools.count()
        self._node_names: dict[str, int] = {}
        self._live: set[Any] = set()  # Backward, NativeBackward
        # What needs the values of nodes is done by Python's hooks.
        values = numerics is not None or session.settings.describe
        asked = self._capture is not None and bool(self._capture.requests)
        self._native = None
        if native is not None and not values and not asked:
            self._native = NativeGraphs(native[0], native[1], session, modules, self._name_of)

    def attach(self) -> None:
        original = torch.autograd.graph._engine_run_backward

        @functools.wraps(original)
        def _engine_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._session.active or torch.compiler.is_compiling():
                return original(t_outputs, *args, **kwargs)
            if getattr(replaying, "on", False):
                refuse_accumulation(kwargs)
                return original(t_outputs, *args, **kwargs)
            run = self._begin(t_outputs)
            if run is None:
                return original(t_outputs, *args, **kwargs)
            try:
                result = original(t_outputs, *args, **kwargs)
            except BaseException as error:
                self._leave(run, error)
                raise
            self._leave(run, None)
            return result

        self._patches.set(torch.autograd.graph, "_engine_run_backward", _engine_run_backward)
        self._patches.set(torch.autograd, "_engine_run_backward", _engine_run_backward)

    def detach(self) -> None:
        self._patches.undo()
        for run in list(self._live):
            if isinstance(run, NativeBackward):
                run.pause()
            else:
                self._remove(run)
        if self._native is not None and not self._live:
            self._native.clear()

    forget = detach

    def open_nodes(self) -> list[dict[str, Any]]:
        """The nodes that run now and what they received; [] where that can't be had."""
        try:
            return describe_open(self._session, list(self._live))
        except Exception:  # the training thread goes on meanwhile: what is read may be gone
            return []

    def _begin(self, outputs: Any) -> Any:
        """The begun Backward or NativeBackward, None where recording has just stopped."""
        session = self._session
        if self._capture is not None:
            for around in list(self._live):  # another thread may begin or end a backward meanwhile
                around.nested_in = around.open
        number = next(self._numbers)
        run: Any = Backward(number, session.emit)
        try:
            native = None
            if self._native is not None:
                native = self._native.begin(number, outputs, self._live, self._capture is not None)
            if native is not None:
                run = native
                self._live.add(run)
            else:
                self._register(run, outputs)
        except Exception as error:
            self._remove(run)
            if not errors.own_fault(error):
                raise
            session.failed(error)
            return None
        if self._capture is not None:
            run.outputs = outputs
        flags = FLAG_TRUNCATED if run.truncated else 0
        source = session.source(3)
        session.emit(
            Kind.BACKWARD_BEGIN,
            name=source,
            module=session.module_id(),
            seq=run.number,
            a=run.nodes,
            b=session.state.backwards | flags << 8,
        )
        session.state.backwards += 1
        return run

    def _register(self, run: Backward, outputs: Any) -> None:
        self._live.add(run)
        collecting = gc.isenabled()
        if collecting:
            gc.disable()  # thousands of small objects at once would set off full collections
        try:
            roots = root_nodes(outputs)
            # A leaf that is a root is held by nobody else until the engine makes one anew, without our hooks.
            run.leaves = [node for node in roots if node._sequence_nr() >= _NO_SEQUENCE]
            nodes, run.truncated = walk(roots)
            run.nodes = len(nodes)
            handles = run.handles
            hook_type = self._hook_type()
            asked = self._capture if self._capture is not None and self._capture.requests else None
            for node in nodes:
                hook = self._hook(hook_type, run, node)
                handles.append(node.register_prehook(hook.pre))
                handles.append(node.register_hook(hook.post))
                if asked is not None and hook.holds and asked.wants(hook):
                    wanted = Wanted(asked, hook)
                    handles.append(node.register_prehook(wanted.pre))
                    handles.append(node.register_hook(wanted.post))
        finally:
            if collecting:
                gc.enable()

    def _hook_type(self) -> type[NodeHook]:
        if self._numerics is not None:
            hook: type[NodeHook] = self._numerics.hook_type
            return hook
        return DescribingHook if self._session.settings.describe else NodeHook

    def _hook(self, hook_type: type[NodeHook], run: Backward, node: Any) -> NodeHook:
        name = self._name_of(node.name(), node)
        sequence = node._sequence_nr()
        parameter, call = 0, 0
        if sequence < _NO_SEQUENCE:
            module, call = self._modules.of_node(sequence)
        else:
            variable = getattr(node, "variable", None)
            parameter, module = self._modules.of_parameter(variable) if variable is not None else (0, 0)
        # A leaf's gradient is not held: it could not be moved into .grad then, and would be copied.
        holds = self._capture is not None and sequence < _NO_SEQUENCE
        hook = hook_type(run, name, module, run.number | call << 32, pack_counts(0, 0, parameter), sequence, holds)
        if hook_type is not NodeHook:
            hook.session = self._session  # type: ignore[attr-defined]
        return hook

    def _name_of(self, text: str, node: Any) -> int:
        """The name's id of a node; ``node`` may be None for one of torch's own."""
        text = text.removeprefix("torch::autograd::")
        name = self._node_names.get(text)
        if name is None:
            source = _node_source(node) if node is not None else None
            name = self._node_names[text] = self._session.intern("node", text, source)
        return name

    def _leave(self, run: Any, error: BaseException | None) -> None:
        session = self._session
        open_hook = run.open
        held = None
        if error is not None and open_hook is not None and run.outputs is not None:
            held = Held(open_hook, run.grads, run.outputs, run.nested_in is open_hook)
        self._remove(run, error)
        session.state.backwards = max(0, session.state.backwards - 1)
        if error is None:
            session.emit(Kind.BACKWARD_END, seq=run.number)
        else:
            session.emit(Kind.BACKWARD_RAISED, name=session.intern_error(error), seq=run.number)
            if held is not None and self._capture is not None:
                self._capture.failed(held, error)

    def _remove(self, run: Any, error: BaseException | None = None) -> None:
        self._live.discard(run)
        if isinstance(run, NativeBackward) and self._native is not None:
            self._native.end(run, self._live, error)
            return
        for handle in run.handles:
            handle.remove()
        run.handles, run.leaves = [], []
        run.open = run.grads = run.nested_in = run.outputs = None


def _node_source(node: Any) -> dict[str, str] | None:
    """Where a custom Function's backward is written."""
    function = getattr(node, "_forward_cls", None)
    code = getattr(getattr(function, "backward", None), "__code__", None)
    if code is None or not errors.is_user_code(code):
        code = getattr(getattr(function, "vjp", None), "__code__", None)
    if code is None or not errors.is_user_code(code):
        return None
    return {"source": errors.short_source(code.co_filename, code.co_firstlineno)}


__all__ = ["Backward", "DescribingHook", "Engine", "NodeHook", "root_nodes", "walk"]
