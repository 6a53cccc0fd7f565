"""What a training loop does around forward and backward: optimizer steps, data, checkpoints, collection.

The step moves on when the first optimizer's step has ended, or where `distdbg.step()` says so.
"""

import functools
import gc
import sys
import weakref
from typing import Any

import torch
import torch.utils.data.dataloader as dataloader
from torch.optim import optimizer as torch_optimizer

from distdbg.record.session import Kind, Patches, Session


class Loop:
    """Hooks of optimizers, DataLoaders, torch.save and torch.load, and the garbage collector."""

    def __init__(self, session: Session, numerics: Any = None) -> None:
        self._session = session
        self._numerics = numerics
        self._patches = Patches()
        self._handles: list[Any] = []
        self._first: weakref.ref[Any] | None = None
        self._explicit = False
        self._open: list[int] = []  # optimizers whose step runs, by id, outermost first

    def attach(self) -> None:
        self._handles = [
            torch_optimizer.register_optimizer_step_pre_hook(self._optimizer_begin),
            torch_optimizer.register_optimizer_step_post_hook(self._optimizer_end),
        ]
        for name in ("save", "load"):
            wrapped = self._bracket(getattr(torch, name), f"torch.{name}")
            self._patches.set(torch, name, wrapped)
            self._patches.set(torch.serialization, name, wrapped)
        self._wrap_distributed_checkpoint()
        self._wrap_data()
        gc.callbacks.append(self._collected)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._patches.undo()
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)

    forget = detach

    # ---- optimizer and step

    def _optimizer_begin(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        session = self._session
        if id(optimizer) in self._open:
            # Its last step raised: torch's hooks tell of no end then.
            del self._open[self._open.index(id(optimizer)) :]
        self._open.append(id(optimizer))
        name = session.intern("text", type(optimizer).__name__)
        session.emit(Kind.OPTIMIZER_BEGIN, name=name, a=len(self._open))

    def _optimizer_end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        session = self._session
        name = session.intern("text", type(optimizer).__name__)
        session.emit(Kind.OPTIMIZER_END, name=name, a=len(self._open))
        if id(optimizer) in self._open:
            del self._open[self._open.index(id(optimizer)) :]
        if self._open or self._explicit:
            return  # an optimizer within another's step is part of that step
        first = self._first() if self._first is not None else None
        if first is None:
            self._first = weakref.ref(optimizer)
            first = optimizer
        if first is optimizer:
            if self._numerics is not None:
                self._numerics.step_ended(optimizer)
            self._advance()

    def explicit_step(self) -> None:
        self._explicit = True
        self._advance()

    def _advance(self) -> None:
        session = self._session
        session.emit(Kind.STEP)
        session.digest.step_ended()
        session.writer.advance()
        if session.state.backwards == 0:
            session.state.modules.clear()

    # ---- data

    def _wrap_data(self) -> None:
        session = self._session
        original = dataloader._BaseDataLoaderIter.__next__
        name = session.intern("text", "DataLoader")

        @functools.wraps(original)
        def __next__(self: Any) -> Any:
            session.emit(Kind.DATA_BEGIN, name=name)
            try:
                item = original(self)
            except StopIteration:
                session.emit(Kind.DATA_END, name=name, a=1)
                raise
            except BaseException as error:
                session.emit(Kind.DATA_RAISED, name=session.intern_error(error))
                raise
            session.emit(Kind.DATA_END, name=name)
            return item

        self._patches.set(dataloader._BaseDataLoaderIter, "__next__", __next__)
        begin = dataloader.DataLoader.__iter__

        @functools.wraps(begin)
        def __iter__(self: Any) -> Any:
            session.emit(Kind.DATA_BEGIN, name=name)
            try:
                found = begin(self)
            except BaseException as error:
                session.emit(Kind.DATA_RAISED, name=session.intern_error(error))
                raise
            session.emit(Kind.DATA_END, name=name)
            return found

        self._patches.set(dataloader.DataLoader, "__iter__", __iter__)

    # ---- checkpoints

    def _bracket(self, function: Any, title: str) -> Any:
        session = self._session
        name = session.intern("text", title)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            session.emit(Kind.CHECKPOINT_BEGIN, name=name)
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                session.emit(Kind.CHECKPOINT_RAISED, name=session.intern_error(error))
                raise
            session.emit(Kind.CHECKPOINT_END, name=name)
            return result

        return wrapped

    def _wrap_distributed_checkpoint(self) -> None:
        module = sys.modules.get("torch.distributed.checkpoint")
        if module is None:
            return
        for name in ("save", "load", "async_save"):
            function = getattr(module, name, None)
            if function is not None:
                self._patches.set(module, name, self._bracket(function, f"torch.distributed.checkpoint.{name}"))

    def imported(self, module: str) -> None:
        """A module that is wrapped only where a script uses it has just been imported."""
        if module == "torch.distributed.checkpoint":
            self._wrap_distributed_checkpoint()

    # ---- garbage collection

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if info.get("generation") == 2:
            self._session.emit(Kind.GC_BEGIN if phase == "start" else Kind.GC_END, a=2)
