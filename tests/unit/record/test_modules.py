"""Modules: their names, their forwards, and the nodes that belong to them."""

from collections.abc import Callable

import pandas as pd
import pytest
import torch
from torch import nn

Recording = Callable[[], pd.DataFrame]


class Branch(nn.Module):
    """A module with a submodule and a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sin() * 2


class Fussy(nn.Module):
    """Raises for negative input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x < 0).any():
            raise ValueError("negative")
        return x


def test_nodes_belong_to_the_innermost_module(recording: Recording) -> None:
    """A node made in a submodule is the submodule's, one made around it is the outer's."""
    model = nn.Sequential(Branch(), nn.Tanh())
    model(torch.ones(2, 3)).sum().backward()
    nodes = recording().query("event == 'prehook'").set_index("node")["module"]
    assert nodes["TanhBackward0"] == "1"
    assert nodes["SinBackward0"] == "0"
    assert nodes["MulBackward0"] == "0"
    assert nodes["AddmmBackward0"] == "0.inner"
    assert pd.isna(nodes["SumBackward0"])


def test_parameters_have_names(recording: Recording) -> None:
    """AccumulateGrad carries its parameter's name and module."""
    model = nn.Sequential(Branch())
    model(torch.ones(2, 3)).sum().backward()
    leaves = recording().query("event == 'posthook' and node == 'AccumulateGrad'")
    assert sorted(leaves["parameter"]) == ["0.inner.bias", "0.inner.weight"]
    assert set(leaves["module"]) == {"0.inner"}


def test_wrappers_are_no_part_of_a_name(recording: Recording) -> None:
    """DataParallel-like and checkpoint wrappers of torch's are left out; a user's own `module` is not."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped = nn.DataParallel(
        nn.Sequential(checkpoint_wrapper(Branch()), nn.ModuleDict({"module": nn.Identity()})["module"])
    )
    wrapped(torch.ones(2, 3)).sum().backward()
    modules = set(recording()["module"].dropna())
    assert "0.inner" in modules
    assert not any("module." in name or "_checkpoint" in name for name in modules)


def test_a_submodule_called_alone_has_its_full_name(recording: Recording) -> None:
    """A model whose own forward is never called still gives its parts their names."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(3, 3))
            self.decoder = nn.Linear(3, 3)

    model = Both()
    model.decoder(model.encoder(torch.ones(1, 3)))
    begun = recording().query("event == 'forward_begin'")["module"].tolist()
    assert begun == ["encoder", "encoder.0", "decoder"]


def test_a_replaced_module_gets_its_place(recording: Recording) -> None:
    """A module put into a model after it has run is named by its new place."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity())
    model(torch.ones(1, 3))
    model[1] = Branch()
    model(torch.ones(1, 3))
    assert "1.inner" in recording()["module"].tolist()


def test_a_raise_is_told_from_an_end(recording: Recording) -> None:
    """A forward that raises ends as raised in every module it leaves, also within the user's own except block."""
    model = nn.Sequential(nn.Identity(), Fussy())
    try:
        raise KeyError("earlier")
    except KeyError:
        model(torch.ones(2))
        with pytest.raises(ValueError, match="negative"):
            model(-torch.ones(2))
    model(torch.ones(2))
    events = recording()
    raised = events[events["event"] == "forward_raised"]
    assert raised["detail"].tolist() == ["ValueError: negative"] * 2
    assert raised["module"].tolist()[0] == "1"
    assert (events["event"] == "forward_begin").sum() == 9
    assert (events["event"] == "forward_end").sum() == 7


def test_compiled_models_run_and_are_seen_from_outside(recording: Recording) -> None:
    """torch.compile traces past our hooks without a graph break; the call of the whole is seen."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(torch.ones(2, 3)).sum().backward()
    events = recording()
    assert (events["event"] == "forward_begin").sum() >= 1
    assert (events["event"] == "prehook").sum() > 3
