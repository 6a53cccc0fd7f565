"""Collectives of a process group of one, whoever issues them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import distdbg


@pytest.fixture
def group(tmp_path: Path, run_dir: Path) -> Iterator[Callable[[], pd.DataFrame]]:
    """A gloo group of one rank, recorded; calling the fixture gives the events."""
    distdbg.start(run_dir)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)

    def events() -> pd.DataFrame:
        distdbg.stop()
        return distdbg.load(run_dir)

    yield events
    distdbg.stop()
    dist.destroy_process_group()


def test_operations_have_one_name_each(group: Callable[[], pd.DataFrame]) -> None:
    """Plain, asynchronous, object and functional calls come with operation, number in the group, bytes and line."""
    x = torch.ones(4)
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    dist.broadcast(x, 0)
    dist.barrier()
    dist.all_gather([torch.empty(4)], x)
    dist.all_gather_single(torch.empty(4), x)
    functional.all_reduce(x, "sum", dist.group.WORLD).sum()
    dist.all_gather_object([None], {"a": 1})
    events = group()
    calls = events[events["event"] == "collective"]
    names = calls["collective"].tolist()
    assert names[:7] == ["all_reduce"] * 2 + ["broadcast", "barrier", "all_gather", "all_gather", "all_reduce"]
    assert set(names[7:]) == {"all_gather"}
    assert calls["collective_seq"].tolist() == list(range(1, len(calls) + 1))
    assert set(calls["group"]) == {"default_pg"}
    assert calls["bytes"].tolist()[:4] == [16, 16, 16, 0]
    assert "test_collectives.py" in calls["detail"].iloc[0]
    assert (events["event"] == "wait_begin").sum() == (events["event"] == "wait_end").sum() > 0


def test_ddp_is_seen_too(group: Callable[[], pd.DataFrame]) -> None:
    """What DDP's reducer issues in C++ is there, within backward."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    calls = group().query("event == 'collective' and phase == 'backward'")
    assert calls["collective"].tolist() == ["all_reduce"]
    assert calls["bytes"].tolist() == [32]
    assert "by DDP" in calls["detail"].iloc[0]


def test_a_call_that_fails_ends_as_raised(group: Callable[[], pd.DataFrame]) -> None:
    """An error in the backend is the user's, unchanged, and the call is not left open."""
    with pytest.raises(RuntimeError):
        dist.all_gather([torch.empty(3)], torch.ones(4))
    dist.all_reduce(torch.ones(1))
    events = group()
    kinds = events[events["event"].isin(["collective", "collective_end", "call_raised"])]["event"].tolist()
    assert kinds == ["collective", "call_raised", "collective", "collective_end"]


def test_groups_begin_and_are_named(group: Callable[[], pd.DataFrame]) -> None:
    """Making a group is bracketed, and its calls are counted on their own."""
    sub = dist.new_group([0], group_desc="mine")
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=sub)
    events = group()
    calls = events[events["event"] == "collective"]
    assert calls["collective_seq"].tolist() == [1, 1]
    assert calls["group"].tolist()[1].startswith("mine")
    assert {"init_process_group", "new_group"} <= set(events[events["event"] == "setup_begin"]["detail"])


def test_after_stop_nothing_is_in_the_way(group: Callable[[], pd.DataFrame]) -> None:
    """Collectives work as before once recording has stopped."""
    group()
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [1, 1]
