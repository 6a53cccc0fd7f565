"""Steps, optimizers, data, checkpoints."""

import io
from collections.abc import Callable

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import distdbg

Recording = Callable[[], pd.DataFrame]


class Numbers(Dataset[int]):
    """Six numbers, one of which can't be had."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise KeyError("a hole in the data")
        return index


def model_and_optimizers() -> tuple[nn.Linear, list[torch.optim.Optimizer]]:
    model = nn.Linear(2, 1)
    return model, [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())]


def test_the_first_optimizer_counts_steps(recording: Recording) -> None:
    """Of two optimizers the first to step moves the step on, after its step has ended."""
    model, (first, second) = model_and_optimizers()
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        first.step()
        second.step()
    events = recording()
    optimizer = events[events["event"].isin(["optimizer_begin", "optimizer_end"])]
    assert optimizer["step"].tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert events[events["event"] == "step"]["step"].tolist() == [0, 1, 2]


def test_an_optimizer_within_an_optimizer_counts_once(recording: Recording) -> None:
    """A wrapper that steps another optimizer is one step."""
    model, (inner, _) = model_and_optimizers()

    class Outer(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(model.parameters(), {})

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            inner.step()

    outer = Outer()
    outer.step()
    outer.step()
    assert (recording()["event"] == "step").sum() == 2


def test_an_optimizer_that_raises(recording: Recording) -> None:
    """A step that raises counts for nothing, and the next one is right again."""
    model, _ = model_and_optimizers()

    class Moody(torch.optim.SGD):
        angry = True

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            if self.angry:
                raise ArithmeticError("not today")

    optimizer = Moody(model.parameters(), lr=0.1)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    optimizer.angry = False
    optimizer.step()
    optimizer.step()
    assert (recording()["event"] == "step").sum() == 2


def test_steps_said_by_hand(recording: Recording) -> None:
    """distdbg.step() takes over from the optimizers."""
    _, (optimizer, _) = model_and_optimizers()
    for _ in range(2):
        optimizer.step()
    for _ in range(3):
        distdbg.step()
        optimizer.step()
    assert recording()["step"].max() == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_data_is_bracketed(recording: Recording, workers: int) -> None:
    """Every batch is a begin and an end, the last with the loader's end; forked workers do no harm."""
    assert len(list(DataLoader(Numbers(), batch_size=2, num_workers=workers))) == 3
    events = recording()
    assert (events["event"] == "data_begin").sum() == (events["event"] == "data_end").sum() == 5
    assert events["rank"].nunique() == 1


def test_data_that_fails(recording: Recording) -> None:
    """An error in the dataset is told as raised in loading data."""
    with pytest.raises(KeyError):
        list(DataLoader(Numbers(bad=3), batch_size=2))
    raised = recording().query("event == 'data_raised'")
    assert "a hole in the data" in raised["detail"].iloc[0]


def test_checkpoints_are_bracketed(recording: Recording) -> None:
    """torch.save and torch.load begin and end; a save that fails is told as raised."""
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer)
    buffer.seek(0)
    torch.load(buffer)
    with pytest.raises(AttributeError):
        torch.save(lambda: None, io.BytesIO())
    kinds = [event for event in recording()["event"] if event.startswith("checkpoint")]
    assert kinds == ["checkpoint_begin", "checkpoint_end"] * 2 + ["checkpoint_begin", "checkpoint_raised"]
