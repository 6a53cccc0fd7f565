"""The writer: what it stores, how it rotates, and how it gives up."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from distdbg import schema
from distdbg.analyze.read import read_run
from distdbg.errors import RecordingError
from distdbg.schema import EventKind as K
from distdbg.shard import ShardWriter
from tests.unit.shards import identity

SMALL = schema.SEGMENT_HEADER_SIZE + 10 * schema.RECORD_SIZE


def test_events_and_names_come_back(run_dir: Path) -> None:
    """What is emitted is read again, with names by their ids."""
    writer = ShardWriter(run_dir, identity(), {})
    name = writer.intern("node", "AddBackward0")
    writer.step = 4
    writer.emit(K.PREHOOK, name, 0, 7, -1, 1 << 40)
    (shard,) = read_run(run_dir).shards
    assert shard.records[["seq", "a", "b", "step", "kind"]].tolist() == [(7, -1, 1 << 40, 4, K.PREHOOK)]
    assert shard.names[name] is not None
    assert shard.names[name].text == "AddBackward0"
    assert writer.intern("node", "AddBackward0") == name


def test_rotation_keeps_everything_or_the_newest(run_dir: Path) -> None:
    """Segments follow each other; with a bound the oldest go and the newest stay."""
    everything = ShardWriter(run_dir, identity(0, 2), {}, segment_bytes=SMALL, keep_bytes=None)
    bounded = ShardWriter(run_dir, identity(1, 2), {}, segment_bytes=SMALL, keep_bytes=3 * SMALL)
    for number in range(95):
        everything.emit(K.STEP, seq=number)
        bounded.emit(K.STEP, seq=number)
        bounded.maintain()
    first, second = read_run(run_dir).shards
    assert first.records["seq"].tolist() == list(range(95))
    kept = second.records["seq"].tolist()
    assert kept == list(range(kept[0], 95))
    assert 10 <= len(kept) <= 40
    assert everything.position() == 95


def test_threads_lose_nothing(run_dir: Path) -> None:
    """Several threads write over rotations and every event arrives once, with its thread's number."""
    writer = ShardWriter(run_dir, identity(), {}, segment_bytes=SMALL, keep_bytes=None)

    def work(base: int) -> None:
        for number in range(200):
            writer.emit(K.STEP, seq=base + number)

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = read_run(run_dir).shards[0].records
    assert sorted(records["seq"].tolist()) == sorted(1000 * i + n for i in range(4) for n in range(200))
    assert 0 not in records["thread"]  # that is the main thread


def test_a_full_disk_stops_recording_with_one_line(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When no segment can be made, events are counted as lost and training hears of it once."""
    writer = ShardWriter(run_dir, identity(3, 4), {}, segment_bytes=SMALL)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(30):
        writer.emit(K.STEP)
    writer.maintain()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "rank 3" in said
    assert "no space left" in said
    assert writer.lost == 20
    run = read_run(run_dir)
    assert [int(kind) for kind in run.shards[0].records["kind"]] == [K.STEP] * 10 + [K.STOP]
    writer.emit(K.EXIT)  # how the rank ended is told all the same
    assert int(read_run(run_dir).shards[0].records["kind"][-1]) == K.EXIT
    assert any("no space left" in problem for problem in run.problems)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """Recording into something that is no directory is a RecordingError that names the rank and the next step."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError, match=r"rank 1 .*choose another place"):
        ShardWriter(tmp_path / "file", identity(1, 2), {})


def test_two_writers_never_share_a_folder(run_dir: Path) -> None:
    """A second writer of the same rank, attempt and process is refused."""
    ShardWriter(run_dir, identity(), {})
    with pytest.raises(RecordingError):
        ShardWriter(run_dir, identity(), {})


def test_disabled_and_closed_writers_write_nothing(run_dir: Path) -> None:
    """After disable() or close() events go nowhere, and an unused segment is removed."""
    writer = ShardWriter(run_dir, identity(), {}, segment_bytes=SMALL)
    writer.maintain()
    assert len(list(writer.folder.glob("seg-*"))) == 2
    writer.emit(K.STEP)
    writer.close()
    writer.emit(K.STEP)
    writer.disable()
    writer.emit(K.STEP)
    assert len(list(writer.folder.glob("seg-*"))) == 1
    assert len(read_run(run_dir).shards[0].records) == 1


def test_meta_is_replaced_whole(run_dir: Path) -> None:
    """The rank that the process group tells replaces the one of the environment."""
    writer = ShardWriter(run_dir, identity(0, 1), {"argv": ["x"]})
    writer.write_meta({"rank": 5, "world_size": 6})
    meta = json.loads((writer.folder / schema.META_FILE).read_text())
    assert (meta["rank"], meta["world_size"], meta["argv"]) == (5, 6, ["x"])
    writer.emit(K.START)
    assert read_run(run_dir).shards[0].rank == 5
