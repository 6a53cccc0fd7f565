"""At the failure of a node, in the training process: keep what it received and saved, run it again.

All of it happens in a thread of its own, for which training waits a bounded time. So whatever goes wrong
in it is caught there, no signal handler of the user's runs in between, and the exception that training
gets is the one it would have got. Nothing outlives it but the bundle on disk.
"""

import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distdbg.errors import say
from distdbg.record import errors
from distdbg.record.contents import Contents, collect, outline
from distdbg.record.session import Session
from distdbg.replay.bundle import BUNDLES_FOLDER, bundle_name, write_bundle
from distdbg.replay.describe import describe, size_of
from distdbg.replay.node import name_of

WAIT_S = 15.0  # for the whole capture; after that training goes on without it
MAX_FAILURES = 3  # bundles of failed nodes a process writes: a script may catch the same error at every step
MAX_ASKED = 16  # bundles for one --capture: a module has many nodes
_SMALL_BYTES = 16 << 20
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|CUDA error|device-side assert", re.I)


@dataclass
class Request:
    """One ``--capture NODE|MODULE[@STEP][#RANK]``; without a step the first backward in which it occurs."""

    target: str
    step: int | None = None
    rank: int | None = None
    left: int = MAX_ASKED
    backward: int | None = None  # the one in which it was met first

    def matches(self, node: str, module: str, step: int, backward: int) -> bool:
        if self.left <= 0 or self.target not in (node, module) or (self.step is not None and self.step != step):
            return False
        if self.backward is None:
            self.backward = backward
        if self.backward != backward:
            return False
        self.left -= 1
        return True


def parse_requests(text: str) -> list[Request]:
    """Requests separated by blanks. Raises ValueError."""
    found = []
    for part in text.split():
        match = re.fullmatch(r"([^@#\s]+)(?:@(\d+))?(?:#(\d+))?", part)
        if match is None:
            raise ValueError(f"{part!r} is not NODE or MODULE with @STEP and #RANK")
        target, step, rank = match.groups()
        found.append(Request(target, int(step) if step else None, int(rank) if rank else None))
    return found


@dataclass
class Held:
    """What a backward held at the moment its node raised (or, asked for, returned)."""

    hook: Any
    grads: Any
    outputs: Any  # the tensors that the backward started from: the way to the node
    nested: bool  # the node ran a backward of its own
    returned: Any = None
    rng: Any = None


class Capture:
    """Decides what is captured, and has it done."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.limit = session.settings.capture_bytes
        rank = session.identity.rank
        try:
            requests = parse_requests(session.settings.capture_nodes)
        except ValueError as error:
            requests = []
            say(f"distdbg: rank {rank}: nothing is captured on request: {error}")
        self.requests = [request for request in requests if request.rank in (None, rank)]
        self._failures = 0
        self._last: tuple[int, str] | None = None

    def wants(self, hook: Any) -> bool:
        """Whether --capture asks for the node of this hook."""
        writer = self.session.writer
        node, module = writer.text_of(hook.name), writer.text_of(hook.module)
        return any(request.matches(node, module, writer.step, hook.run.number) for request in self.requests)

    def failed(self, held: Held, error: BaseException) -> None:
        """A backward raised while a node was open."""
        if not isinstance(error, Exception) or isinstance(error, MemoryError):
            return
        mark = (id(error), errors.title(error))
        if mark == self._last or self._failures >= MAX_FAILURES:
            return  # the same exception on its way out of the backward around
        self._last = mark
        about = errors.describe(error)
        if about["origin"] == "data":
            return  # a dead worker's signal, which can interrupt any node
        self._failures += 1
        self._guarded(held, error)

    def asked(self, held: Held) -> None:
        """A node for which --capture asks returned."""
        self._guarded(held, None)

    def _guarded(self, held: Held, error: Exception | None) -> None:
        thread = threading.Thread(target=self._work, args=(held, error), name="distdbg-capture", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # no thread can be had: the process is at its end
        del held, error
        thread.join(WAIT_S)
        if thread.is_alive():
            rank = self.session.identity.rank
            say(f"distdbg: rank {rank}: a node that was run again did not come back; training goes on")

    def _work(self, held: Held, error: Exception | None) -> None:
        try:
            self._capture(held, error)
        except Exception as fault:  # whatever it is: it concerns the bundle alone
            rank = self.session.identity.rank
            say(f"distdbg: rank {rank}: no bundle of the failed node: {errors.title(fault)[:300]}")

    def _capture(self, held: Held, error: Exception | None) -> Path | None:
        node = self.find(held)
        if node is None:
            return None
        deadline = time.monotonic() + WAIT_S / 3
        if error is not None and _out_of_memory(error):
            contents = outline(node, held, error)
            return self._write(node, held, error, contents)
        with _device_of(held.grads):
            module = self._module(held.hook.module)
            contents = collect(node, held, error, module, self.limit, deadline)
        contents.about["module_class"] = type(module).__name__ if module is not None else None
        return self._write(node, held, error, contents)

    def _write(self, node: Any, held: Held, error: Exception | None, contents: Contents) -> Path:
        about = {**self._who(held, node, error), **contents.about}
        folder = self.session.settings.run_dir / BUNDLES_FOLDER
        name = bundle_name(about["rank"], about["step"], about["node"])
        return write_bundle(folder, name, about, contents.tensors)

    def find(self, held: Held) -> Any:
        """The node of a hook, found by walking again: keeping it would have kept its graph."""
        from distdbg.record.engine import root_nodes, walk

        hook = held.hook
        name = self.session.writer.text_of(hook.name)
        nodes, _ = walk(root_nodes(held.outputs))
        found = [node for node in nodes if node._sequence_nr() == hook.sequence and name_of(node) == name]
        return found[0] if len(found) == 1 else None

    def _module(self, number: int) -> torch.nn.Module | None:
        modules = next((part for part in self.session.parts if part.__class__.__name__ == "Modules"), None)
        return modules.living(number) if modules is not None and number else None

    def _who(self, held: Held, node: Any, error: Exception | None) -> dict[str, Any]:
        session, identity, hook = self.session, self.session.identity, held.hook
        return {
            "reason": "asked" if error is None else "failure",
            "rank": identity.rank, "world_size": identity.world_size, "attempt": identity.attempt,
            "host": identity.host, "pid": identity.pid, "step": session.writer.step,
            "backward": hook.run.number, "node": name_of(node), "node_index": hook.index,
            "module": session.writer.text_of(hook.module) if hook.module else None,
            "source": errors.describe(error)["source"] or None if error is not None else None,
            "call": hook.word >> 32,
        }  # fmt: skip


def describe_open(session: Session, runs: list[Any]) -> list[dict[str, Any]]:
    """The nodes that run now and what they received, for a stall; called by the watchdog's thread.

    Values are read of small tensors on the CPU only: a device that stands would not answer.
    """
    found = []
    for run in runs:
        hook, grads = run.open, run.grads
        if hook is None or grads is None:
            continue
        small = all(g is None or (g.device.type == "cpu" and size_of(g) <= _SMALL_BYTES) for g in grads)
        found.append(
            {
                "node": session.writer.text_of(hook.name),
                "node_index": hook.index,
                "module": session.writer.text_of(hook.module) or None,
                "received": [describe(grad, values=small) for grad in grads],
            }
        )
    return found


class Wanted:
    """The pair of hooks of a node that --capture asks for; holds its gradients while it runs."""

    __slots__ = ("capture", "grads", "hook", "rng")

    def __init__(self, capture: Capture, hook: Any) -> None:
        self.capture = capture
        self.hook = hook
        self.grads: Any = None
        self.rng: Any = None

    def pre(self, grads: Any) -> None:
        self.grads = grads
        self.rng = torch.get_rng_state()

    def post(self, outputs: Any, inputs: Any) -> None:
        grads, self.grads = self.grads, None
        rng, self.rng = self.rng, None
        run = self.hook.run
        self.capture.asked(Held(self.hook, grads, run.outputs, run.nested_in is self.hook, outputs, rng))


def _out_of_memory(error: Exception) -> bool:
    """Whether memory is short, or the device does not answer any more: then nothing is tried."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or bool(_OUT_OF_MEMORY.search(errors.message(error)))


class _device_of:  # noqa: N801 - a context manager, named for what it reads like
    """The device on which the gradients lie is the current one, as it is in the engine's thread."""

    def __init__(self, grads: Any) -> None:
        device = next((g.device for g in grads if isinstance(g, torch.Tensor) and g.device.type == "cuda"), None)
        self._context = torch.cuda.device(device) if device is not None else None

    def __enter__(self) -> None:
        if self._context is not None:
            self._context.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *about: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*about)


__all__ = ["Capture", "Held", "Request", "Wanted", "describe_open", "parse_requests"]
