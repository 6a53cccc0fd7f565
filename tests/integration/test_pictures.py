"""Traces, reports, lanes and comparisons of real small jobs."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from distdbg.analyze.compare import compare
from distdbg.cli import main
from tests.integration import jobs
from tests.unit.export.test_perfetto import check_flows, check_nesting
from tests.unit.report.test_html import Page, sections

pytestmark = pytest.mark.integration

STALL = """
class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0
    @staticmethod
    def backward(ctx, grad):
        while RANK == 1 and step == 3:
            time.sleep(0.1)
        return grad
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.b(Gate.apply(self.a(x)))
dist.init_process_group("gloo")
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

STEPS = """
class Slow(nn.Module):
    def forward(self, x):
        end = time.perf_counter() + float(os.environ["SLOW_MS"]) / 1e3
        while time.perf_counter() < end:
            pass
        return x
dist.init_process_group("gloo")
model = DDP(nn.Sequential(nn.Linear(4, 8), Slow(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def stall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a job whose rank 1 stands in a node of backward."""
    script = jobs.write(tmp_path_factory.mktemp("stall"), STALL)
    done = jobs.distdbg(script, "--stall-timeout", "3", "--on-stall", "kill")
    assert done.named == ("stalled", [1]), done.err[-2000:]
    return done.run


def test_the_trace_of_a_stall(stall: Path, tmp_path: Path) -> None:
    """Spans nest, collectives are joined, the open node is the culprit's, and the marker names it."""
    output = tmp_path / "trace.json"
    assert main(["export", str(stall), "--perfetto", "-o", str(output)]) == 0
    events = json.loads(output.read_text())["traceEvents"]
    check_nesting(events)
    assert check_flows(events) >= 3
    nodes = [e for e in events if e.get("cat") == "node" and e["args"].get("open")]
    assert [(node["pid"], node["name"]) for node in nodes] == [(1, "GateBackward (never left)")]
    marker = next(e for e in events if e.get("cat") == "verdict")
    assert (marker["pid"], marker["args"]["node"]) == (1, "GateBackward")


def test_the_report_of_a_stall(stall: Path, tmp_path: Path) -> None:
    """All pictures of a stall are there; a browser, where there is one, shows them and complains of nothing."""
    output = tmp_path / "report.html"
    assert main(["report", str(stall), "-o", str(output)]) == 0
    page = Page(output.read_text(encoding="utf-8"))
    assert {"lanes", "waits", "model", "evidence", "ranks"} <= sections(page)
    assert "GateBackward" in page.text
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        return
    picture = tmp_path / "report.png"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--window-size=1240,1800", f"--screenshot={picture}", output.as_uri()]
    environ = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)
    assert picture.stat().st_size > 20_000
    assert "CONSOLE" not in done.stderr


def test_the_lanes_of_a_stall(stall: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The culprit's lane ends where it stands, the other's in waiting, all within 80 columns."""
    assert main(["diagnose", str(stall), "--lanes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if re.match(r"[> ] rank \d ", line)]
    assert [row[0] for row in rows] == [" ", ">"]
    assert rows[0].endswith("----")
    assert rows[1].endswith("####")
    assert max(map(len, rows)) <= 80


def test_comparing_two_runs(tmp_path: Path) -> None:
    """A module that takes 40 ms longer in the second run is the largest difference, by about that much."""
    runs = []
    for name, ms in (("before", "5"), ("after", "45")):
        (tmp_path / name).mkdir()
        done = jobs.distdbg(jobs.write(tmp_path / name, STEPS), SLOW_MS=ms)
        assert done.code == 0, done.err[-2000:]
        runs.append(done.run)
    found = compare(*runs)
    place = next(row for row in found.rows if row.what == "place")
    assert (place.phase, place.module, place.beyond_noise) == ("forward", "1", True)
    assert 30 < place.ms < 60
    assert "forward: 1" in found.summary
