"""Reading a run directory: what can be read is read, the rest is told with file, rank and next step."""

import json
from pathlib import Path

import pytest

from distdbg import schema
from distdbg.analyze.read import read_run
from distdbg.analyze.verdict import diagnose
from distdbg.errors import RunDirError, ShardError
from distdbg.schema import EventKind as K
from tests.unit.shards import Rank, job, launcher, train


def segment(rank: Rank) -> Path:
    return rank.writer.folder / schema.SEGMENT_PATTERN.format(0)


def test_no_folder_no_run_no_shard(tmp_path: Path, run_dir: Path) -> None:
    """A missing folder, an empty one and one without shards are each told apart."""
    with pytest.raises(RunDirError, match="not a directory"):
        read_run(tmp_path / "nothing")
    with pytest.raises(RunDirError, match="holds no run"):
        read_run(run_dir)
    launcher(run_dir, {"event": "launch"})
    with pytest.raises(RunDirError, match="before any rank began to record"):
        read_run(run_dir)


def test_a_torn_last_record_is_skipped(run_dir: Path) -> None:
    """A record without its kind was not committed; those around it count."""
    (rank,) = job(run_dir, 1)
    rank.event(K.STEP, seq=1).event(K.STEP, seq=2).event(K.STEP, seq=3)
    with open(segment(rank), "r+b") as file:
        file.seek(schema.SEGMENT_HEADER_SIZE + 3 * schema.RECORD_SIZE - 2)
        file.write(b"\0\0")  # the kind of the third record (START, 1, 2)
    assert read_run(run_dir).shards[0].records["seq"].tolist() == [0, 1, 3]


def test_a_file_cut_short_is_read_to_its_end(run_dir: Path) -> None:
    """A truncated segment gives its whole records."""
    (rank,) = job(run_dir, 1)
    rank.event(K.STEP, seq=1).event(K.STEP, seq=2)
    with open(segment(rank), "r+b") as file:
        file.truncate(schema.SEGMENT_HEADER_SIZE + 2 * schema.RECORD_SIZE + 17)
    assert read_run(run_dir).shards[0].records["seq"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"PK\x03\x04" + b"\0" * 5000, "not a segment of distdbg"),
        (b"", "truncated"),
        (
            schema.SEGMENT_HEADER.pack(schema.MAGIC, schema.SCHEMA_VERSION + 1, 4096, 48, 10, 0, 0) + b"\0" * 5000,
            "newer distdbg .*upgrade",
        ),
        (schema.SEGMENT_HEADER.pack(schema.MAGIC, schema.SCHEMA_VERSION, 4096, 64, 10, 0, 0), "another record layout"),
    ],
)
def test_foreign_newer_and_empty_segments(run_dir: Path, head: bytes, words: str) -> None:
    """A segment that can't be read is named with the reason, and the other ranks are still there."""
    first, second = job(run_dir, 2)
    first.step()
    segment(second).write_bytes(head)
    run = read_run(run_dir)
    assert [shard.rank for shard in run.shards] == [0]
    assert any(__import__("re").search(words, problem) and "rank00001" in problem for problem in run.problems)
    segment(first).write_bytes(head)
    with pytest.raises(ShardError):
        read_run(run_dir)


def test_names_table_torn_or_gone(run_dir: Path) -> None:
    """A torn last line costs one name and no word; nonsense and a missing table are told."""
    (rank,) = job(run_dir, 1)
    rank.backward("AddBackward0")
    table = rank.writer.folder / schema.NAMES_FILE
    table.write_text(table.read_text() + '[99, "node", "Torn')
    assert not read_run(run_dir).problems
    table.write_text('{"not": "a list"}\nnonsense\n["x", "node", 3, null]\n')
    assert any("3 lines cannot be read" in problem for problem in read_run(run_dir).problems)
    table.unlink()
    assert any("names.jsonl is missing" in problem for problem in read_run(run_dir).problems)
    diagnose(run_dir)


def test_meta_torn(run_dir: Path) -> None:
    """Without meta.json the segment's header tells who wrote it."""
    (rank,) = job(run_dir, 1)
    (rank.writer.folder / schema.META_FILE).write_text('{"rank": ')
    run = read_run(run_dir)
    assert (run.shards[0].rank, run.shards[0].host) == (0, "host")
    assert any("meta.json" in problem for problem in run.problems)


def test_mixed_runs_are_told(run_dir: Path) -> None:
    """Shards of two runs in one folder are a problem that says so."""
    Rank(run_dir, 0, 2, run_id="a")
    Rank(run_dir, 1, 2, run_id="b")
    assert any("mixes shards of several runs (a, b)" in problem for problem in read_run(run_dir).problems)


def test_unknown_kinds_and_evidence_files(run_dir: Path) -> None:
    """Events of a kind this version does not know are left out; broken evidence is told, deep JSON too."""
    (rank,) = job(run_dir, 1)
    rank.event(K.STEP)
    rank.writer.emit(999)
    (rank.writer.folder / schema.STACKS_FILE).write_text("[" * 100_000)
    (rank.writer.folder / schema.EXCEPTION_FILE).write_text("[1]")
    run = read_run(run_dir)
    assert len(run.shards[0].records) == 2
    assert sum("unknown kinds" in p or "stacks.json" in p or "exception.json" in p for p in run.problems) == 3


def test_launcher_lines_are_sorted_and_checked(run_dir: Path) -> None:
    """The launchers' events come in order of time; a torn last line is no word worth."""
    job(run_dir, 1)
    lines = [json.dumps({"event": "b", "t_unix_ns": 2}), "nonsense", json.dumps({"event": "a", "t_unix_ns": 1}), '{"ev']
    (run_dir / "launcher-x-1.jsonl").write_text("\n".join(lines))
    run = read_run(run_dir)
    assert [event["event"] for event in run.launcher] == ["a", "b"]
    assert sum("not JSON" in problem for problem in run.problems) == 1


def test_a_live_shard_can_be_read(run_dir: Path) -> None:
    """Reading while the writer goes on gives what was there, and more the next time."""
    (rank,) = job(run_dir, 1)
    before = len(read_run(run_dir).shards[0].records)
    rank.step().step()
    assert len(read_run(run_dir).shards[0].records) == before + 2


def test_missing_rank_is_in_the_verdict(run_dir: Path) -> None:
    """A rank without a shard is named as missing, and the rest is not blamed for it."""
    for number in (0, 2):
        train([Rank(run_dir, number, 3)])
    verdict = diagnose(run_dir)
    assert verdict["missing_ranks"] == [1]
    assert verdict["kind"] == "unknown"
    assert verdict["culprits"] == []
