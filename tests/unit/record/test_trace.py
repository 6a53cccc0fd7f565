"""One backward, printed as it runs."""

import io
from typing import Any

import pytest
import torch

import distdbg
from tests.unit.record.test_engine import Fails


def test_nodes_are_printed_in_order() -> None:
    """Each node is shown as entered and left, with what it received and returned."""
    x = torch.ones(2, 3, requires_grad=True)
    out = io.StringIO()
    distdbg.trace((x * 2).sum(), file=out)
    lines = out.getvalue().splitlines()
    assert lines[0] == "backward of 3 nodes"
    assert lines[-1] == "done: 3 nodes ran"
    assert "SumBackward0" in lines[1]
    assert "received (float32[])" in lines[1]
    assert "returned (float32[2, 3])" in lines[2]
    assert x.grad is not None


def test_a_failure_names_its_node() -> None:
    """What is raised comes through, after the node it happened in was printed; nothing is left behind."""
    x = torch.ones(2, requires_grad=True)
    out = io.StringIO()
    y = Fails.apply(x).sum()
    with pytest.raises(ValueError, match="no gradient here"):
        distdbg.trace(y, file=out, retain_graph=True)
    assert "! ValueError in FailsBackward: no gradient here" in out.getvalue()
    printed: Any = out.getvalue()
    with pytest.raises(ValueError, match="no gradient here"):
        y.backward()
    assert out.getvalue() == printed
