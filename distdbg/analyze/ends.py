"""How each rank ended, from what the launcher saw and what the shard says, and whose fault an exception is."""

import os
import re
from dataclasses import dataclass
from typing import Any

from distdbg.analyze.rank import RankView

# What transports, stores and watchdogs say when it is another rank that is gone or late.
_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout|error)|closed by peer"
    r"|timed? ?out|remote (process|peer|worker|rank)|gloo[/\\]transport|enforcenotmet|tcpstore|recvvalue|sendbytes"
    r"|nccl.{0,200}(remote|unhandled system|abort)|watchdog|process group (is )?(aborted|shut)|communicator"
    r"|no longer connected|rendezvous",
    re.IGNORECASE,
)
_PEER_CAUSE = re.compile(r"gloo/transport|Dist(Backend|Network|Store)Error|\bNCCL\b")
_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError")


@dataclass
class End:
    """``how``: running, left (script ended, or exit code 0), exception, crashed (signal), vanished (exit code
    with no exit record), stopped (SIGSTOP), terminated (by the launcher or by whoever ended the run)."""

    how: str
    t: int = 0  # unix ns, 0 if it runs
    code: int | None = None
    signal: str | None = None
    order: int = 0

    @property
    def over(self) -> bool:
        return self.how not in ("running", "stopped")


@dataclass
class Failure:
    """An exception that left a rank's script."""

    error: int
    t: int
    type: str
    text: str
    source: str
    origin: str
    where: str
    from_peer: bool

    @property
    def title(self) -> str:
        """The first line of "type: text", cut where it is long."""
        line = self.text.splitlines()[0] if self.text else self.type
        return line if len(line) <= 200 else line[:197] + "..."


def cut_of(events: list[dict[str, Any]]) -> int | None:
    """When somebody ended the run from outside (an interrupt, a kill after a stall): unix ns or None."""
    times = [int(e["t_unix_ns"]) for e in events if e.get("event") in ("interrupted", "kill") and "t_unix_ns" in e]
    return min(times) if times else None


def interrupt_of(views: dict[int, RankView]) -> int | None:
    """When a rank was thrown out by KeyboardInterrupt, where no launcher tells of an interrupt: unix ns or None."""
    times = []
    for view in views.values():
        marks = [(raised.error, raised.t) for raised in view.raised]
        if view.uncaught is not None:
            marks.append(view.uncaught[:2])
        for error, t in marks:
            about = view.extra(error)
            if about.get("type") == "KeyboardInterrupt" or "KeyboardInterrupt" in about.get("causes", ()):
                times.append(t)
    return min(times, default=None)


def failure_of(view: RankView) -> Failure | None:
    found = view.uncaught
    if found is None:
        return None
    error, t, source = found
    about = view.extra(error)
    text = view.text(error)
    kind = str(about.get("type", ""))
    where, origin = str(about.get("where", "")), str(about.get("origin", ""))
    library = "site-packages" in where or "/torch/" in where or not where
    by_type = any(name in kind for name in _PEER_TYPES)
    # Where the script itself waits for a call's work, no frame of torch's is the innermost: the transport's own words.
    transport = library or "gloo/transport" in text
    from_peer = by_type or (transport and origin in ("", "collective") and bool(_PEER.search(text)))
    # A script often wraps what it caught: "training failed" from "connection closed by peer".
    from_peer = from_peer or any(_PEER_CAUSE.search(cause) for cause in about.get("causes", ()))
    return Failure(error, t, kind, text, view.text(source) or str(about.get("source", "")), origin, where, from_peer)


def _alive(view: RankView) -> bool | None:
    """Whether a process of this host still runs; None where that can't be told."""
    if view.shard.host != os.uname().nodename:
        return None
    try:
        with open(f"/proc/{view.shard.pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _teardown(event: dict[str, Any], cut: int | None) -> bool:
    """Whether a rank's exit is part of the run's being ended; the signal that does so may be seen a moment before."""
    if cut is None:
        return False
    margin = 1_000_000_000 if event.get("signal") in ("SIGINT", "SIGTERM") else 0
    return int(event["t_unix_ns"]) > cut - margin


def ends_of(views: dict[int, RankView], events: list[dict[str, Any]], attempt: int, cut: int | None) -> dict[int, End]:
    """The end of every rank for which there is a shard or an event of the launcher."""
    exits: dict[int, dict[str, Any]] = {}
    stopped: set[int] = set()
    for event in events:
        if int(event.get("attempt", attempt) or 0) != attempt or "rank" not in event:
            continue
        rank = int(event["rank"])
        if event.get("event") == "worker_exit" and not _teardown(event, cut):
            exits.setdefault(rank, event)
        elif event.get("event") == "stopped" and (cut is None or int(event["t_unix_ns"]) <= cut):
            stopped.add(rank)
    watched = any(e.get("event") == "worker_start" for e in events)
    first_bad = min(
        (int(e["t_unix_ns"]) for e in exits.values() if e.get("exit_code") != 0 or e.get("signal")), default=None
    )
    ends = {}
    for rank in {*views, *exits}:
        view, exit_event = views.get(rank), exits.get(rank)
        if exit_event is not None:
            ends[rank] = _end_of(view, exit_event, first_bad)
        elif rank in stopped:
            ends[rank] = End("stopped")
        elif view is None:
            ends[rank] = End("running")
        elif view.exit_record is not None or view.uncaught is not None:
            ends[rank] = _recorded_end(view)
        elif not watched and cut is None and view.stop_reason == "stop":
            ends[rank] = End("left", view.last_t)  # its recording ended in order; what it does now is not recorded
        elif not watched and cut is None and _alive(view) is False:
            ends[rank] = End("vanished", view.last_t)
        else:
            ends[rank] = End("running")
    return ends


def _recorded_end(view: RankView) -> End:
    if view.uncaught is not None:
        return End("exception", view.uncaught[1], 1)
    assert view.exit_record is not None
    code, _, t = view.exit_record
    return End("left", t, code)


def _end_of(view: RankView | None, event: dict[str, Any], first_bad: int | None) -> End:
    t, order = int(event["t_unix_ns"]), int(event.get("order", 0) or 0)
    code, signal = event.get("exit_code"), event.get("signal")
    late = first_bad is not None and t > first_bad
    if view is not None and view.uncaught is not None:
        return End("exception", min(t, view.uncaught[1]), code, signal, order)
    if signal == "SIGABRT" and view is not None and view.exit_record is not None and view.exit_record[0] == 0:
        # The script had ended: an abort while the interpreter shuts down (gloo's threads do that) harms nobody.
        return End("left", view.exit_record[2], 0, signal, order)
    if signal:
        # torchrun sends SIGTERM, then SIGKILL, to the siblings of the first that failed.
        ours = late and signal in ("SIGTERM", "SIGKILL", "SIGINT")
        return End("terminated" if ours else "crashed", t, None, signal, order)
    if view is not None and view.exit_record is not None:
        return End("left", view.exit_record[2], code, None, order)
    if code is None:
        return End("terminated" if late else "vanished", t, None, None, order)
    return End("vanished", t, int(code), None, order)
