"""Forward of modules: begin, end and raise, the modules' names in the user's model, and which module
an autograd node belongs to.

torch numbers nodes as they are made, per thread. The number read where a module's forward begins and
ends cuts the numbers into stretches, each of one innermost module; a node belongs to the stretch that
holds its number.
"""

import functools
import sys
import threading
import weakref
from bisect import bisect_right
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from distdbg.record import errors
from distdbg.record.session import Kind, Patches, Session

MAX_BOUNDARIES = 400_000
_sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]

_TABLES: tuple[Any, ...] = (
    nn_module._global_forward_pre_hooks,
    nn_module._global_forward_hooks,
    nn_module._global_forward_hooks_always_called,
)

# Wrappers of torch's own and the attribute that holds the user's module: not part of a name.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "AveragedModel": "module",
}


def _wrapped_attribute(module: torch.nn.Module) -> str | None:
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.") and kind.__name__ in _WRAPPERS:
            return _WRAPPERS[kind.__name__]
    return None


def _control_flow(error: BaseException) -> bool:
    """torch stops a recomputation early by an exception of its own: an end like any other."""
    return type(error).__module__ == "torch.utils.checkpoint" and type(error).__name__.startswith("_Stop")


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    for _ in range(20):  # wrappers nest a few deep; a cycle must not hang us
        attribute = _wrapped_attribute(module)
        inner = getattr(module, attribute, None) if attribute else None
        if not isinstance(inner, torch.nn.Module):
            break
        module = inner
    return module


class Modules:
    """Hooks every module's forward; knows names of modules and parameters."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ids: dict[int, tuple[weakref.ref[torch.nn.Module], int]] = {}  # id(module) -> its name's id
        self._parameters: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}  # -> name's id, module's id
        self._parents: dict[int, tuple[weakref.ref[torch.nn.Module], weakref.ref[torch.nn.Module]]] = {}
        self._texts: dict[int, str] = {}  # a name's id -> the name
        self._main = threading.main_thread().ident
        self._calls: dict[int, int] = {}
        self._calls_step = -1
        self._handles: list[Any] = []
        self._patches = Patches()
        self.other_hooks: set[int] = set()  # ids of global forward hooks of other parts of the recorder

    def attach(self) -> None:
        self._handles = [
            nn_module.register_module_forward_pre_hook(self._before),
            nn_module.register_module_forward_hook(self._after, always_call=True),
            nn_module.register_module_module_registration_hook(self._registered),
        ]
        self._patches.set(nn_module, "_has_any_global_hook", self._has_others_hooks(nn_module._has_any_global_hook))
        self._patches.set(torch.export, "export", self._without_hooks(torch.export.export))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._patches.undo()
        self._ids.clear()
        self._parameters.clear()

    forget = detach

    def _has_others_hooks(self, original: Any) -> Any:
        """torch.compile warns of global hooks at every call; ours, which it traces past, are no cause for that."""

        def has_any_global_hook() -> Any:
            ours = {handle.id for handle in self._handles} | self.other_hooks
            tables = (nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks)
            others = (
                nn_module._global_backward_pre_hooks
                or nn_module._global_backward_hooks
                or any(number not in ours for table in tables for number in table)
            )
            return others if self._handles else original()

        return has_any_global_hook

    def _without_hooks(self, original: Any) -> Any:
        """torch.export(strict=True) refuses every model while any global hook exists: ours stand aside for it."""

        @functools.wraps(original)
        def export(*args: Any, **kwargs: Any) -> Any:
            ours = {handle.id for handle in self._handles} | self.other_hooks
            taken = [(table, {number: table.pop(number) for number in ours if number in table}) for table in _TABLES]
            try:
                return original(*args, **kwargs)
            finally:
                if self._handles:  # else recording was stopped meanwhile
                    for table, hooks in taken:
                        table.update(hooks)

        return export

    # ---- hooks

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        session = self._session
        state = session.state
        name = self.name_of(module)
        writer = session.writer
        if writer.step != self._calls_step:
            self._calls_step = writer.step
            self._calls.clear()
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        self._boundary(name, call)
        state.modules.append((id(module), name, id(sys.exc_info()[1])))
        depth = len(state.modules)
        # The size of a model's input tells imbalance (a larger batch) from slowness.
        size = 0
        if depth == 1 and torch._C._get_tracing_state() is None:  # jit.trace would take the question into its graph
            size = sum(arg.numel() for arg in args if isinstance(arg, torch.Tensor))
        session.emit(Kind.FORWARD_BEGIN, module=name, seq=call, a=depth, b=size)
        if not state.backwards and threading.get_ident() == self._main:
            session.digest.entered(name, self._texts.get(name, ""))

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        session = self._session
        stack = session.state.modules
        key = id(module)
        while stack:
            found, name, before = stack.pop()
            if found == key:
                break
            # A module whose end was never told (its own hook raised, say) ends with the one around it.
            session.emit(Kind.FORWARD_END, module=name)
        else:
            return
        self._boundary(stack[-1][1] if stack else 0, 0)
        error = sys.exc_info()[1]
        if error is None or id(error) == before or _control_flow(error):
            session.emit(Kind.FORWARD_END, module=name)
        else:
            session.emit(Kind.FORWARD_RAISED, name=session.intern_error(error), module=name)

    def _registered(self, parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        # Told of at construction, so that a submodule called on its own still has its full name.
        if child is not None:
            self._parents[id(child)] = (weakref.ref(child), weakref.ref(parent))
            self._ids.pop(id(child), None)

    def _boundary(self, name: int, call: int) -> None:
        state = self._session.state
        number = _sequence_number()
        seqs, modules = state.boundary_seqs, state.boundary_modules
        if seqs and seqs[-1] == number:
            modules[-1] = (name, call)
            return
        if len(seqs) >= MAX_BOUNDARIES:
            del seqs[: MAX_BOUNDARIES // 2], modules[: MAX_BOUNDARIES // 2]
        seqs.append(number)
        modules.append((name, call))

    # ---- questions

    def of_node(self, sequence: int) -> tuple[int, int]:
        """(module's name id, call) of the node with this sequence number, made in this thread."""
        state = self._session.state
        index = bisect_right(state.boundary_seqs, sequence) - 1
        return state.boundary_modules[index] if index >= 0 else (0, 0)

    def living(self, number: int) -> torch.nn.Module | None:
        """The module with this name's id, if it still lives; of several with one name (two models) any."""
        return next((ref() for ref, known in list(self._ids.values()) if known == number), None)

    def of_parameter(self, parameter: torch.Tensor) -> tuple[int, int]:
        """(parameter's name id, its module's name id), 0 where unknown."""
        known = self._parameters.get(id(parameter))
        return (known[1], known[2]) if known is not None and known[0]() is parameter else (0, 0)

    def name_of(self, module: torch.nn.Module) -> int:
        """The name's id of a module; names its whole model at the first sight of one."""
        known = self._ids.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        self._name_tree(self._root_of(module))
        known = self._ids.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        self._name_tree(module)  # the tree we thought it hangs in has dropped it
        return self._ids[id(module)][1]

    def _root_of(self, module: torch.nn.Module) -> torch.nn.Module:
        for _ in range(1000):
            entry = self._parents.get(id(module))
            parent = entry[1]() if entry is not None and entry[0]() is module else None
            if parent is None or not any(child is module for child in parent.children()):
                break
            module = parent
        return module

    def _name_tree(self, root: torch.nn.Module) -> None:
        title = type(_unwrapped(root)).__name__
        stack: list[tuple[torch.nn.Module, str]] = [(root, "")]
        seen: set[int] = set()
        while stack:
            module, name = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            number = self._intern_module(module, name, title)
            self._ids[id(module)] = (weakref.ref(module), number)
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    text = f"{name}.{key}" if name else key
                    self._parameters[id(parameter)] = (
                        weakref.ref(parameter),
                        self._session.intern("parameter", text, _shape(parameter)),
                        number,
                    )
            skipped = _wrapped_attribute(module)
            for key, child in module._modules.items():
                if child is not None:
                    plain = name if key == skipped else (f"{name}.{key}" if name else key)
                    stack.append((child, plain))

    def _intern_module(self, module: torch.nn.Module, name: str, model: str) -> int:
        kind = type(_unwrapped(module))
        # Not by getattr: torch.jit's classes have a descriptor there that raises when it is looked at.
        forward = next((vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)), None)
        code = getattr(forward, "__code__", None)
        source = None
        if code is not None and errors.is_user_code(code):
            source = errors.short_source(code.co_filename, code.co_firstlineno)
        number = self._session.intern("module", name, {"class": kind.__name__, "model": model, "source": source})
        self._texts[number] = name
        return number


def _shape(parameter: torch.Tensor) -> dict[str, Any]:
    """Shape and dtype: ranks whose parameters agree in name and shape have the same role."""
    try:
        return {"shape": list(parameter.shape), "dtype": str(parameter.dtype).removeprefix("torch.")}
    except RuntimeError:
        return {}  # a lazy module's parameter has no shape yet
