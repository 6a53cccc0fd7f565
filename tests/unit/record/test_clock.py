"""The exchange over the store: true within its bound, tidy, and never in the way of the job."""

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import distdbg
from distdbg.record import clock, session
from distdbg.record.clock import Clock, Exchange, Peer, Reference, Store, Watched, clock_id, connect
from tests.unit.shards import SECOND


class Shelf:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.counts[key] = self.counts.get(key, 0) + amount
            return self.counts[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


@contextmanager
def answering(store: Store, stop: threading.Event) -> Iterator[None]:
    """A reference that serves in a thread until the block ends."""
    reference = Reference(store, "p", stop, time.monotonic_ns)

    def serve() -> None:
        while not stop.is_set():
            reference.serve()
            stop.wait(0.001)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("ahead", [5 * SECOND, -3 * SECOND, 0])
def test_the_offset_is_true_within_its_bound(ahead: int) -> None:
    """A clock that is ahead by so much finds the reference behind by so much, give or take what it says."""
    store, stop = Shelf(), threading.Event()
    with answering(store, stop):
        peers = [Peer(store, "p", stop, lambda: time.monotonic_ns() + ahead) for _ in range(3)]
        found = [peer.measure() for peer in peers]
    for exchange in found:
        assert exchange is not None
        assert abs(exchange.offset + ahead) <= exchange.error
    assert not store.values  # nothing is left, but for three counters at most
    assert len(store.counts) <= 3


def test_the_quickest_exchange_counts() -> None:
    """A slow way there and back only widens the bound of that one exchange."""
    store, stop, readings = Shelf(), threading.Event(), iter(range(1000))

    def now() -> int:  # every other exchange takes a second
        number = next(readings)
        return number // 4 * 10 * SECOND + (number % 4) * (1000 if number // 4 % 2 else SECOND)

    peer, reference = Peer(store, "p", stop, now), Reference(store, "p", stop, now)
    thread = threading.Thread(
        target=lambda: [None for _ in range(2000) if not reference.serve() and not stop.wait(0.001)]
    )
    thread.start()
    found = peer.measure()
    stop.set()
    thread.join()
    assert found is not None
    assert found.error == 1001


def test_a_stop_ends_every_wait() -> None:
    """Neither side waits for the other once the recording stops."""
    store, stop = Shelf(), threading.Event()
    stop.set()
    began = time.monotonic()
    assert Peer(store, "p", stop, time.monotonic_ns).measure() is None
    assert Reference(store, "p", stop, time.monotonic_ns).serve() == 0
    assert time.monotonic() - began < 1


def test_the_reference_goes_on_after_one_who_asked_and_went_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket without questions costs the limit of one answer, and the next is served."""
    monkeypatch.setattr(clock, "ANSWER_S", 0.2)
    monkeypatch.setattr(clock, "TURN_POLL_S", 0.001)
    store, stop = Shelf(), threading.Event()
    store.add("p/tickets", 1)
    with answering(store, stop):
        assert Peer(store, "p", stop, time.monotonic_ns).measure() is not None


def test_clock_ids_tell_hosts_and_namespaces_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another boot, another offset of the time namespace or another host name is another clock."""
    boot, offsets = tmp_path / "boot", tmp_path / "offsets"
    monkeypatch.setattr(clock, "_BOOT_ID", boot)
    monkeypatch.setattr(clock, "_TIME_OFFSETS", offsets)
    found = [clock_id()]  # neither file is there
    boot.write_text("one\n")
    found.append(clock_id())
    offsets.write_text("monotonic  0 0\nboottime 0 0\n")
    found.append(clock_id())
    offsets.write_text("monotonic  -86400 0\nboottime 0 0\n")
    found.append(clock_id())
    monkeypatch.setattr(clock.socket, "gethostname", lambda: "other")
    found.append(clock_id())
    assert len(set(found)) == len(found)
    assert found[-1] == clock_id()


# ---- in a process


class Group:
    """A default process group as the clock's thread sees it."""

    def __init__(self, rank: int, world: int) -> None:
        self.there: tuple[int, int] | None = (rank, world)


@pytest.fixture
def recorded(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[session.Session]:
    """A recording without torch's hooks, whose own comparison of clocks is over."""
    monkeypatch.setenv("DISTDBG_RUN_DIR", str(run_dir))
    found = session.open_session(session.Settings.from_environ())
    found.parts[0]._clock.detach()
    yield found
    distdbg.stop()


def run_clock(recorded: session.Session, store: Any, rank: int, world: int = 2) -> Clock:
    """Tick once and wait for the thread that this starts."""
    part = Clock(recorded, recorded.emit)
    with (
        mock.patch.object(clock, "connect", return_value=store),
        mock.patch.object(clock, "_initialized", return_value=(rank, world)),
    ):
        part.tick()
        if part._thread is not None:
            part._thread.join(timeout=20)
            assert not part._thread.is_alive()
    part.detach()
    return part


def said(recorded: session.Session) -> str:
    return str(recorded.writer._meta["clock"].get("exchange"))


def test_one_host_needs_no_thread(recorded: session.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the launcher says that all ranks are of this host nothing is asked."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert run_clock(recorded, Shelf(), 1)._thread is None
    assert said(recorded) == "one host"


def test_ranks_with_the_clock_of_rank_0_only_say_so(recorded: session.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count themselves, which ends rank 0's part too where all do."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    store = Shelf()
    store.set("distdbg/clock/none/0/reference", f"epoch {clock_id()}")
    run_clock(recorded, store, 1)
    assert said(recorded) == "the clock of rank 0"
    assert store.counts == {"distdbg/clock/none/0/epoch/same": 1}
    monkeypatch.setattr(Reference, "wanted", lambda self, world: False)
    run_clock(recorded, store, 0)
    assert said(recorded) == "one host"


def test_one_rank_a_host_asks(recorded: session.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes second on a host leaves it to the first."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    store = Shelf()
    store.set("distdbg/clock/none/0/reference", "epoch elsewhere")
    store.add(f"distdbg/clock/none/0/epoch/host/{clock_id()}", 1)
    run_clock(recorded, store, 1)
    assert said(recorded) == "by another rank of this host"


class Gone(Shelf):
    """A store whose server has ended."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection was likely closed")


def test_a_store_that_is_gone_ends_the_exchange(recorded: session.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said in meta.json, and recording goes on."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    part = run_clock(recorded, Gone(), 1)
    assert said(recorded) == "ended by RuntimeError"
    assert part._done
    assert recorded.active


def test_other_stores_are_not_asked(recorded: session.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in files, say, has no quick way there and back."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with mock.patch.object(dist.distributed_c10d, "_get_default_store", return_value=dist.HashStore()):
        found = connect()
    assert found == "the job's store is a HashStore, which is not asked"
    run_clock(recorded, found, 1)
    assert said(recorded) == found


def test_a_destroyed_group_ends_the_exchange(recorded: session.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference leaves the store alone once the process group is gone, and looks for the next one."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(clock, "POLL_S", 0.001)
    store = Shelf()
    part = Clock(recorded, recorded.emit)
    group = Group(0, 2)
    with (
        mock.patch.object(clock, "connect", return_value=store),
        mock.patch.object(clock, "_initialized", side_effect=lambda: group.there),
    ):
        part.tick()
        first = part._thread
        assert first is not None
        group.there = None
        first.join(timeout=20)
        part.tick()
        assert part._thread is first
        group.there = (0, 2)
        part.tick()
        assert part._thread is not first
        part.detach()
    assert part._thread is not None
    assert not part._thread.is_alive()


def test_an_exchange_is_written_beside_the_segments(recorded: session.Session) -> None:
    """One line that outlasts the segments, and an event that is no progress of the training."""
    Clock(recorded, recorded.emit)._write(Exchange(1, -2, 3))
    assert (recorded.writer.folder / "clock.jsonl").read_text() == "[1,-2,3,0]\n"


def test_a_connection_of_our_own_does_not_wait_for_the_jobs() -> None:
    """While the job's client waits for a key, ours is answered: the two do not share a lock."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=timedelta(seconds=20))
    with mock.patch.object(dist.distributed_c10d, "_get_default_store", return_value=dist.PrefixStore("x", server)):
        own = connect()
    assert not isinstance(own, str)
    waiting = threading.Thread(target=server.wait, args=(["later"],))
    waiting.start()
    own.set("now", "1")
    assert own.check(["now"])
    assert waiting.is_alive()
    own.set("later", "1")
    waiting.join(timeout=20)
    assert not waiting.is_alive()


def test_a_store_whose_server_has_ended_is_not_asked(capfd: pytest.CaptureFixture[str]) -> None:
    """The end of the server raises an error of ours, before torch writes a page about it on the job's stderr."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        canary = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
        store = Watched(Shelf(), canary)
        assert store.add("count", 1) == 1
        ours.close()
        select.select([canary], [], [], 20)
        with pytest.raises(ConnectionError):
            store.add("count", 1)
    assert capfd.readouterr().err == ""
