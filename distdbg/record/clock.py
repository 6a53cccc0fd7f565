"""How far this host's clock is from that of rank 0's host, measured over the job's own store.

Records carry the host's monotonic clock, which counts from a start of its own. One rank a host asks rank 0 for the
time, as NTP does: it notes when it asked and when the answer was there, and the answer holds when the question
arrived and when the answer left. The way there and back is at most the rest, so half of that bounds the error.

All of this happens in a thread of its own with a connection of its own: a wait in another thread holds the lock of
the store's client that it uses. Nothing here blocks in the store: a wait that times out, or that is under way when
the process ends, is heard on the job's stderr, so keys are asked for instead.
"""

import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from distdbg import schema
from distdbg.record.session import Kind, Session

POLL_S = 0.5
TURN_POLL_S = 0.05
TURN_S = 30.0  # rank 0 answers one host after the other, and its interpreter may be held for long
ANSWER_S = 2.0
ROUNDS = 10  # the quickest counts
SPINS = 200  # questions to the store without a pause in between, for an answer that is due at once
FIRST_S = (0.0, 2.0, 10.0, 30.0)  # from the start: early ones so that the drift of a short job is known
EVERY_S = 60.0
MAX_FAILURES = 3
PATIENCE_S = 120.0  # for rank 0 to say that it can be asked

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_OFFSETS = Path("/proc/self/timens_offsets")


class Store(Protocol):
    """What is used of torch's store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


@dataclass(frozen=True)
class Exchange:
    """One measurement: at ``t`` (own clock, ns) the reference's clock was ``t + offset``, give or take ``error``."""

    t: int
    offset: int
    error: int


def clock_id() -> str:
    """Processes with the same text read the same monotonic clock.

    The boot tells hosts apart, and a host before and after it started anew; the offset tells time namespaces apart;
    the host's name virtual machines that were resumed from one image.
    """

    def read(path: Path) -> str:
        try:
            return path.read_text().strip()
        except OSError:
            return ""

    offset = next((line for line in read(_TIME_OFFSETS).splitlines() if line.startswith("monotonic")), "")
    text = "\n".join((read(_BOOT_ID), " ".join(offset.split()), socket.gethostname()))
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


class Exchanger:
    """One side of the exchange; ``stop`` ends every wait. ``now`` is the clock that is compared, in ns."""

    def __init__(self, store: Store, prefix: str, stop: threading.Event, now: Callable[[], int]) -> None:
        self._store, self._prefix, self._stop, self._now = store, prefix, stop, now

    def _key(self, *parts: object) -> str:
        return self._prefix + "/" + "/".join(map(str, parts))

    def _comes(self, key: str, limit_s: float) -> bool:
        """Whether a key is set within the limit; asks without a pause at first."""
        end = time.monotonic() + limit_s
        spins = 0
        while not self._store.check([key]):
            if self._stop.is_set() or time.monotonic() > end:
                return False
            spins += 1
            if spins > SPINS:
                self._stop.wait(min(0.02, (spins - SPINS) * 0.001))
        return True


class Reference(Exchanger):
    """Rank 0: answers all who hold a ticket, one after the other."""

    def __init__(self, store: Store, prefix: str, stop: threading.Event, now: Callable[[], int]) -> None:
        super().__init__(store, prefix, stop, now)
        self._served = 0

    @property
    def asked(self) -> bool:
        """Whether anybody of another host has asked yet."""
        return self._served > 0

    def wanted(self, world: int) -> bool:
        """False once all other ranks have said that they have this clock."""
        return self._store.add(self._key("same"), 0) < world - 1

    def serve(self) -> int:
        """Answer those who ask; returns how many were answered."""
        served = 0
        tickets = self._store.add(self._key("tickets"), 0)
        while self._served < tickets and not self._stop.is_set():
            self._served += 1
            served += self._answer(self._served)
        return served

    def _answer(self, ticket: int) -> bool:
        self._store.set(self._key("go", ticket), "")
        for number in range(ROUNDS):
            if not self._comes(self._key("ask", ticket, number), ANSWER_S):
                self._store.delete_key(self._key("go", ticket))
                return False
            arrived = self._now()
            self._store.set(self._key("told", ticket, number), f"{arrived} {self._now()}")
        return True


class Peer(Exchanger):
    """A host's rank that asks."""

    def measure(self) -> Exchange | None:
        """The quickest of some exchanges; None where rank 0 does not answer."""
        ticket = self._store.add(self._key("tickets"), 1)
        end = time.monotonic() + TURN_S
        while not self._store.check([self._key("go", ticket)]):
            if self._stop.wait(TURN_POLL_S) or time.monotonic() > end:
                return None
        best: Exchange | None = None
        done = 0
        for number in range(ROUNDS):
            found = self._round(ticket, number)
            done += 1
            if found is None:
                break
            if best is None or found.error < best.error:
                best = found
        for number in range(done):
            self._store.delete_key(self._key("ask", ticket, number))
            self._store.delete_key(self._key("told", ticket, number))
        self._store.delete_key(self._key("go", ticket))
        return best

    def _round(self, ticket: int, number: int) -> Exchange | None:
        told = self._key("told", ticket, number)
        asked = self._now()
        self._store.set(self._key("ask", ticket, number), "")
        if not self._comes(told, ANSWER_S):
            return None
        answered = self._now()
        arrived, left = map(int, self._store.get(told).split())
        error = (answered - asked - (left - arrived)) // 2 + 1
        return Exchange((asked + answered) // 2, (arrived - asked + left - answered) // 2, error)


class Watched:
    """A store that is not asked once its server has ended, since the failure of a question is heard on stderr.

    The end is seen on a second connection, idle for its whole life, which the kernel closes with the server.
    """

    def __init__(self, store: Store, canary: socket.socket) -> None:
        canary.setblocking(False)
        self._store, self._canary = store, canary

    def _asked(self) -> Store:
        try:
            ended = self._canary.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            ended = False
        except OSError:
            ended = True
        if ended:
            self._canary.close()
            raise ConnectionError("the server of the job's store has ended")
        return self._store

    def set(self, key: str, value: str) -> None:
        self._asked().set(key, value)

    def get(self, key: str) -> bytes:
        return self._asked().get(key)

    def add(self, key: str, amount: int) -> int:
        return self._asked().add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._asked().check(keys)

    def delete_key(self, key: str) -> bool:
        return self._asked().delete_key(key)

    def __del__(self) -> None:
        self._canary.close()


def connect() -> Store | str:
    """A connection of our own to the store of the default process group, or why there is none."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if type(store) is not TCPStore:
        return f"the job's store is a {type(store).__name__}, which is not asked"
    try:
        canary = socket.create_connection((store.host, store.port), timeout=10)
    except OSError as error:
        return f"the job's store is not reached: {error.strerror or error}"
    own: Store = TCPStore(store.host, store.port, None, False, timeout=timedelta(seconds=10), wait_for_workers=False)
    return Watched(own, canary)


def _initialized() -> tuple[int, int] | None:
    """(rank, world size) of the default process group, None while there is none."""
    dist = sys.modules.get("torch.distributed")
    asked = getattr(dist, "is_initialized", None)
    if dist is None or asked is None or not asked():
        return None
    return dist.get_rank(), dist.get_world_size()


class Clock:
    """The watchdog's part that compares clocks: ``tick`` starts its thread where there are other hosts."""

    def __init__(self, session: Session, emit: Callable[..., None]) -> None:
        self._session, self._emit = session, emit
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._id = clock_id()
        self._done = False
        self._failures = 0
        self._seen: set[str] = set()  # of process groups that are no more
        session.writer.write_meta({"clock": {"id": self._id}})

    def tick(self) -> None:
        """Called at each beat; returns at once."""
        if self._done or (self._thread is not None and self._thread.is_alive()):
            return
        group = _initialized()
        if group is None or group[1] < 2:
            return
        if os.environ.get("LOCAL_WORLD_SIZE", "") == str(group[1]):
            self._say("one host")
            self._done = True
            return
        self._thread = threading.Thread(target=self._run, args=group, name="distdbg-clock", daemon=True)
        self._thread.start()

    def detach(self) -> None:
        self._stop.set()
        self._done = True
        if self._thread is not None:
            self._thread.join(timeout=1)

    def forget(self) -> None:
        self._done = True
        self._thread = None

    # ---- the thread

    def _say(self, what: str) -> None:
        self._session.writer.write_meta({"clock": {"id": self._id, "exchange": what}})

    def _run(self, rank: int, world: int) -> None:
        try:
            if not self._goes_on():
                return
            store = connect()
            if isinstance(store, str):
                self._say(store)
                self._done = True
            elif rank == 0:
                self._lead(store, world)
            else:
                self._follow(store)
        except Exception as error:  # the store is gone, or the job has ended; the clocks are as they were
            self._failures += 1
            if self._goes_on():
                self._say(f"ended by {type(error).__name__}")
                self._done = self._failures >= MAX_FAILURES  # there may be a new process group already

    def _root(self) -> str:
        identity = self._session.identity
        return f"distdbg/clock/{identity.run_id}/{identity.attempt}"

    def _goes_on(self) -> bool:
        return not self._stop.is_set() and _initialized() is not None

    def _lead(self, store: Store, world: int) -> None:
        epoch = os.urandom(4).hex()  # keys of a process group that was destroyed may still be there
        reference = Reference(store, f"{self._root()}/{epoch}", self._stop, time.monotonic_ns)
        store.set(f"{self._root()}/reference", f"{epoch} {self._id}")
        self._say("this rank's clock is the reference")
        while self._goes_on():
            if not reference.asked and not reference.wanted(world):
                self._say("one host")
                self._done = True
                return
            reference.serve()
            self._stop.wait(POLL_S)

    def _follow(self, store: Store) -> None:
        found = self._find(store)
        if found is None:
            return
        prefix, reference = found
        if reference == self._id:
            store.add(f"{prefix}/same", 1)
            self._say("the clock of rank 0")
            self._done = True
            return
        if store.add(f"{prefix}/host/{self._id}", 1) > 1:
            self._say("by another rank of this host")
            self._done = True
            return
        self._say("with rank 0")
        peer = Peer(store, prefix, self._stop, time.monotonic_ns)
        key = f"{self._root()}/reference"
        self._ask(peer, lambda: store.get(key).decode().split()[0] in self._seen)

    def _find(self, store: Store) -> tuple[str, str] | None:
        """(prefix of the keys, the reference's clock)."""
        key = f"{self._root()}/reference"
        end = time.monotonic() + PATIENCE_S
        while self._goes_on():
            if store.check([key]):
                epoch, reference = store.get(key).decode().split()
                if epoch not in self._seen:
                    self._seen.add(epoch)
                    return f"{self._root()}/{epoch}", reference
            if time.monotonic() > end:
                if not self._seen:
                    self._say("rank 0 is not recorded")
                self._done = True
                return None
            self._stop.wait(POLL_S)
        return None

    def _ask(self, peer: Peer, current: Callable[[], bool]) -> None:
        """Measure now and then, until there is another reference (tick() then looks for it)."""
        begun, number = time.monotonic(), 0
        while self._goes_on():
            due = FIRST_S[number] if number < len(FIRST_S) else FIRST_S[-1] + EVERY_S * (number + 1 - len(FIRST_S))
            ahead = begun + due - time.monotonic()
            if ahead > 0:
                self._stop.wait(min(ahead, 5.0))
                continue
            number += 1
            found = peer.measure()
            if found is not None:
                self._write(found)
            elif self._goes_on() and not current():
                return

    def _write(self, found: Exchange) -> None:
        """One line in a file beside the segments, since those get deleted, and an event for the timeline."""
        self._session.writer.append_text(schema.CLOCK_FILE, f"[{found.t},{found.offset},{found.error},0]\n")
        self._emit(Kind.CLOCK, a=found.offset, b=found.error)
