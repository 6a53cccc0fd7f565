"""Following a live shard."""

from pathlib import Path

from distdbg.schema import EventKind as K
from distdbg.shard import ShardWriter
from distdbg.tail import Tail
from tests.unit.shards import SECOND, Rank, identity
from tests.unit.test_shard import SMALL


def test_progress_phase_and_counts(run_dir: Path) -> None:
    """Events are progress, beats are not; phase, steps and calls are kept as they come."""
    rank = Rank(run_dir, 0, 1)
    tail = Tail(rank.writer.folder)
    assert tail.poll()
    assert not tail.poll()
    rank.beat()
    assert not tail.poll()
    rank.event(K.FORWARD_BEGIN, module=1, a=1)
    assert tail.poll()
    assert (tail.phase, tail.called) == ("forward", False)
    rank.event(K.COLLECTIVE)
    assert tail.poll()
    assert (tail.called, tail.collectives) == (True, 1)
    rank.event(K.COLLECTIVE_END).event(K.FORWARD_END).step()
    assert tail.poll()
    assert (tail.phase, tail.steps, tail.exited) == ("loop", 1, False)
    rank.leave()
    assert tail.poll()
    assert tail.exited
    tail.close()


def test_segments_in_turn_and_deleted_ones(run_dir: Path) -> None:
    """A tail goes from segment to segment, and past those the writer has deleted."""
    writer = ShardWriter(run_dir, identity(), {}, segment_bytes=SMALL, keep_bytes=2 * SMALL)
    tail = Tail(writer.folder)
    writer.emit(K.STEP)
    assert tail.poll()
    for _ in range(64):
        writer.emit(K.STEP)
        writer.maintain()
    assert tail.poll()
    writer.emit(K.STEP)
    assert tail.poll()
    assert not tail.poll()
    tail.close()


def test_a_folder_without_segments(tmp_path: Path) -> None:
    """A rank that has not begun to record makes no progress."""
    assert not Tail(tmp_path).poll()


def test_circling_in_one_forward_is_overdue(run_dir: Path) -> None:
    """Events within one forward that takes ten times as long as any before it are no progress for ever."""
    rank = Rank(run_dir, 0, 1)
    tail = Tail(rank.writer.folder)
    for _ in range(3):
        rank.event(K.FORWARD_BEGIN, a=1).sleep(0.1).event(K.FORWARD_END)
    rank.event(K.FORWARD_BEGIN, a=1).sleep(5).event(K.FORWARD_BEGIN, a=2).event(K.FORWARD_END)
    tail.poll()
    assert not tail.overdue(rank.now, 8)
    assert tail.overdue(rank.now + 4 * SECOND, 8)
    rank.event(K.FORWARD_END)
    tail.poll()
    assert not tail.overdue(rank.now + 100 * SECOND, 8)
    tail.close()


def test_a_slot_that_is_never_filled(run_dir: Path) -> None:
    """An empty slot is waited for once, since a thread may be about to fill it, and then passed over."""
    writer = ShardWriter(run_dir, identity(), {})
    tail = Tail(writer.folder)
    writer.emit(K.STEP)
    assert writer._segment is not None
    writer._segment[1]()
    writer.emit(K.STEP)
    assert tail.poll()
    assert tail.steps == 1
    assert tail.poll()
    assert tail.steps == 2
    assert not tail.poll()
    tail.close()
