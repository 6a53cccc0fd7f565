"""What every test is held to: it leaves no hook, no patch, no thread of ours and no child process behind."""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


def _hooks() -> dict[str, object]:
    """The places in torch where distdbg steps in, as they are now; nothing where torch is not imported."""
    if "torch.distributed" not in sys.modules:
        return {}
    import torch
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    return {
        "engine": torch.autograd.graph._engine_run_backward,
        "forward pre-hooks": list(module._global_forward_pre_hooks),
        "forward hooks": list(module._global_forward_hooks),
        "registration hooks": list(module._global_module_registration_hooks),
        "optimizer hooks": list(optimizer._global_optimizer_pre_hooks),
        "DataLoader": dataloader._BaseDataLoaderIter.__next__,
        "torch.save": torch.save,
        "init_process_group": torch.distributed.init_process_group,
    }


def _children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= set((task / "children").read_text().split())
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a hook, a thread of distdbg or a child process."""
    hooks, children = _hooks(), _children()
    yield
    after = _hooks()
    changed = [name for name in hooks if after[name] != hooks[name]]
    assert not changed, f"left behind in torch: {changed}"
    ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("distdbg")]
    assert not ours, f"threads left behind: {ours}"
    assert _children() <= children, "a child process was left behind"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """An empty run directory."""
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not see the variables of a job that they may run in."""
    for name in list(os.environ):
        if name.startswith(("DISTDBG_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    # Whether a native recorder lies in the user's cache is chance; its own tests ask for it.
    monkeypatch.setenv("DISTDBG_RECORDER", "python")
