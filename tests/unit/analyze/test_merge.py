"""One timeline out of many shards."""

from pathlib import Path

import pandas as pd
import pytest

import distdbg
from distdbg import schema
from distdbg.cli import main
from distdbg.schema import EventKind as K
from tests.unit.shards import SECOND, Rank, job, train


def test_ranks_are_sorted_by_wall_time(run_dir: Path) -> None:
    """Hosts whose monotonic clocks differ by hours still interleave by their anchors."""
    first = Rank(run_dir, 0, 2)
    second = Rank(run_dir, 1, 2, skew_ns=5_000 * SECOND, host="other")
    for _ in range(3):
        first.sleep(1).step()
        second.sleep(1).step()
    events = distdbg.load(run_dir)
    steps = events[events["event"] == "step"]
    assert steps["rank"].tolist() == [0, 1, 0, 1, 0, 1]
    assert events["time_s"].is_monotonic_increasing
    assert events["time_s"].iloc[0] == 0
    assert sorted(events["host"].unique()) == ["host", "other"]


def test_columns_of_a_node(run_dir: Path) -> None:
    """A hook's row names its node, index, module, backward and what it received."""
    (rank,) = job(run_dir, 1)
    rank.backward("AddBackward0", "MmBackward0", module="net.fc")
    events = distdbg.load(run_dir)
    assert tuple(events.columns) == schema.COLUMNS
    hooks = events[events["event"] == "prehook"]
    assert hooks["node"].tolist() == ["AddBackward0", "MmBackward0"]
    assert hooks["node_index"].tolist() == [0, 1]
    assert hooks["seq"].tolist() == [0, 0]
    assert set(hooks["module"]) == {"net.fc"}
    assert hooks["detail"].tolist() == ["1 tensor", "1 tensor"]
    assert set(hooks["phase"]) == {"backward"}
    assert hooks["group"].isna().all()
    assert hooks["bytes"].isna().all()


def test_columns_of_a_collective(run_dir: Path) -> None:
    """A collective's row has operation, group, number in it, bytes, and where it was issued."""
    (rank,) = job(run_dir, 1)
    rank.call("all_gather", 16).call("all_gather", 16)
    calls = distdbg.load(run_dir).query("event == 'collective'")
    assert calls["collective"].tolist() == ["all_gather"] * 2
    assert calls["collective_seq"].tolist() == [1, 2]
    assert calls["bytes"].tolist() == [64, 64]
    assert calls["group"].tolist() == ["world"] * 2
    assert calls["detail"].iloc[0] == "float32[16] at train.py:1"
    assert set(calls["phase"]) == {"collective"}


def test_phases_nest_and_recover(run_dir: Path) -> None:
    """The innermost phase counts, a phase's end belongs to it, and an end never told of is over with the step."""
    (rank,) = job(run_dir, 1)
    rank.event(K.OPTIMIZER_BEGIN, a=1).forward("closure").event(K.OPTIMIZER_END, a=1).step()
    rank.event(K.OPTIMIZER_BEGIN, a=1).step()  # raised: torch tells of no end
    rank.event(K.HEARTBEAT).event(K.DATA_BEGIN).event(K.DATA_END).event(K.EXIT)
    events = distdbg.load(run_dir).set_index("event")["phase"]
    assert events["forward_begin"] == "forward"
    assert events["forward_end"] == "forward"
    assert events["optimizer_end"] == "optimizer"
    assert events["heartbeat"] == "loop"
    assert events["data_end"] == "data"
    assert events["exit"] == "exit"


def test_spans_have_own_time_waits_and_openness(run_dir: Path) -> None:
    """A span's own time leaves its children out, waiting is counted up the stack, what never ended is open."""
    (rank,) = job(run_dir, 1)
    rank.event(K.FORWARD_BEGIN, module=rank.module("outer"), a=1).sleep(1)
    rank.event(K.FORWARD_BEGIN, module=rank.module("inner"), a=2).sleep(2)
    rank.wait().sleep(4).event(K.WAIT_END)
    rank.event(K.FORWARD_END, module=rank.module("inner")).event(K.FORWARD_END, module=rank.module("outer"))
    rank.backward("AddBackward0", "SinBackward0", leave=False).sleep(1).beat()
    spans = distdbg.load(run_dir, spans=True)
    assert tuple(spans.columns) == schema.SPAN_COLUMNS
    by_module = spans[spans["event"] == "forward"].set_index("module")
    assert by_module.loc["outer", "duration_us"] == pytest.approx(7e6, rel=0.01)
    assert by_module.loc["outer", "own_us"] == pytest.approx(1e6, rel=0.01)
    assert by_module.loc["outer", "wait_us"] == pytest.approx(4e6, rel=0.01)
    assert by_module.loc["inner", "own_us"] == pytest.approx(2e6, rel=0.01)
    still = spans[spans["open"]]
    assert sorted(still["event"]) == ["backward", "node"]
    assert still.set_index("event").loc["node", "node"] == "SinBackward0"


def test_the_end_of_a_backward_is_waiting(run_dir: Path) -> None:
    """From its final callback on a backward waits for the gradients of others; that is not its own time."""
    (rank,) = job(run_dir, 1)
    rank.event(K.BACKWARD_BEGIN, seq=0, a=1).sleep(1).event(K.BACKWARD_FINAL, seq=0).sleep(4)
    rank.event(K.BACKWARD_END, seq=0)
    span = distdbg.load(run_dir, spans=True).iloc[0]
    assert span["duration_us"] == pytest.approx(5e6, rel=0.01)
    assert span["own_us"] == pytest.approx(1e6, rel=0.01)
    assert span["wait_us"] == pytest.approx(4e6, rel=0.01)


@pytest.mark.parametrize("spans", [[], ["--spans"]])
def test_command_writes_csv_and_parquet(run_dir: Path, spans: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`distdbg merge` writes both formats with the same rows, by default beside the shards."""
    train(job(run_dir, 2))
    assert main(["merge", str(run_dir), *spans]) == 0
    table = pd.read_csv(run_dir / "timeline.csv")
    assert main(["merge", str(run_dir), *spans, "-o", str(run_dir / "t.parquet")]) == 0
    columns = schema.SPAN_COLUMNS if spans else schema.COLUMNS
    assert tuple(table.columns) == columns
    assert len(table) == len(distdbg.load(run_dir, spans=bool(spans)))
    assert f"{len(table):,} rows" in capsys.readouterr().out
    assert (run_dir / "t.parquet").read_bytes()[:4] == b"PAR1"


def test_command_says_what_is_wrong(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another ending and a place that can't be written are errors with a next step."""
    train(job(run_dir, 1))
    assert main(["merge", str(run_dir), "-o", "x.txt"]) == 2
    assert main(["merge", str(run_dir), "-o", str(run_dir / "no" / "x.csv")]) == 2
    said = capsys.readouterr().err
    assert "choose one of these endings" in said
    assert "give another place with -o" in said
