"""The trace for Perfetto: valid, nested, with flows that pair up, in bounded memory."""

import gzip
import json
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic import write_run
from distdbg.cli import main
from distdbg.errors import DistdbgError, RunDirError
from distdbg.export.perfetto import parse_ranks, parse_steps, write_perfetto
from distdbg.schema import EventKind as K
from tests.unit.shards import UNIX, job, train


def exported(run_dir: Path, tmp_path: Path, **options: Any) -> dict[str, Any]:
    path = tmp_path / "trace.json"
    write_perfetto(run_dir, path, **options)
    return dict(json.loads(path.read_text()))


def ns(us: float) -> int:
    return round(us * 1000)


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Spans of a thread are disjoint or one holds the other."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])))
    for spans in threads.values():
        stack: list[tuple[int, int]] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1][1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1][1], f"{(begin, end)} reaches out of {stack[-1]}"
            stack.append((begin, end))


def check_flows(events: list[dict[str, Any]]) -> int:
    """Each flow begins once, ends once, in order of time, within spans of collectives; returns their number."""
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["cat"] == "collective":
            spans[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])))
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
            at = ns(event["ts"])
            assert any(begin <= at <= end for begin, end in spans[event["pid"], event["tid"]])
    for parts in flows.values():
        assert [part["ph"] for part in parts] == ["s", *"t" * (len(parts) - 2), "f"]
        assert [part["ts"] for part in parts] == sorted(part["ts"] for part in parts)
        assert len({part["pid"] for part in parts}) == len(parts)
    return len(flows)


def test_spans_nest_and_flows_pair_up(run_dir: Path, tmp_path: Path) -> None:
    """A run of three ranks: every begin has its end, spans nest, each collective is one flow over all ranks."""
    ranks = job(run_dir, 3)
    train(ranks, steps=4)
    trace = exported(run_dir, tmp_path)
    events = trace["traceEvents"]
    check_nesting(events)
    assert check_flows(events) == 4
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}
    assert {event["pid"] for event in events} == {0, 1, 2}
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"forward", "backward", "node", "collective", "step"}
    assert not any("open" in event["args"] for event in spans)
    node = next(event for event in spans if event["name"] == "AddmmBackward0")
    assert node["args"]["module"] == "layer"


def test_the_head_is_as_kineto_writes_it(run_dir: Path, tmp_path: Path) -> None:
    """Base time and distributedInfo are there, and base plus ts is unix time."""
    job(run_dir, 2)[1].forward("layer")
    trace = exported(run_dir, tmp_path)
    assert trace["distributedInfo"] == {"backend": "unknown", "rank": 0, "world_size": 2}
    span = next(event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"] == "layer")
    assert trace["baseTimeNanoseconds"] + ns(span["ts"]) == UNIX + 2_000


def test_an_open_node_and_the_culprit_are_marked(run_dir: Path, tmp_path: Path) -> None:
    """What was never left reaches to the last sign of life and says so; the verdict marks its rank."""
    ranks = job(run_dir, 2)
    train(ranks)
    ranks[1].backward("MulBackward0", module="net.gate", leave=False).sleep(5).beat()
    verdict = {"kind": "stalled", "summary": "rank 1 stands", "cause": "", "confidence": 0.9,
               "culprits": [{"rank": 1, "step": 3, "node": "MulBackward0"}]}  # fmt: skip
    events = exported(run_dir, tmp_path, verdict=verdict)["traceEvents"]
    check_nesting(events)
    still = {event["cat"]: event for event in events if event.get("args", {}).get("open")}
    assert set(still) == {"node", "backward"}
    assert still["node"]["name"] == "MulBackward0 (never left)"
    assert still["node"]["dur"] == pytest.approx(5e6, rel=1e-3)
    marker = next(event for event in events if event.get("cat") == "verdict")
    assert (marker["ph"], marker["pid"], marker["args"]["node"]) == ("i", 1, "MulBackward0")
    assert marker["ts"] == still["node"]["ts"]


def test_a_call_without_its_peers_is_no_flow(run_dir: Path, tmp_path: Path) -> None:
    """A collective that only one rank issued joins nothing."""
    ranks = job(run_dir, 2)
    train(ranks, steps=1)
    ranks[0].call("barrier")
    assert check_flows(exported(run_dir, tmp_path)["traceEvents"]) == 1


def test_ranks_and_steps_can_be_chosen(run_dir: Path, tmp_path: Path) -> None:
    """Only what was asked for is written, and flows still pair up."""
    ranks = job(run_dir, 3)
    train(ranks, steps=5)
    events = exported(run_dir, tmp_path, ranks={0, 2}, steps=range(1, 3))["traceEvents"]
    assert {event["pid"] for event in events} == {0, 2}
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {1, 2}
    assert check_flows(events) == 2
    with pytest.raises(RunDirError, match="it has 0, 1, 2"):
        write_perfetto(run_dir, tmp_path / "x.json", ranks={9})


def test_what_to_choose_is_parsed() -> None:
    """Lists and ranges of ranks, slices of steps; what is neither is refused in words."""
    assert parse_ranks("0,4-6") == {0, 4, 5, 6}
    assert parse_steps("10:20") == range(10, 20)
    assert parse_steps("7") == range(7, 8)
    assert parse_steps(":3") == range(3)
    for text in ("a", "5:2", "1:x"):
        with pytest.raises(DistdbgError, match="--steps"):
            parse_steps(text)
    with pytest.raises(DistdbgError, match="--ranks"):
        parse_ranks("one")


def test_names_of_any_kind_stay_json(run_dir: Path, tmp_path: Path) -> None:
    """Quotes, control characters and markup in names do not break the file."""
    rank = job(run_dir, 1)[0]
    hostile = 'a"b\\c\n</script>\u2028'
    rank.forward(hostile)
    rank.event(K.FORWARD_BEGIN, module=rank.module(hostile))
    events = exported(run_dir, tmp_path)["traceEvents"]
    assert {e["name"] for e in events if e.get("cat") == "forward"} == {hostile, hostile + " (never left)"}


def test_raised_calls_and_missing_ends_keep_nesting(run_dir: Path, tmp_path: Path) -> None:
    """A call that raised ends its span; what it left open ends with what is around it."""
    rank = job(run_dir, 1)[0]
    rank.event(K.BACKWARD_BEGIN, seq=0).event(K.PREHOOK, rank.writer.intern("node", "N"), 0, 0, 0).wait()
    rank.event(K.BACKWARD_RAISED, rank.writer.intern("error", "E: x"), seq=0).forward("layer").wait().event(
        K.CALL_RAISED
    ).event(K.WAIT_END)
    events = exported(run_dir, tmp_path)["traceEvents"]
    check_nesting(events)
    assert sorted(e["cat"] for e in events if e.get("args", {}).get("open")) == ["node", "wait"]
    assert next(e for e in events if e.get("cat") == "backward")["args"]["raised"] == "E: x"


def test_damaged_shards_are_told_and_the_rest_is_written(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A foreign segment, a shard without meta.json and odd names are left out in words; the others are exported."""
    ranks = job(run_dir, 4)
    train(ranks)
    folders = [rank.writer.folder for rank in ranks]
    (folders[0] / "seg-000000.dds").write_bytes(b"not ours" * 1000)
    (folders[1] / "meta.json").unlink()
    names = folders[2] / "names.jsonl"
    names.write_text("torn\n" + names.read_text().replace('"ranks": [0, 1, 2, 3]', '"ranks": 7'))
    (run_dir / "verdict.json").write_text('{"schema": "distdbg.verdict/1", "culprits": [3, {"rank": 3, "step": "x"}]}')
    output = tmp_path / "trace.json"
    assert main(["export", str(run_dir), "--perfetto", "-o", str(output)]) == 0
    said = capsys.readouterr()
    assert "is not a segment of distdbg" in said.err
    assert "no meta.json" in said.err
    events = json.loads(output.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {2, 3}
    assert sum(event.get("cat") == "verdict" for event in events) == 1
    assert main(["export", str(tmp_path / "none"), "--perfetto"]) == 2
    assert main(["export", str(tmp_path), "--perfetto"]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_gzipped_file_and_no_leftovers(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes .json.gz with the verdict marked; a folder that is not there is told, and nothing is left."""
    train(job(run_dir, 2))
    output = tmp_path / "trace.json.gz"
    assert main(["export", str(run_dir), "--perfetto", "-o", str(output)]) == 0
    assert "3 flows" in capsys.readouterr().out
    with gzip.open(output, "rt") as file:
        assert check_flows(json.load(file)["traceEvents"]) == 3
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ""] == ["trace.json.gz"]
    assert main(["export", str(run_dir), "--perfetto", "-o", str(tmp_path / "no" / "trace.json")]) == 2
    assert "give another place with -o" in capsys.readouterr().err


def test_memory_is_bounded_by_a_segment(tmp_path: Path) -> None:
    """Ten times the events in as many segments take no more than a few more bytes a collective."""
    peaks = []
    for steps in (400, 4000):
        run_dir = tmp_path / f"run{steps}"
        write_run(run_dir, ranks=1, steps=steps)
        write_perfetto(run_dir, tmp_path / "warm.json", steps=range(1))
        tracemalloc.start()
        write_perfetto(run_dir, tmp_path / "trace.json", steps=range(1))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 4 * peaks[0] + 8_000_000
