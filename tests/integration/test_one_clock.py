"""Two hosts whose clocks differ, simulated in two real ranks: their events come in order on one timeline."""

import os
from pathlib import Path

import numpy as np
import pytest

import distdbg
from distdbg.analyze.read import read_run
from tests.integration import jobs

pytestmark = pytest.mark.integration
AHEAD_S, PPM = 5, 50

# Runs in every Python process before anything else: rank 1 is on a host of its own, with a clock of its own.
SITE = f"""
import os, socket, time
if "RANK" in os.environ:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
if os.environ.get("RANK") == "1":
    real, name = time.monotonic_ns, socket.gethostname()
    start = real()

    def shifted():
        now = real()
        return now + {AHEAD_S} * 1_000_000_000 + (now - start) * {PPM} // 1_000_000

    time.monotonic_ns = shifted
    socket.gethostname = lambda: "other-" + name
"""

SCRIPT = """
    dist.init_process_group("gloo")
    x = torch.ones(4)
    end = time.monotonic() + float(sys.argv[1])
    goes_on = torch.ones(1)
    while goes_on.item():
        time.sleep(0.02 * (1 + RANK))  # rank 0 always comes first, and waits
        dist.all_reduce(x)
        goes_on[0] = float(time.monotonic() < end)
        dist.broadcast(goes_on, 0)
    exec(sys.argv[2])
"""


def two_hosts(folder: Path, seconds: float, last: str = "dist.destroy_process_group()") -> jobs.Result:
    (folder / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = jobs.write(folder, SCRIPT)
    return jobs.distdbg(script, args=(str(seconds), last), PYTHONPATH=path)


def test_order_on_one_timeline(tmp_path: Path) -> None:
    """Clocks 5 s and 50 ppm apart: no rank leaves an all_reduce before the other has come, within the bound."""
    result = two_hosts(tmp_path, 12.0)
    assert result.code == 0, result.err
    assert "c10d]" not in result.err  # nothing of the exchange is heard
    run = read_run(result.run)
    bound = max(shard.clock_error_ns or 0 for shard in run.shards)
    assert 0 < bound < 50_000_000
    assert "exchanges" in run.clock_sentence
    events = distdbg.load(result.run)
    calls = events[(events["collective"] == "all_reduce") & (events["event"] == "collective")]
    begins = calls.pivot(index="collective_seq", columns="rank", values="time_unix_ns")
    assert len(begins) > 50
    # Rank 1 comes 20 ms after rank 0, by one and the same clock in truth.
    assert np.mean(begins[1] > begins[0]) > 0.9
    waits = events[(events["event"] == "wait_end")].copy()
    waits["number"] = waits.groupby("rank").cumcount()
    ends = waits[waits["number"] % 2 == 0].pivot(index="number", columns="rank", values="time_unix_ns")
    for one, other in ((0, 1), (1, 0)):
        late = begins[other].to_numpy()[: len(ends)].astype(float) - ends[one].to_numpy()[: len(begins)].astype(float)
        assert late.max() <= bound


def test_a_rank_that_is_killed_leaves_its_exchanges(tmp_path: Path) -> None:
    """The comparison at the start outlasts a SIGKILL, and the verdict says how well times compare."""
    result = two_hosts(tmp_path, 2.0, "os.kill(os.getpid(), 9) if RANK else dist.all_reduce(x)")
    assert result.named == ("died", [1])
    assert any("comparable to within" in text for text in result.verdict["evidence"])
