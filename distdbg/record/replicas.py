"""Which parameters a DDP wrapper is about to keep equal on all ranks.

Ranks that wrap different parameters fail in DDP's own check, with an error that blames whom it meets first, or
not at all. The lists, noted before that check, tell which rank has another model.
"""

import functools
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distdbg.record import errors
from distdbg.record.session import Kind, Patches, Session

MAX_PARAMETERS = 20_000  # a list is a line of the names table


class Replicas:
    """Wraps the method by which DDP collects its parameters."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._patches = Patches()
        self._count = 0

    def attach(self) -> None:
        original = getattr(DistributedDataParallel, "_build_params_for_reducer", None)
        if original is None:
            return

        @functools.wraps(original)
        def _build_params_for_reducer(ddp: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(ddp, *args, **kwargs)
            try:
                self._note(ddp, result[0])
            except Exception as error:
                if not errors.own_fault(error):
                    raise
                self._session.failed(error)
            return result

        self._patches.set(DistributedDataParallel, "_build_params_for_reducer", _build_params_for_reducer)

    def detach(self) -> None:
        self._patches.undo()

    forget = detach

    def _note(self, ddp: Any, parameters: Any) -> None:
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        listed = [
            [names.get(id(parameter), ""), list(parameter.shape), str(parameter.dtype).removeprefix("torch.")]
            for parameter in parameters[:MAX_PARAMETERS]
        ]
        about = {"ranks": dist.get_process_group_ranks(ddp.process_group), "parameters": listed}
        text = f"DistributedDataParallel of {type(ddp.module).__name__} (wrapper {self._count})"
        self._count += 1
        self._session.emit(Kind.REPLICATE, name=self._session.intern("text", text, about))
