"""What DDP is about to replicate is noted before DDP looks at it."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Recording = Callable[[], pd.DataFrame]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(os.fspath(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_parameters_are_listed_at_construction(group: None, recording: Recording, run_dir: Path) -> None:
    """Names, shapes and dtypes of what is trained, without what is frozen or left out; the method is put back."""
    wrapped = DistributedDataParallel.__dict__["_build_params_for_reducer"]
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))
    model[1].requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    DistributedDataParallel(model)
    events = recording()
    (row,) = events[events["event"] == "replicate"].to_dict("records")
    assert row["detail"] == "DistributedDataParallel of Sequential (wrapper 0)"
    (names,) = run_dir.glob("ranks/*/names.jsonl")
    lines = [json.loads(line) for line in names.read_text().splitlines()]
    (about,) = [extra for _, _, text, extra in lines if text == row["detail"]]
    assert about["ranks"] == [0]
    assert about["parameters"] == [
        ["0.weight", [3, 2], "float32"], ["0.bias", [3], "float32"], ["2.weight", [1, 1], "float32"],
    ]  # fmt: skip
    assert DistributedDataParallel.__dict__["_build_params_for_reducer"] is wrapped.__wrapped__
