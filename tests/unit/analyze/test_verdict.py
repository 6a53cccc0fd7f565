"""The reasoning, on jobs written event by event: who is named, for what, and when nobody is."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from distdbg.analyze.verdict import diagnose
from distdbg.schema import EventKind as K
from tests.unit.replay import bundles
from tests.unit.shards import UNIX, Rank, job, launcher, train


def named(verdict: dict[str, Any]) -> tuple[str, list[int]]:
    return verdict["kind"], [culprit["rank"] for culprit in verdict["culprits"]]


def exits(*ends: tuple[int, float, int | None, str | None]) -> list[dict[str, Any]]:
    """Launcher events: (rank, seconds, exit code, signal) in order."""
    return [
        {"event": "worker_exit", "at": at, "rank": rank, "attempt": 0, "exit_code": code, "signal": signal, "order": n}
        for n, (rank, at, code, signal) in enumerate(ends, 1)
    ]


def test_a_healthy_run(run_dir: Path) -> None:
    """Ranks that all did the same and left are healthy, and nobody is named."""
    ranks = job(run_dir, 3)
    train(ranks)
    for rank in ranks:
        rank.leave()
    verdict = diagnose(run_dir)
    assert named(verdict) == ("healthy", [])
    assert set(verdict) == {
        "schema", "kind", "summary", "cause", "culprits", "victims", "evidence", "ruled_out", "confidence",
        "world_size", "attempt", "missing_ranks",
    }  # fmt: skip


def test_an_exception_in_a_node(run_dir: Path) -> None:
    """The rank that raised of its own is named with its open node; those that lost their peer are victims."""
    ranks = job(run_dir, 3)
    train(ranks)
    ranks[1].backward("AddBackward0", "ExpBackward0", module="net.act", leave=False)
    error = ranks[1].writer.intern("error", "ValueError: bad", {"type": "ValueError", "where": "train.py:1 in f"})
    ranks[1].event(K.BACKWARD_RAISED, name=error, seq=3).event(K.EXCEPTION, name=error).event(K.EXIT, seq=1)
    for number in (0, 2):
        ranks[number].forward("", "layer", "head").backward("AddBackward0", "AddmmBackward0").call().wait()
        ranks[number].sleep(1).raised("gloo/transport: Connection closed by peer", peer=True, kind="RuntimeError")
    bundles.write(run_dir / "bundles", [torch.ones(8, 4)], rank=1, outcome="it failed the same way")
    for number in (0, 2):
        bundles.write(run_dir / "bundles", [torch.ones(16, 4)], rank=number, reason="asked")
    bundles.write(run_dir / "bundles", [torch.ones(3)], rank=2, step=2, reason="asked")
    (run_dir / "bundles" / "rank1-step3-Another.bundle").mkdir()
    verdict = diagnose(run_dir)
    assert named(verdict) == ("exception", [1])
    assert "run again alone: it failed the same way" in verdict["evidence"]
    assert "rank 1's incoming gradient is [8, 4] where the others have [16, 4]" in verdict["evidence"]
    culprit = verdict["culprits"][0]
    assert (culprit["phase"], culprit["node"], culprit["module"]) == ("backward", "ExpBackward0", "net.act")
    assert (culprit["step"], culprit["error"]) == (3, "ValueError: bad")
    assert [victim["rank"] for victim in verdict["victims"]] == [0, 2]
    assert all(victim["waits_for"] == [1] for victim in verdict["victims"])


def test_what_a_failed_node_received_a_step_earlier(run_dir: Path) -> None:
    """With --describe and no bundle of a peer: what the same node of the same rank received the step before."""
    ranks = job(run_dir, 2)
    for shape in ("[16, 4]", "[16, 4]", "[8, 4]"):
        for rank in ranks:
            rank.forward("", "layer").backward(
                "AddBackward0", "ExpBackward0", leave=shape != "[8, 4]" or rank.rank == 0
            )
            node, module = rank.writer.intern("node", "ExpBackward0"), rank.module("layer")
            text = rank.writer.intern("text", f"received (float32{shape})")
            rank.event(K.DESCRIBE, node, module, 1, rank.backwards - 1, text)
            if shape != "[8, 4]":
                rank.call().step()
    ranks[1].raised("bad")
    evidence = diagnose(run_dir)["evidence"]
    told = "ExpBackward0 received (float32[8, 4]) in step 2, where a step earlier it received (float32[16, 4])"
    assert told in evidence


def test_what_a_stuck_node_received(run_dir: Path) -> None:
    """Native frames and the open node's gradients are cited, unless they are older than the rank's last event."""
    ranks = job(run_dir, 2)
    train(ranks)
    ranks[1].backward("AddBackward0", "ExpBackward0", module="net.act", leave=False)
    ranks[0].backward("AddBackward0", "AddmmBackward0").call().wait()
    for rank in ranks:
        rank.sleep(60).beat()
    launcher(run_dir, {"event": "stall", "at": 60, "silence_s": 60, "limit_s": 30})
    received = [{"shape": [8, 4], "dtype": "float32", "finite": False}, None]
    node = {"node": "ExpBackward0", "node_index": 1, "module": "net.act", "received": received}
    frames = [["poll", "libc.so.6", 0], ["backward", "train.py", 12]]
    threads = [{"os_thread_id": 7, "frames": frames}, {"os_thread_id": 8, "frames": []}, "damaged"]
    told = {
        "ExpBackward0 of rank 1 received float32[8, 4], not finite, None",
        "rank 1's main thread stands in poll (libc.so.6), called by backward (train.py:12)",
    }
    for taken, there in ((UNIX + 60_000_000_000, True), (UNIX - 1, False)):
        about = {"t_unix_ns": taken, "pid": 7, "threads": threads}
        ranks[1].writer.write_text("stacks-native.json", json.dumps(about))
        ranks[1].writer.write_text("stacks.json", json.dumps({"t_unix_ns": taken, "open_nodes": [node]}))
        verdict = diagnose(run_dir)
        assert named(verdict) == ("stalled", [1])
        assert (told <= set(verdict["evidence"])) is there


def test_a_wrapped_peer_error_is_no_own_failure(run_dir: Path) -> None:
    """ "training failed" raised from a transport's error does not make a victim a culprit."""
    ranks = job(run_dir, 2)
    train(ranks)
    ranks[0].call().wait()
    about = {
        "type": "RuntimeError",
        "where": "train.py:3 in main",
        "causes": ["RuntimeError: [gloo/transport/tcp] gone"],
    }
    error = ranks[0].writer.intern("error", "RuntimeError: training failed", about)
    ranks[0].event(K.EXCEPTION, name=error).event(K.EXIT, seq=1)
    ranks[1].backward("SinBackward0", leave=False)
    launcher(run_dir, *exits((1, 0.5, None, "SIGKILL"), (0, 0.6, 1, None)))
    verdict = diagnose(run_dir)
    assert named(verdict) == ("died", [1])
    assert verdict["culprits"][0]["node"] == "SinBackward0"
    assert verdict["culprits"][0]["signal"] == "SIGKILL"


def test_a_peer_error_where_the_script_waits_itself(run_dir: Path) -> None:
    """The transport's words tell of a peer although the innermost line is the script's own."""
    ranks = job(run_dir, 2)
    train(ranks)
    text = "[/x/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8631"
    ranks[0].call().wait().raised(text, kind="RuntimeError")
    shutil.rmtree(next(run_dir.glob("ranks/rank00001*")))
    assert named(diagnose(run_dir)) == ("unknown", [])


def test_the_siblings_that_the_launcher_ends_did_not_die(run_dir: Path) -> None:
    """SIGTERM after the first failure is the launcher's, not a death."""
    ranks = job(run_dir, 3)
    train(ranks)
    for rank in ranks:
        rank.forward("", "layer").call().wait()
    launcher(run_dir, *exits((2, 0.5, None, "SIGSEGV"), (0, 0.6, None, "SIGTERM"), (1, 0.7, None, "SIGTERM")))
    assert named(diagnose(run_dir)) == ("died", [2])


def test_leaving_early_with_exit_code_0(run_dir: Path) -> None:
    """A rank that came to its end while others need it has died, however well it seems."""
    ranks = job(run_dir, 3)
    train(ranks)
    ranks[2].leave()
    for rank in ranks[:2]:
        rank.sleep(0.1).call("barrier", 0).wait().sleep(1).raised(
            "Connection closed by peer", peer=True, kind="RuntimeError"
        )
    verdict = diagnose(run_dir)
    assert named(verdict) == ("died", [2])
    assert (verdict["culprits"][0]["phase"], verdict["culprits"][0]["collective"]) == ("exit", "barrier")


def test_an_abort_after_the_script_is_nobodys_fault(run_dir: Path) -> None:
    """A process that aborts while its interpreter shuts down, after its script ended, is told of and not blamed."""
    ranks = job(run_dir, 2)
    train(ranks)
    for rank in ranks:
        rank.leave()
    launcher(run_dir, *exits((0, 0.5, None, "SIGABRT"), (1, 0.6, 0, None)))
    verdict = diagnose(run_dir)
    assert named(verdict) == ("healthy", [])
    assert any("SIGABRT" in sentence for sentence in verdict["evidence"])


def test_sys_exit_with_a_code_is_an_exception(run_dir: Path) -> None:
    """A rank that leaves by sys.exit(3) is named for that."""
    ranks = job(run_dir, 2)
    train(ranks)
    ranks[0].event(K.EXIT, seq=3, name=ranks[0].writer.intern("text", "sys.exit"))
    ranks[1].call().wait()
    launcher(run_dir, *exits((0, 0.5, 3, None), (1, 0.6, None, "SIGTERM")))
    verdict = diagnose(run_dir)
    assert named(verdict) == ("exception", [0])
    assert verdict["culprits"][0]["error"] == "SystemExit: 3"


def test_a_stall_is_where_the_waits_end(run_dir: Path) -> None:
    """Of ranks that do not move the one that waits for nobody is named, between two nodes with the next due."""
    ranks = job(run_dir, 3)
    train(ranks)
    for rank in ranks[:2]:
        rank.forward("", "layer", "head").backward("AddBackward0", "AddmmBackward0").call().wait()
    ranks[2].forward("", "layer", "head").event(K.BACKWARD_BEGIN, seq=3, a=2)
    words = (ranks[2].writer.intern("node", "AddBackward0"), ranks[2].module("layer"), 0, 3, 1)
    ranks[2].event(K.PREHOOK, *words).event(K.POSTHOOK, *words)
    for rank in ranks:
        rank.sleep(10).beat()
    launcher(run_dir, {"event": "stall", "at": 10.0})
    verdict = diagnose(run_dir)
    assert named(verdict) == ("stalled", [2])
    culprit = verdict["culprits"][0]
    assert (culprit["phase"], culprit["node"], culprit["step"]) == ("backward", "AddmmBackward0", 3)
    assert culprit["since_s"] == pytest.approx(10, abs=0.5)


def test_a_stall_that_recovered_is_healthy(run_dir: Path) -> None:
    """A stall that ended by itself is noted, and nobody is blamed."""
    ranks = job(run_dir, 2)
    train(ranks)
    for rank in ranks:
        rank.leave()
    launcher(run_dir, {"event": "stall", "at": 1.0}, {"event": "recovered", "at": 2.0})
    verdict = diagnose(run_dir)
    assert named(verdict) == ("healthy", [])
    assert any("recovered" in sentence for sentence in verdict["evidence"])


def test_what_follows_a_kill_is_no_evidence(run_dir: Path) -> None:
    """After the launcher killed a stalled job, the errors and signals of its end change nothing."""
    ranks = job(run_dir, 2)
    train(ranks)
    ranks[0].call().wait()
    ranks[1].event(K.DATA_BEGIN)
    for rank in ranks:
        rank.sleep(9).beat()
    ranks[0].sleep(2).raised("Connection closed by peer", peer=True, kind="RuntimeError")
    launcher(
        run_dir,
        {"event": "stall", "at": 9.0},
        {"event": "kill", "at": 10.0},
        *exits((1, 10.5, None, "SIGKILL"), (0, 11.0, 1, None)),
    )
    verdict = diagnose(run_dir)
    assert named(verdict) == ("stalled", [1])
    assert verdict["culprits"][0]["phase"] == "data"


def test_an_interrupted_healthy_run(run_dir: Path) -> None:
    """Ctrl-C on a run that moves names nobody."""
    ranks = job(run_dir, 2)
    train(ranks)
    for rank in ranks:
        rank.sleep(1).raised("", kind="KeyboardInterrupt")
    launcher(
        run_dir,
        {"event": "interrupted", "at": 0.5, "signal": "SIGINT"},
        *exits((0, 1.0, None, "SIGINT"), (1, 1.0, 1, None)),
    )
    assert named(diagnose(run_dir)) == ("healthy", [])


def stall(run_dir: Path, ranks: list[Rank]) -> dict[str, Any]:
    for rank in ranks:
        rank.sleep(10).beat()
    launcher(run_dir, {"event": "stall", "at": 10.0})
    return diagnose(run_dir)


def test_waiting_in_a_wrappers_forward(run_dir: Path) -> None:
    """DDP also waits in forward, after its call has returned and with no event more: a victim all the same."""
    ranks = job(run_dir, 3)
    train(ranks)
    for rank in ranks[1:]:
        rank.event(K.FORWARD_BEGIN, module=rank.module(""), a=1).call("broadcast", issuer="DDP", root=0)
    verdict = stall(run_dir, ranks)
    assert named(verdict) == ("stalled", [0])
    assert verdict["culprits"][0]["phase"] == "loop"


def test_a_group_that_is_never_made(run_dir: Path) -> None:
    """Ranks in init_process_group wait for the one that is not there yet."""
    ranks = job(run_dir, 3)
    for rank in ranks[:2]:
        rank.event(K.SETUP_BEGIN, name=rank.writer.intern("operation", "init_process_group"))
    assert named(stall(run_dir, ranks)) == ("stalled", [2])


def test_a_skipped_module_is_where_it_began(run_dir: Path) -> None:
    """A rank that left a module out, and so an all_reduce, is named at that module, not where the others wait."""
    ranks = job(run_dir, 3)
    train(ranks)
    for rank in ranks:
        left_out = rank.rank == 1
        rank.forward("", "layer", *([] if left_out else ["adapter"]), "head").backward("AddBackward0", "AddmmBackward0")
        if left_out:
            rank.step().forward("", "layer")
        else:
            rank.call().wait()
    verdict = stall(run_dir, ranks)
    assert named(verdict) == ("mismatch", [1])
    culprit = verdict["culprits"][0]
    assert (culprit["phase"], culprit["module"], culprit["step"]) == ("forward", "adapter", 3)


def test_another_size_and_the_abort_of_an_innocent(run_dir: Path) -> None:
    """The rank whose all_reduce had another size is named, though another one aborted."""
    ranks = job(run_dir, 3)
    train(ranks)
    for rank in ranks:
        rank.call(size=5 if rank.rank == 2 else 8).wait()
    launcher(run_dir, *exits((0, 0.5, None, "SIGABRT"), (1, 0.6, None, "SIGTERM"), (2, 0.6, None, "SIGTERM")))
    verdict = diagnose(run_dir)
    assert named(verdict) == ("mismatch", [2])
    assert verdict["culprits"][0]["collective"] == "all_reduce"


def test_a_caught_exception_that_left_a_rank_behind(run_dir: Path) -> None:
    """Steps later all wait; named is the step in which the exception was caught, with its text."""
    ranks = job(run_dir, 3)
    train(ranks, 1)
    ranks[1].event(K.FORWARD_BEGIN, module=ranks[1].module(""), a=1)
    ranks[1].event(K.FORWARD_BEGIN, module=ranks[1].module("layer"), a=2)
    ranks[1].raised("bad token", caught=True)
    error = ranks[1].writer.intern("error", "ValueError: bad token")
    ranks[1].event(K.FORWARD_RAISED, name=error, module=ranks[1].module(""))
    train([ranks[0], ranks[2]], 3)
    train([ranks[1]], 2)
    ranks[1].call("barrier", 0).wait()
    for rank in (ranks[0], ranks[2]):
        rank.call("barrier", 0).wait()
    verdict = stall(run_dir, ranks)
    assert named(verdict) == ("mismatch", [1])
    culprit = verdict["culprits"][0]
    assert (culprit["step"], culprit["module"], culprit["error"]) == (1, "layer", "ValueError: bad token")


def test_two_ranks_are_judged_by_their_habit(run_dir: Path) -> None:
    """With two ranks the one that did otherwise than in its own earlier steps is at fault."""
    ranks = job(run_dir, 2)
    for rank in ranks:
        rank.parameter("w")
        for step in range(4):
            sizes = (8, 4) if not (step == 3 and rank.rank == 1) else (4, 8)
            rank.forward("", "wide" if sizes == (8, 4) else "narrow")
            rank.call(size=sizes[0])
            if step < 3:
                rank.call(size=sizes[1]).step()
        rank.wait()
    verdict = stall(run_dir, ranks)
    assert named(verdict) == ("mismatch", [1])
    assert verdict["culprits"][0]["step"] == 3


def test_two_ranks_without_a_habit_are_unknown(run_dir: Path) -> None:
    """In the first step of two ranks nobody can tell who is wrong: both stories, no name."""
    ranks = job(run_dir, 2)
    for rank in ranks:
        rank.parameter("w")
        rank.forward("").call(size=8 + rank.rank).wait()
    verdict = stall(run_dir, ranks)
    assert named(verdict) == ("unknown", [])
    assert "can't be told" in verdict["summary"]


def test_a_missing_rank_may_turn_a_majority(run_dir: Path) -> None:
    """Where a rank is not seen, one against one is not decided by habit."""
    ranks = [Rank(run_dir, number, 3) for number in (0, 1)]
    train(ranks)
    ranks[0].forward("", "layer", "head").call().wait()
    ranks[1].call("barrier", 0).wait()
    assert named(stall(run_dir, ranks)) == ("unknown", [])


def test_the_waits_end_at_a_rank_that_is_not_seen(run_dir: Path) -> None:
    """If all wait for a rank without a shard, it is pointed at and not accused."""
    ranks = [Rank(run_dir, number, 3) for number in (0, 1)]
    train(ranks)
    for rank in ranks:
        rank.call().wait()
    verdict = stall(run_dir, ranks)
    assert named(verdict) == ("unknown", [])
    assert "rank 2" in verdict["summary"]


def test_an_exit_code_without_a_shard_accuses_nobody(run_dir: Path) -> None:
    """A rank of which only exit code 1 is known may be a victim as well."""
    ranks = [Rank(run_dir, number, 3) for number in (0, 1)]
    train(ranks)
    for rank in ranks:
        rank.call().wait().sleep(1).raised("Connection closed by peer", peer=True, kind="RuntimeError")
    launcher(run_dir, *exits((2, 0.2, 1, None), (0, 1.0, 1, None), (1, 1.0, 1, None)))
    assert named(diagnose(run_dir)) == ("unknown", [])


@pytest.mark.parametrize("joined", [True, False])
def test_join_is_no_parting(run_dir: Path, joined: bool) -> None:
    """Under join() ranks have different numbers of steps by design; without it the same is a mismatch."""
    ranks = job(run_dir, 3)
    for rank in ranks:
        rank.parameter("w")
        if joined:
            rank.event(K.JOIN_BEGIN)
        for _ in range(3 if rank.rank == 1 else 5):
            rank.forward("", "layer").call(issuer="DDP").step()
        if joined and rank.rank == 1:
            rank.call(issuer="join").call(issuer="join")
        if joined:
            rank.event(K.JOIN_END).call("barrier", 0).leave()
        elif rank.rank == 1:
            rank.call("barrier", 0).wait()
    if joined:
        assert named(diagnose(run_dir)) == ("healthy", [])
    else:
        assert named(stall(run_dir, ranks)) == ("mismatch", [1])


def test_lines_of_their_own_are_no_swap(run_dir: Path) -> None:
    """A root that broadcasts from another line than its receivers call it is the usual idiom."""
    ranks = job(run_dir, 3)
    for rank in ranks:
        rank.parameter("w")
        for _ in range(4):
            rank.call("broadcast", source="train.py:5" if rank.rank == 0 else "train.py:9", root=0).call(
                source="train.py:20"
            ).step()
        rank.leave()
    assert named(diagnose(run_dir)) == ("healthy", [])


def test_calls_swapped_in_silence(run_dir: Path) -> None:
    """Two equal calls in swapped order end well with wrong numbers; lines that all use together tell."""
    ranks = job(run_dir, 3)
    for rank in ranks:
        rank.parameter("w")
        for step in range(5):
            lines = ["train.py:5", "train.py:6"]
            for line in reversed(lines) if (rank.rank, step) == (2, 3) else lines:
                rank.call(source=line)
            rank.step()
        rank.leave()
    verdict = diagnose(run_dir)
    assert named(verdict) == ("mismatch", [2])
    assert verdict["culprits"][0]["step"] == 3


def test_messages_in_the_wrong_order(run_dir: Path) -> None:
    """Two stages that wait for each other's messages: the one that left its habit is named."""
    ranks = job(run_dir, 2)
    first, second = ranks
    first.parameter("a")
    second.parameter("b")
    for step in range(4):
        tags = (2, 1) if step == 3 else (1, 2)
        for tag in (1, 2):
            first.call("send", peer=1, tag=tag)
        for tag in tags:
            second.call("recv", peer=0, tag=tag)
        if step == 3:
            break
        first.call("recv", peer=1, tag=9)
        second.call("send", peer=0, tag=9)
        for rank in ranks:
            rank.step()
    first.call("recv", peer=1, tag=9).wait()
    second.call("recv", peer=0, tag=5).wait()
    verdict = stall(run_dir, ranks)
    assert named(verdict) == ("mismatch", [1])
    assert verdict["culprits"][0]["collective"] == "recv"


def test_restarts_are_told(run_dir: Path) -> None:
    """The newest attempt counts; that an earlier one failed is told."""
    for rank in job(run_dir, 2):
        rank.raised("first try")
    ranks = job(run_dir, 2, attempt=1)
    train(ranks)
    for rank in ranks:
        rank.leave()
    launcher(run_dir, *[{"event": "worker_start", "rank": r, "attempt": a, "pid": 1} for a in (0, 1) for r in (0, 1)])
    verdict = diagnose(run_dir)
    assert named(verdict) == ("healthy", [])
    assert verdict["attempt"] == 1
    assert any("attempt 0 failed" in sentence for sentence in verdict["evidence"])


def straggling(run_dir: Path, *, late: int | None, size: int = 8, everywhere: bool = False) -> dict[str, Any]:
    ranks = job(run_dir, 3)
    for rank in ranks:
        rank.parameter("w")
        for step in range(14):
            slow = rank.rank == late and step >= 4
            began = rank.now
            for name in ("", "a", "b", "c", "d"):
                module = rank.module(name)
                elements = size if rank.rank == late else 8
                rank.event(K.FORWARD_BEGIN, module=module, a=1, b=elements)
                rank.sleep(0.07 if slow and (everywhere or name == "c") else 0.01).event(K.FORWARD_END, module=module)
            rank.call().wait()
            rank.now = max(rank.now, began + 250_000_000)
            rank.event(K.WAIT_END).step()
        rank.leave()
    return diagnose(run_dir)


def test_a_straggler_and_its_module(run_dir: Path) -> None:
    """The rank with the longer own time is named, with the module and the first step in which it was late."""
    verdict = straggling(run_dir, late=1)
    assert named(verdict) == ("straggler", [1])
    culprit = verdict["culprits"][0]
    assert (culprit["phase"], culprit["module"]) == ("forward", "c")
    assert abs(culprit["step"] - 4) <= 2


def test_a_larger_batch_is_no_straggler(run_dir: Path) -> None:
    """A rank that has more to do is imbalance, not fault, and told as that."""
    verdict = straggling(run_dir, late=1, size=24, everywhere=True)
    assert named(verdict) == ("healthy", [])
    assert "on inputs 3.0 times as large: imbalance, no fault" in " ".join(verdict["evidence"])


def test_lateness_spread_over_everything_names_nobody(run_dir: Path) -> None:
    """A rank that is slower everywhere at once is what a busy machine looks like, too."""
    assert named(straggling(run_dir, late=1, everywhere=True)) == ("healthy", [])


def test_equally_slow_ranks_are_healthy(run_dir: Path) -> None:
    """Where nobody is late nobody is named."""
    assert named(straggling(run_dir, late=None)) == ("healthy", [])


def test_times_are_of_the_wall(run_dir: Path) -> None:
    """The helpers' clock starts where the tests say it does."""
    (rank,) = job(run_dir, 1)
    assert rank.writer.folder.exists()
    assert UNIX > 0
