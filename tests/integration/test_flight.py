"""Dumps of the Flight Recorder that torch itself wrote, on gloo: what it puts there, and what is made of it."""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from distdbg import schema
from distdbg.analyze.flight import read_dump
from distdbg.analyze.verdict import diagnose
from tests.integration import jobs

pytestmark = pytest.mark.integration

DUMPING = """
    from torch._C import _distributed_c10d as c10d

    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    other = dist.new_group([0, 1])
    store = dist.distributed_c10d._get_default_store()

    def together(name):
        store.set(f"{name}{RANK}", "1")
        store.wait([f"{name}{rank}" for rank in range(3)])

    def dump(name):
        together(name)
        os.makedirs(name, exist_ok=True)
        open(f"{name}/trace_rank_{RANK}", "wb").write(c10d._dump_fr_trace())
        os.makedirs(f"{name}-json", exist_ok=True)
        open(f"{name}-json/trace_rank_{RANK}.json", "wb").write(c10d._dump_fr_trace_json())
        together(f"{name} done")

    def ended():
        while any(not entry["retired"] for entry in __import__("json").loads(c10d._dump_fr_trace_json())["entries"]):
            time.sleep(0.01)

    model = DDP(nn.Linear(4, 4))
    for step in range(4):
        model(torch.ones(2, 4)).sum().backward()
        if RANK < 2:
            dist.all_reduce(torch.ones(3), group=pair)
            dist.all_reduce(torch.ones(4), group=other)
        dist.broadcast(torch.ones(2, 2), 0)
        dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(6))
    dist.barrier()
    ended()
    dump("healthy")
    if RANK == 0:
        dist.send(torch.ones(1), 1)
    elif RANK == 1:
        dist.recv(torch.ones(1), 0)
    dump("messages")
    if RANK < 2:
        work = dist.all_reduce(torch.ones(5), async_op=True)
    dump("lacking")
    if RANK < 2:
        swapped = dist.all_reduce(torch.ones(5), group=[pair, other][RANK], async_op=True)
    dump("swapped")
    os._exit(0)
"""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of three ranks that dumps when all is well, when rank 2 lacks a call, and when two more stand crosswise."""
    folder = tmp_path_factory.mktemp("dumps")
    script = jobs.write(folder, DUMPING)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    result = jobs.run([*command, str(script)], folder, TORCH_FR_BUFFER_SIZE="2000")
    assert result.code == 0, result.err
    # The jobs' own times are of one moment: as if the dumps had been taken a minute later.
    later = time.time() + 60
    for file in folder.glob("*/trace_rank_*"):
        os.utime(file, (later, later))
    return folder


def named(verdict: dict[str, Any]) -> tuple[str, list[int]]:
    return verdict["kind"], [culprit["rank"] for culprit in verdict["culprits"]]


def test_what_torch_writes_is_read(dumps: Path) -> None:
    """Pickled and JSON dumps of torch hold the same calls, with the lines of the script in the pickled ones."""
    pickled, text = (
        read_dump(dumps / "lacking" / "trace_rank_0"),
        read_dump(dumps / "lacking-json" / "trace_rank_0.json"),
    )
    assert pickled.problems == text.problems == []
    assert [(c.text, c.numel, c.dtypes, c.finished) for c in pickled.calls] == [
        (c.text, c.numel, c.dtypes, c.finished) for c in text.calls
    ]
    assert not pickled.gaps
    assert pickled.calls[-1].finished is False
    assert all(call.finished for call in pickled.calls[:-1])
    assert all((call.source or "").startswith("train.py:") for call in pickled.calls)
    assert {call.phase for call in pickled.calls} >= {"backward", "collective"}
    assert "barrier" in {call.op for call in pickled.calls}


@pytest.mark.parametrize("form", ["", "-json"])
def test_a_healthy_job(dumps: Path, form: str) -> None:
    """Where all has ended nobody is blamed, also with groups of which two ranks are no part."""
    assert named(diagnose(dumps / f"healthy{form}")) == ("healthy", [])


def test_messages_are_not_held(dumps: Path) -> None:
    """gloo's dumps do not hold them, but show that there were some: not all that a rank may stand in is known."""
    assert [read_dump(dumps / "messages" / f"trace_rank_{rank}").messages for rank in range(3)] == [[], [], []]
    assert not read_dump(dumps / "lacking" / "trace_rank_2").messaging
    assert read_dump(dumps / "lacking" / "trace_rank_0").messaging


@pytest.mark.parametrize("form", ["", "-json"])
def test_a_rank_that_lacks_a_call(dumps: Path, form: str) -> None:
    """The rank that did not issue the last call is named; where it has left no dump nobody is."""
    verdict = diagnose(dumps / f"lacking{form}")
    assert named(verdict) == ("stalled", [2])
    assert [victim["rank"] for victim in verdict["victims"]] == [0, 1]
    assert verdict["culprits"][0]["group"] == "default_pg"
    fewer = dumps / f"fewer{form}"
    shutil.copytree(dumps / f"lacking{form}", fewer, ignore=shutil.ignore_patterns("*rank_2*"))
    assert named(diagnose(fewer)) == ("unknown", [])


def test_two_calls_that_stand_crosswise(dumps: Path) -> None:
    """What stood first explains more: that two ranks went on to other calls does not move the blame."""
    assert named(diagnose(dumps / "swapped")) == ("stalled", [2])


STALLING = """
    dist.init_process_group("gloo")
    for step in range(3):
        dist.all_reduce(torch.ones(4))
    if RANK == 2:
        import signal
        signal.pause()
    dist.all_reduce(torch.ones(4))
"""


def test_the_dump_of_a_stall_stands_in_for_a_lost_shard(tmp_path: Path) -> None:
    """distdbg's own dumps agree with the shards, and name the rank whose shard was lost."""
    script = jobs.write(tmp_path, STALLING)
    result = jobs.distdbg(script, "--stall-timeout", "4", "--on-stall", "kill", nproc=3, TORCH_FR_BUFFER_SIZE="2000")
    assert result.named == ("stalled", [2])
    assert not any("Flight Recorder" in line for line in result.verdict["evidence"])
    (folder,) = (result.run / schema.RANKS_FOLDER).glob("rank00002-*")
    assert (folder / schema.FLIGHT_RECORDER_FILE).exists()
    for segment in folder.glob("seg-*"):
        segment.unlink()
    verdict = diagnose(result.run)
    assert named(verdict) == ("stalled", [2])
    assert verdict["culprits"][0]["collective"] == "all_reduce"
    (folder / schema.FLIGHT_RECORDER_FILE).unlink()
    assert named(diagnose(result.run)) == ("unknown", [])
