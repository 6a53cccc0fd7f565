"""Every collective and point-to-point call that this process issues, whoever issues it.

All ways of issuing one meet in the operators of the dispatcher's `c10d` namespace: torch.distributed's
functions, DDP's reducer in C++, FSDP, DTensor and functional collectives. A kernel of ours at the
BackendSelect key, which every call passes right before its backend, notes the call and passes it on
unchanged. So what was issued is in the shard before the backend sees it, and outlasts an abort there.
"""

import functools
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DispatchKey, _dispatch_keyset_full_after

from distdbg.record import errors
from distdbg.record.session import Kind, Patches, Session
from distdbg.schema import WAIT_OF_CALL, pack

_BELOW = _dispatch_keyset_full_after(DispatchKey.BackendSelect)

# operator -> (operation, index of the tensors that the rank puts in (or takes out), index of the root or
# peer or None, index of the tag or None)
OPERATORS: dict[str, tuple[str, int, int | None, int | None]] = {
    "allreduce_": ("all_reduce", 0, None, None),
    "allreduce_coalesced_": ("all_reduce", 0, None, None),
    "broadcast_": ("broadcast", 0, 2, None),
    "reduce_": ("reduce", 0, 3, None),
    "allgather_": ("all_gather", 1, None, None),
    "allgather_coalesced_": ("all_gather", 1, None, None),
    "_allgather_base_": ("all_gather", 1, None, None),
    "allgather_into_tensor_coalesced_": ("all_gather", 1, None, None),
    "reduce_scatter_": ("reduce_scatter", 0, None, None),
    "_reduce_scatter_base_": ("reduce_scatter", 0, None, None),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 0, None, None),
    "gather_": ("gather", 1, 3, None),
    "scatter_": ("scatter", 0, 3, None),
    "alltoall_": ("all_to_all", 1, None, None),
    "alltoall_base_": ("all_to_all", 1, None, None),
    "barrier": ("barrier", 0, None, None),
    "monitored_barrier_": ("barrier", 0, None, None),
    "send": ("send", 0, 2, 3),
    "recv_": ("recv", 0, 2, 3),
    "recv_any_source_": ("recv", 0, None, 2),
}
_SETUP = ("init_process_group", "new_group", "destroy_process_group")
_STORE = ("wait", "get", "multi_get")  # what blocks until some other rank has set a key

# Who issued a call, by the first Python frame outside of torch.distributed's plain functions.
_PLAIN = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/nn/functional.py",
    "torch/distributed/utils.py",
    "torch/_ops.py",
)
_ISSUERS = (
    ("DDP", ("torch/autograd/graph.py", "torch/nn/parallel/", "torch/distributed/algorithms/ddp_comm_hooks/")),
    ("FSDP", ("torch/distributed/fsdp/",)),
    ("DTensor", ("torch/distributed/tensor/",)),
    ("checkpoint", ("torch/distributed/checkpoint/",)),
    ("join", ("torch/distributed/algorithms/join.py",)),
)


def _issuer(filename: str) -> str | None:
    """Who a frame belongs to; None for a frame that only hands the call on."""
    if any(part in filename for part in _PLAIN) or filename.startswith(errors.PACKAGE):
        return None if "record/engine.py" not in filename else "DDP"
    return next((name for name, parts in _ISSUERS if any(part in filename for part in parts)), "script")


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    for item in value:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found.extend(part for part in item if isinstance(part, torch.Tensor))
    return found


class Group:
    """A process group as this process sees it: its name's id, its ranks, its counters."""

    __slots__ = ("counts", "global_ranks", "id", "key", "rank", "seq")

    def __init__(self, key: str) -> None:
        self.key = key
        self.id = 0
        self.rank = -1
        self.global_ranks: list[int] = []
        self.seq = 0
        self.counts: dict[tuple[str, int, int], int] = {}

    def global_rank(self, rank: int) -> int:
        return self.global_ranks[rank] if 0 <= rank < len(self.global_ranks) else rank


class Collectives:
    """The kernels, and the wrappers around waiting and around making process groups."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._library: Any = None
        self._waits: Any = None
        self._patches = Patches()
        self._groups: dict[str, Group] = {}
        self._signatures: dict[Any, int] = {}
        self._sources: dict[Any, int] = {}
        self._issuers: dict[str, str | None] = {}
        self._joining = 0  # depth of torch.distributed.algorithms.join, in which ranks differ by design

    def attach(self) -> None:
        if not dist.is_available():
            return
        self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for operator in OPERATORS:
            overload = getattr(getattr(torch.ops.c10d, operator, None), "default", None)
            if overload is not None:
                self._library.impl(operator, self._kernel(operator, overload), "BackendSelect", with_keyset=True)
        self._waits = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
        self._waits.impl("wait_tensor", self._wait_kernel(), "BackendSelect", with_keyset=True)
        self._wrap_wait()
        for name in _SETUP:
            self._wrap_setup(name)
        for name in _STORE:
            self._wrap_store(name)
        self._wrap_join()
        if dist.is_initialized():
            self._note_rank()

    def detach(self) -> None:
        self._patches.undo()
        if self._library is not None:
            self._library._destroy()
            self._waits._destroy()
            self._library = self._waits = None

    def forget(self) -> None:
        self._patches.undo()  # the kernels stay in the child: they pass calls on, and emit() is off

    # ---- one call

    def _kernel(self, operator: str, overload: Any) -> Any:
        operation, tensors_at, peer_at, tag_at = OPERATORS[operator]
        group_at = next(i for i, a in enumerate(overload._schema.arguments) if a.name == "process_group")
        session = self._session

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                words = self._note(operation, args, tensors_at, group_at, peer_at, tag_at)
            except Exception as error:
                if not errors.own_fault(error):
                    raise
                session.failed(error)
                words = (0, 0, 0, 0)
            session.emit(Kind.COLLECTIVE, words[0], session.module_id(), *words[1:])
            try:
                result = overload.redispatch(keys & _BELOW, *args, **kwargs)
            except BaseException as error:
                session.emit(Kind.CALL_RAISED, session.intern_error(error))
                raise
            session.emit(Kind.COLLECTIVE_END, words[0], 0, *words[1:])
            return result

        return kernel

    def _note(
        self, operation: str, args: Any, tensors_at: int, group_at: int, peer_at: int | None, tag_at: int | None
    ) -> tuple[int, int, int, int]:
        """(operation's id, packed sequence number and source, packed group and signature, bytes)."""
        group = self._group(args[group_at])
        tensors = _tensors(args[tensors_at])
        peer = args[peer_at] if peer_at is not None and len(args) > peer_at else -1
        tag = args[tag_at] if tag_at is not None and len(args) > tag_at else 0
        point_to_point = operation in ("send", "recv")
        if point_to_point:
            key = (operation, peer, tag)
            group.counts[key] = seq = group.counts.get(key, 0) + 1
        else:
            group.seq = seq = group.seq + 1
            if not self._joining:
                self._session.digest.issued(operation, len(group.global_ranks))
        root = group.global_rank(peer) if isinstance(peer, int) and peer >= 0 else -1
        # Splits are part of what must agree in an all_to_all; as text, since their number is the group's size.
        splits = (tuple(args[3]), tuple(args[4])) if operation == "all_to_all" and len(args) > 4 else None
        shapes = tuple((t.dtype, t.shape) for t in tensors) if operation != "barrier" else ()
        signature = self._signature(operation, shapes, root, tag, splits, point_to_point)
        size = 0
        for tensor in tensors:
            size += tensor.numel() * tensor.element_size()
        name = self._session.intern("operation", operation)
        return name, pack(seq, self._source()), pack(group.id, signature), 0 if operation == "barrier" else size

    def _signature(self, operation: str, shapes: Any, root: int, tag: int, splits: Any, p2p: bool) -> int:
        key = (operation, shapes, root, tag, splits)
        known = self._signatures.get(key)
        if known is not None:
            return known
        text = " ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in shapes[:4])
        if len(shapes) > 4:
            text += f" and {len(shapes) - 4} more"
        about = {
            "dtypes": sorted({str(dtype).removeprefix("torch.") for dtype, _ in shapes}),
            "numel": sum(shape.numel() for _, shape in shapes),
        }
        if root >= 0:
            about["peer" if p2p else "root"] = root
            text += f" {'to' if operation == 'send' else 'from' if operation == 'recv' else 'root'} {root}"
        if p2p:
            about["tag"] = tag
            text += f" tag {tag}" if tag else ""
        if splits is not None:
            about["output_splits"], about["input_splits"] = list(splits[0]), list(splits[1])
            text += f" splits {list(splits[1])} to {list(splits[0])}" if splits[0] or splits[1] else ""
        number = self._session.intern("signature", text.strip(), about)
        if len(self._signatures) < 50_000:
            self._signatures[key] = number
        return number

    def _group(self, boxed: Any) -> Group:
        process_group = dist.ProcessGroup.unbox(boxed)
        key = process_group.group_name
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key)
        if not group.global_ranks:
            self._describe(group, process_group)
        return group

    def _describe(self, group: Group, process_group: Any) -> None:
        size = process_group.size()
        world = dist.distributed_c10d._world
        ranks = world.pg_group_ranks.get(process_group)
        if ranks:
            group.global_ranks = sorted(ranks, key=lambda rank: ranks[rank])
        elif size == self._session.identity.world_size:
            group.global_ranks = list(range(size))
        description = process_group.group_desc
        plain = description not in ("", "undefined")
        if group.global_ranks:
            title = description if plain else f"group {group.key}"
            backend = world.pg_map.get(process_group, ("unknown",))[0]
            about = {"ranks": group.global_ranks, "desc": description, "key": group.key, "backend": backend}
            group.id = self._session.intern("group", f"{title}" if group.key == "0" else f"{title}#{group.key}", about)

    def _source(self) -> int:
        """Where the call was issued from: the user's line, and by whom (the names table's `issuer`)."""
        frame = sys._getframe(2)
        issuer: str | None = None
        while frame is not None and issuer is None:
            filename = frame.f_code.co_filename
            if filename in self._issuers:
                issuer = self._issuers[filename]
            else:
                issuer = self._issuers[filename] = _issuer(filename)
            if issuer is None:
                frame = frame.f_back  # type: ignore[assignment]
        user = errors.user_frame(frame)
        if user is None:  # a thread that torch began: there is no line of the script below
            return self._session.intern("source", f"? by {issuer}", {"issuer": issuer}) if issuer else 0
        key = (user.f_code, user.f_lineno, issuer)
        known = self._sources.get(key)
        if known is None:
            text = errors.short_source(user.f_code.co_filename, user.f_lineno)
            extra = {"issuer": issuer}
            known = self._session.intern("source", text if issuer == "script" else f"{text} by {issuer}", extra)
            self._sources[key] = known
        return known

    # ---- around it

    def _wait_kernel(self) -> Any:
        session = self._session
        overload = torch.ops._c10d_functional.wait_tensor.default

        def kernel(keys: Any, tensor: torch.Tensor) -> Any:
            session.emit(Kind.WAIT_BEGIN)
            try:
                result = overload.redispatch(keys & _BELOW, tensor)
            except BaseException as error:
                session.emit(Kind.CALL_RAISED, session.intern_error(error))
                raise
            session.emit(Kind.WAIT_END)
            return result

        return kernel

    def _wrap_wait(self) -> None:
        work = torch._C._distributed_c10d.Work
        original, session = work.wait, self._session

        own: dict[Any, int] = {}  # by the code that waits

        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            code = sys._getframe(1).f_code
            of_call = own.get(code)
            if of_call is None:
                here = code.co_filename.endswith(_PLAIN[0]) and code.co_name != "wait"  # of many works together
                of_call = own[code] = WAIT_OF_CALL if here else 0
            session.emit(Kind.WAIT_BEGIN, a=of_call)
            try:
                result = original(self, *args, **kwargs)
            except BaseException as error:
                session.emit(Kind.CALL_RAISED, session.intern_error(error))
                raise
            session.emit(Kind.WAIT_END)
            return result

        self._patches.set(work, "wait", wait)

    def _wrap_setup(self, name: str) -> None:
        original = getattr(dist, name)
        number = self._session.intern("operation", name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = self._setup(number, original, *args, **kwargs)
            if name == "init_process_group":
                self._note_rank()
            if name == "destroy_process_group" and not dist.is_initialized():
                self._groups.clear()  # names are given out again from the start
            return result

        self._patches.set(dist, name, wrapped)
        self._patches.set(dist.distributed_c10d, name, wrapped)

    def _wrap_store(self, name: str) -> None:
        store = torch._C._distributed_c10d.Store
        original, setup = getattr(store, name), self._setup
        number = self._session.intern("operation", f"store.{name}")
        main = threading.main_thread().ident

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != main:
                return original(self, *args, **kwargs)
            return setup(number, original, self, *args, **kwargs)

        self._patches.set(store, name, wrapped)

    def _setup(self, number: int, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what makes groups or waits for other ranks outside of collectives, between a begin and an end."""
        session = self._session
        session.emit(Kind.SETUP_BEGIN, name=number)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            session.emit(Kind.CALL_RAISED, session.intern_error(error))
            raise
        session.emit(Kind.SETUP_END, name=number)
        return result

    def _wrap_join(self) -> None:
        from torch.distributed.algorithms.join import Join

        session, collectives = self._session, self
        enter, leave = Join.__enter__, Join.__exit__

        def __enter__(self: Any) -> Any:
            session.emit(Kind.JOIN_BEGIN)
            collectives._joining += 1
            return enter(self)  # type: ignore[no-untyped-call]

        def __exit__(self: Any, *args: Any) -> Any:
            result = leave(self, *args)
            session.emit(Kind.JOIN_END)
            collectives._joining = max(0, collectives._joining - 1)
            return result

        self._patches.set(Join, "__enter__", __enter__)
        self._patches.set(Join, "__exit__", __exit__)

    def _note_rank(self) -> None:
        if dist.is_initialized():
            self._session.writer.write_meta({"rank": dist.get_rank(), "world_size": dist.get_world_size()})
