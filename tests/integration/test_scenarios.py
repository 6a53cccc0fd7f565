"""Each training job of tests/scenarios under ``distdbg run``: is the verdict what the job really did?"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.scenarios import harness

TRUTH = harness.load_truth()
EVERY = os.environ.get("SCENARIOS") == "all"
NAMES = sorted(name for name, entry in TRUTH.items() if EVERY or not entry.get("extended"))


@pytest.mark.integration
@pytest.mark.parametrize("name", NAMES)
def test_verdict(name: str, tmp_path: Path) -> None:
    """The verdict names kind, rank and every field that truth.json gives, and blames nobody else."""
    truth = harness.truth_of(name)
    code, verdict, stderr = harness.run_scenario(name, tmp_path)
    assert code is not None, f"still running after {harness.LIMIT_S} s\n{stderr[-3000:]}"
    points = harness.score(truth, verdict)
    told = harness.describe(truth, verdict, points) + "\n" + stderr[-3000:]
    assert not points["misled"], told
    assert points["right"], told
    assert all(points["fields"].values()), told
    assert code == 0 or truth["kind"] not in ("healthy", "straggler", "numeric"), told


def test_every_job_has_a_truth() -> None:
    """Scripts and entries of truth.json belong to each other one to one."""
    scripts = {path.stem for path in harness.FOLDER.glob("*.py")} - {"__init__", "common", "harness", "leave_one_out"}
    assert scripts == set(TRUTH)


def test_truth_resolves() -> None:
    """Formulas of rank and step are filled in, also within lists of answers."""
    assert harness.resolve("JOB_RANK", 2, 3) == 2
    assert harness.resolve("3-JOB_RANK", 2, 3) == 1
    assert harness.resolve({"any": ["JOB_STEP-1", "JOB_STEP", "JOB_STEP+2", None]}, 2, 3) == {"any": [2, 3, 5, None]}


def test_score_tells_right_from_exact_and_misled() -> None:
    """A right rank with a wrong node is right but not exact; an innocent rank misleads."""
    truth = {"kind": "died", "culprit": 1, "phase": "backward", "node": "MulBackward0", "module": "head"}
    said = {"rank": 1, "phase": "backward", "node": "MulBackward0", "module": "module.head"}
    assert harness.score(truth, {"kind": "died", "culprits": [said]})["exact"]
    other = harness.score(truth, {"kind": "died", "culprits": [{**said, "node": "AddBackward0"}]})
    assert other["right"]
    assert not other["exact"]
    assert other["fields"]["node"] is False
    assert harness.score(truth, {"kind": "died", "culprits": [{**said, "rank": 0}]})["misled"]
    assert not harness.score(truth, {"kind": "unknown", "culprits": []})["misled"]
    assert not harness.score(truth, None)["right"]


def test_score_counts_a_false_alarm() -> None:
    """A healthy job said to be ill misleads even where no rank is named; unknown does not."""
    truth = {"kind": "healthy", "culprit": None}
    assert harness.score(truth, {"kind": "healthy", "culprits": []})["exact"]
    assert harness.score(truth, {"kind": "stalled", "culprits": []})["misled"]
    assert not harness.score(truth, {"kind": "unknown", "culprits": []})["misled"]
