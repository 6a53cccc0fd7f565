"""Runs the training jobs of this folder under ``distdbg run`` and scores the verdicts.

    python -m tests.scenarios.harness --out DIR [--kind KIND ...] [--only NAME ...] [--seed N] [-j 1]

A job knows of no debugger. Which rank misbehaves and when comes to it through JOB_RANK and JOB_STEP; what
it does then is told in truth.json. One entry a job:

nproc       number of ranks
kind        as in verdict.json
culprit     "JOB_RANK" or null; where a list, these ranks
phase, node, module, step, collective
            as in verdict.json; null is not checked, {"any": [...]} where several answers are right
rank, at    defaults of JOB_RANK and JOB_STEP
ranks       which ranks JOB_RANK may be (any where there is no such field)
steps       first and last value of JOB_STEP
extended    true for a job like others of its kind: run with SCENARIOS=all only (`make scenarios`)
cause, note for the reader
plain       what plain torchrun shows
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
FIELDS = ("phase", "node", "module", "step", "collective")
MARKER = "SCENARIO_RUN_ID"
LIMIT_S = 60.0
_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")
_FORMULA = re.compile(r"(?:(\d+)-)?JOB_(RANK|STEP)(?:([+-])(\d+))?")


def load_truth() -> dict[str, dict[str, Any]]:
    """All entries of truth.json, by the name of the job."""
    entries: dict[str, dict[str, Any]] = json.loads((FOLDER / "truth.json").read_text(encoding="utf-8"))
    return entries


def resolve(value: Any, rank: int, step: int) -> Any:
    """``value`` with JOB_RANK, JOB_STEP and sums of these filled in, in lists and dicts too."""
    if isinstance(value, list):
        return [resolve(one, rank, step) for one in value]
    if isinstance(value, dict):
        return {key: resolve(one, rank, step) for key, one in value.items()}
    match = _FORMULA.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    minuend, what, sign, addend = match.groups()
    number = rank if what == "RANK" else step
    if minuend is not None:
        number = int(minuend) - number
    return number + int(f"{sign or '+'}{addend or 0}")


def draw(entry: dict[str, Any], rng: random.Random) -> tuple[int, int]:
    """A rank and a step that the entry allows."""
    rank = rng.choice(entry.get("ranks") or range(entry["nproc"]))
    return rank, rng.randint(*entry["steps"])


def truth_of(name: str, rank: int | None = None, step: int | None = None) -> dict[str, Any]:
    """The entry of a job for this rank and step (or its defaults), all formulas filled in."""
    entry = load_truth()[name]
    rank = entry["rank"] if rank is None else rank
    step = entry["at"] if step is None else step
    return {**entry, **{key: resolve(entry[key], rank, step) for key in ("culprit", *FIELDS)}, "rank": rank, "at": step}


def _processes(run_id: str) -> list[int]:
    """Processes, other than this one, whose environment carries the mark of this run."""
    mark, found = f"{MARKER}={run_id}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                pass  # it has ended, or belongs to somebody else
    return found


def _sweep(run_id: str) -> int:
    """Kill what is left of a run: also what is stopped or in a session of its own. Returns how many there were."""
    killed: set[int] = set()
    for _ in range(20):
        alive = _processes(run_id)
        if not alive:
            break
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
    return len(killed)


def run_scenario(
    name: str,
    tmp_path: Path,
    rank: int | None = None,
    step: int | None = None,
    stall_timeout: float = 6,
    numerics: bool = True,
    limit_s: float = LIMIT_S,
) -> tuple[int | None, dict[str, Any] | None, str]:
    """Run one job under ``distdbg run`` in ``tmp_path``.

    Returns the exit code (None: still running after ``limit_s`` seconds and killed), what verdict.json holds
    (None: there is none that can be read) and the text on stderr. No process of the run is left behind.
    """
    truth = truth_of(name, rank, step)
    tmp_path.mkdir(parents=True, exist_ok=True)
    run_dir, run_id = tmp_path / "run", uuid.uuid4().hex
    command = [sys.executable, "-m", "distdbg", "run", "--run-dir", str(run_dir)]
    command += ["--stall-timeout", str(stall_timeout), "--on-stall", "kill", *(["--numerics"] if numerics else [])]
    command += ["--standalone", "--nproc-per-node", str(truth["nproc"]), str(FOLDER / f"{name}.py")]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARKER: run_id}
    environment.update(JOB_RANK=str(truth["rank"]), JOB_STEP=str(truth["at"]))
    code: int | None = None
    with open(tmp_path / "stdout.txt", "wb") as out, open(tmp_path / "stderr.txt", "wb") as err:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _sweep(run_id)
            if process.poll() is None:
                process.kill()
            process.wait()
    return code, _read_verdict(run_dir / "verdict.json"), (tmp_path / "stderr.txt").read_text("utf-8", "replace")


def _read_verdict(path: Path) -> dict[str, Any] | None:
    try:
        verdict = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return verdict if isinstance(verdict, dict) else None


def _plain(value: Any) -> Any:
    """A module's name as the user's model has it, without what wrappers put in front."""
    return _WRAPPERS.sub("", value).lstrip(".") if isinstance(value, str) else value


def _accepts(expected: Any, said: list[Any], is_module: bool) -> bool:
    answers = expected["any"] if isinstance(expected, dict) else [expected]
    if is_module:
        answers, said = [_plain(one) for one in answers], [_plain(one) for one in said]
    return bool(said) and all(any(one == answer for answer in answers) for one in said)


def score(truth: dict[str, Any], verdict: dict[str, Any] | None) -> dict[str, Any]:
    """Compare a verdict with a truth whose formulas are filled in (``truth_of``).

    right   kind and exactly the culprit ranks agree; for a healthy job: healthy, and nobody named
    exact   right, and every field that the truth gives agrees
    misled  an innocent rank is named, or a healthy job is said to be ill (unknown does not count)
    fields  field -> agrees, for those that the truth gives
    """
    if verdict is None:
        return {"right": False, "exact": False, "misled": False, "fields": {}, "kind": None, "named": []}
    culprits = [one for one in verdict.get("culprits") or [] if isinstance(one, dict)]
    named = {one["rank"] for one in culprits if isinstance(one.get("rank"), int)}
    guilty = truth["culprit"]
    wanted = set() if guilty is None else set(guilty) if isinstance(guilty, list) else {guilty}
    kind = verdict.get("kind")
    right = kind == truth["kind"] and named == wanted
    misled = bool(named - wanted)
    if truth["kind"] == "healthy":
        misled = misled or kind not in ("healthy", "unknown")
    at_fault = [one for one in culprits if one.get("rank") in wanted]
    fields = {
        field: _accepts(truth[field], [one.get(field) for one in at_fault], field == "module")
        for field in FIELDS
        if truth.get(field) is not None
    }
    exact = right and all(fields.values())
    return {"right": right, "exact": exact, "misled": misled, "fields": fields, "kind": kind, "named": sorted(named)}


def describe(truth: dict[str, Any], verdict: dict[str, Any] | None, points: dict[str, Any]) -> str:
    """What was expected and what was said, in one line."""
    wrong = [field for field, agrees in points["fields"].items() if not agrees]
    said = (verdict or {}).get("culprits") or [{}]
    parts = [f"{field}: {said[0].get(field)!r}, not {truth[field]!r}" for field in wrong]
    parts.insert(0, f"said {points['kind']} {points['named']}, was {truth['kind']} {truth['culprit']}")
    return "; ".join(parts)


def _one(name: str, out: Path, seed: int | None, numerics: bool, stall_timeout: float) -> dict[str, Any]:
    entry = load_truth()[name]
    rank, step = (entry["rank"], entry["at"]) if seed is None else draw(entry, random.Random(f"{seed}:{name}"))
    truth = truth_of(name, rank, step)
    began = time.monotonic()
    code, verdict, _ = run_scenario(name, out / name, rank, step, stall_timeout, numerics)
    points = score(truth, verdict)
    result = {"name": name, "rank": rank, "step": step, "exit_code": code, "seconds": time.monotonic() - began}
    result.update(points=points, truth=truth, verdict=verdict)
    (out / name / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    marks = ("exact", "right", "misled")
    mark = next((m for m in marks if points[m]), "none" if verdict is None else "wrong")
    text = "" if points["exact"] else describe(truth, verdict, points)
    print(f"{name:26} {mark.upper() if mark == 'misled' else mark:7} {result['seconds']:5.1f} s  {text}", flush=True)
    return result


def main(argv: list[str] | None = None) -> int:
    """Run the jobs asked for; exit code 0 where all were right and nothing misled."""
    parser = argparse.ArgumentParser(description="Run the training jobs under distdbg and score its verdicts.")
    parser.add_argument("--out", type=Path, help="folder for the runs (default: a temporary one, removed)")
    parser.add_argument("--kind", nargs="+", default=[], help="only jobs of these kinds")
    parser.add_argument("--only", nargs="+", default=[], help="only jobs whose name contains one of these")
    parser.add_argument("--seed", type=int, help="draw ranks and steps (default: those of truth.json)")
    parser.add_argument("--stall-timeout", type=float, default=6, help="seconds (default: 6)")
    parser.add_argument("--no-numerics", action="store_true", help="without --numerics (skips the numeric jobs)")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="runs at a time (default: 1)")
    args = parser.parse_args(argv)
    names = [
        name
        for name, entry in load_truth().items()
        if (not args.kind or entry["kind"] in args.kind)
        and (not args.only or any(part in name for part in args.only))
        and not (args.no_numerics and entry["kind"] == "numeric")
    ]
    if not names:
        parser.error("no job is left by --kind and --only")
    with tempfile.TemporaryDirectory() as scratch:
        out = (args.out or Path(scratch)).resolve()
        out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(args.jobs) as pool:
            results = list(
                pool.map(lambda name: _one(name, out, args.seed, not args.no_numerics, args.stall_timeout), names)
            )
        totals = {mark: sum(r["points"][mark] for r in results) for mark in ("right", "exact", "misled")}
        totals["none"] = sum(r["verdict"] is None for r in results)
        rows = [{key: r[key] for key in ("name", "rank", "step", "exit_code", "seconds", "points")} for r in results]
        (out / "summary.json").write_text(json.dumps({"totals": totals, "rows": rows}, indent=1), encoding="utf-8")
    print(
        f"right {totals['right']}/{len(names)}  exact {totals['exact']}/{len(names)}  "
        f"misled {totals['misled']}  no verdict {totals['none']}"
    )
    return 0 if totals["right"] == len(names) and not totals["misled"] else 1


if __name__ == "__main__":
    sys.exit(main())
