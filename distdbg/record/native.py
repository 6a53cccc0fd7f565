"""The native recorder's side in Python: whether it is used, and its backward passes as the engine's wrapper sees them.

In C++ are the walk, the hooks of the nodes and the writing of events (native/recorder.cpp). What the nodes'
values are needed for (`--numerics`, `--describe`, `--capture NODE`) is done by Python's hooks.
"""

from typing import Any

from distdbg.errors import RecordingError, say
from distdbg.native import load
from distdbg.record.session import Session


def attach(session: Session) -> Any:
    """(module, its writer) of the native recorder where it is to be used, else None. Raises RecordingError."""
    wanted = session.settings.recorder
    if wanted == "python":
        return None
    try:
        module = load.load()
    except ImportError as error:
        if wanted == "native":
            raise RecordingError(f"the native recorder can't be loaded: {error}; run `distdbg build-native`") from error
        if session.identity.local_rank == 0:
            say(f"distdbg: the native recorder can't be loaded ({error}); recording in Python")
        return None
    if module is None:
        if wanted == "native":
            raise RecordingError("the native recorder is not built for this torch: run `distdbg build-native`")
        return None
    writer = session.writer.use_native(module)
    session.emit = session.writer.emit
    return module, writer


class NativeHook:
    """A node that runs, as NodeHook tells it."""

    __slots__ = ("index", "module", "name", "parameter", "run", "sequence", "word")

    def __init__(self, run: "NativeBackward", words: tuple[int, int, int, int, int, int]) -> None:
        self.run = run
        self.index, self.name, self.module, self.word, self.parameter, self.sequence = words


class NativeBackward:
    """One call of the engine whose nodes are hooked in C++; the interface of engine.Backward."""

    __slots__ = ("_open", "_run", "nested_in", "nodes", "number", "outputs", "truncated")

    def __init__(self, number: int) -> None:
        self.number = number
        self.nodes = 0
        self.truncated = False
        self.nested_in: Any = None
        self.outputs: Any = None
        self._run: Any = None
        self._open: NativeHook | None = None

    def register(self, begun: Any) -> None:
        self._run = begun
        self.nodes, self.truncated = begun.count, begun.truncated

    @property
    def open(self) -> NativeHook | None:
        """The node that runs, where its gradients are held; the same object as long as it is the same node."""
        words = self._run.open() if self._run is not None else None
        if words is None:
            return None
        if self._open is None or self._open.index != words[0]:
            self._open = NativeHook(self, words)
        return self._open

    @property
    def grads(self) -> Any:
        return self._run.grads() if self._run is not None else None

    def pause(self) -> None:
        """Record nothing any more. The hooks stay until the backward ends: the engine may be among them."""
        if self._run is not None:
            self._run.pause()

    def give_up(self) -> Any:
        """Hold nothing any more; returns what has the hooks, None where there are none."""
        run, self._run = self._run, None
        self.nested_in = self.outputs = self._open = None
        return run


class NativeGraphs:
    """Begins backward passes natively where that is safe."""

    def __init__(self, module: Any, writer: Any, session: Session, modules: Any, name_of: Any) -> None:
        self._begin = module.begin
        self._writer = writer
        self._session = session
        self._of_parameter = modules.of_parameter
        self._name_of = name_of
        self._waiting: list[Any] = []  # ended, with hooks that are still in place and do nothing

    def begin(self, number: int, outputs: Any, live: Any, holds: bool) -> NativeBackward | None:
        """A hooked backward, None where Python's hooks must do it.

        Hooks of leaves are added to lists that the engine goes through without a lock: not while another thread
        may be doing so.
        """
        if live and (self._session.state.backwards < len(live) or _devices_run()):
            return None
        if not live:
            self.clear()
        state = self._session.state
        run = NativeBackward(number)
        begun = self._begin(
            self._writer, number, outputs, state.boundary_seqs, state.boundary_modules,
            self._name_of, self._of_parameter, holds,
        )  # fmt: skip
        if begun is None:
            return None
        run.register(begun)
        return run

    def end(self, backward: NativeBackward, live: Any, error: BaseException | None) -> None:
        """Take the hooks of a backward out: later, where another thread may be going through those of its leaves."""
        run = backward.give_up()
        if run is None:
            return
        if error is not None and _devices_run():
            run.abandon()  # a thread of the engine may still be within a node
        elif len(live) > max(0, self._session.state.backwards - 1):
            run.pause()
            self._waiting.append(run)
        else:
            run.remove()
            if not live:
                self.clear()

    def clear(self) -> None:
        """Take out what is left of earlier backwards; no backward is under way."""
        while self._waiting:
            self._waiting.pop().remove()


def _devices_run() -> bool:
    """Whether the engine has threads of its own, which run nodes beside the one that calls it."""
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


__all__ = ["NativeBackward", "NativeGraphs", "NativeHook", "attach"]
