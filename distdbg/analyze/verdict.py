"""The verdict: which rank, where, and why the others wait. Reasoned in a fixed order, never voted.

1. Where is each rank, how did it end, who waits for whom?
2. Did the ranks part (issue different collectives) before anything failed? Then that is what went wrong first.
3. Else the earliest exception of a rank's own, or process that is gone.
4. Else, where nothing moves: the rank at which the waits end.
5. Where all ended well: wrong pairs of collectives, values (`numeric`), a rank the others wait for (`straggler`).
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distdbg import schema
from distdbg.analyze import (
    failures,
    flight,
    flight_beside,
    flight_mismatch,
    flight_verdict,
    longer,
    mismatch,
    numeric,
    replicas,
    stall,
    straggler,
    window,
)
from distdbg.analyze.dropped import first_by_digest
from distdbg.analyze.facts import Facts, gather
from distdbg.analyze.read import Run, read_run
from distdbg.errors import RunDirError, ShardError
from distdbg.files import replace_text

_RULES = (
    mismatch.find,
    replicas.find,
    flight_mismatch.find,
    failures.find,
    stall.find,
    mismatch.find_silent,
    numeric.find,
)


def diagnose(
    run_dir: str | os.PathLike[str],
    flight_recorder: Sequence[str | os.PathLike[str]] = (),
    *,
    whole: bool = False,
) -> dict[str, Any]:
    """The verdict over a run directory, as in verdict.json. Raises DistdbgError where nothing can be read.

    ``flight_recorder``: dumps of PyTorch's Flight Recorder to read beside it: files, folders or prefixes. Of a large
    run the last steps are read, and more where a verdict needs it; with ``whole`` all there is.
    """
    return diagnose_run(read_evidence(run_dir, flight_recorder, whole=whole))


def read_evidence(
    run_dir: str | os.PathLike[str],
    flight_recorder: Sequence[str | os.PathLike[str]] = (),
    *,
    whole: bool = False,
) -> Run:
    """What a verdict needs of a run, or with ``whole`` all of it. Raises DistdbgError.

    It may have no shard where there are dumps of the Flight Recorder.
    """
    path = Path(run_dir)
    given = [file for at in flight_recorder for file in flight.files_at(Path(at))]
    try:
        run = read_run(path, None if whole else window.plan(path))
    except (RunDirError, ShardError) as error:
        if not path.is_dir():
            raise
        given = given + [file for files in flight.own_files(path).values() for file in files]
        given = given or flight.files_in(path)
        if not given:
            raise
        run = Run(path, problems=[] if isinstance(error, RunDirError) else [str(error)])
    run.flight_recorder = given
    return run


def diagnose_run(run: Run) -> dict[str, Any]:
    """The verdict over a run that has been read."""
    if not run.shards:
        return flight_verdict.diagnose_files(run.flight_recorder, run.problems)
    facts = _far_enough(gather(run))
    found = _judged(facts)
    if found["kind"] == "unknown" and facts.run.window is not None and facts.run.window.earlier(0) is not None:
        return _judged(gather(_read_again(facts.run, None)))
    return found


def _judged(facts: Facts) -> dict[str, Any]:
    for rule in _RULES:
        verdict = rule(facts)
        if verdict is not None:
            return _finish(facts, verdict)
    return _finish(facts, longer.find(facts) or _nothing(facts))


def _far_enough(facts: Facts) -> Facts:
    """The facts; where digests tell that the ranks parted before what was read, those from some steps before on."""
    parting = first_by_digest(facts.views) if facts.run.window is not None else None
    if parting is None or facts.run.window is None:
        return facts
    earlier = facts.run.window.earlier(parting.step - window.WHOLE_STEPS)
    return facts if earlier is None else gather(_read_again(facts.run, earlier))


def _read_again(run: Run, other: window.Window | None) -> Run:
    again = read_run(run.path, other)
    again.flight_recorder = run.flight_recorder
    return again


def write(run_dir: Path, verdict: dict[str, Any]) -> None:
    """Write RUN_DIR/verdict.json at once."""
    replace_text(run_dir / schema.VERDICT_FILE, json.dumps(verdict, indent=1) + "\n")


def _nothing(facts: Facts) -> dict[str, Any]:
    missing = facts.missing
    unclear = facts.symptom or (missing and not facts.all_left)
    if not unclear:
        evidence = straggler.imbalance(facts)
        return {
            "kind": "healthy",
            "summary": _healthy_sentence(facts),
            "cause": "",
            "evidence": evidence,
            "confidence": 0.9,
        }
    what = f"no rank can be named: {facts.symptom or 'the run did not end'}"
    if facts.run.window is not None:
        what += f" (only steps from {facts.run.window.step} on were read; --whole reads all)"
    if missing:
        what += f"; the shards of {facts.names(missing)} are missing"
    return {"kind": "unknown", "summary": what, "cause": facts.symptom or "incomplete evidence", "confidence": 0.3}


def _healthy_sentence(facts: Facts) -> str:
    steps = max((view.steps_ended for view in facts.views.values()), default=0)
    ranks = f"{facts.world_size} rank{'s' if facts.world_size != 1 else ''}"
    text = f"nothing wrong: {ranks}, {steps} step{'s' if steps != 1 else ''}"
    if facts.interrupted:
        return text + ", then interrupted from outside"
    if any(not end.over for end in facts.ends.values()):
        return text + " so far; the ranks move"
    return text


def _finish(facts: Facts, verdict: dict[str, Any]) -> dict[str, Any]:
    evidence = list(verdict.get("evidence", []))
    evidence += [f"attempt {n} failed and was restarted" for n in facts.failed_attempts]
    evidence += facts.recovered
    evidence += [facts.run.clock_sentence] if facts.run.clock_sentence else []
    evidence += [
        f"rank {rank} was ended by {end.signal} after its script had come to its end, while the interpreter shut down"
        for rank, end in facts.ends.items()
        if end.how == "left" and end.signal
    ]
    confidence = float(verdict.get("confidence", 0.5))
    if facts.missing and verdict["kind"] not in ("healthy", "unknown"):
        confidence *= 0.8
    if facts.beside.disputed and verdict["kind"] != "unknown":
        confidence *= 0.8
    evidence += flight_beside.agreement(facts.beside)
    problems = [*facts.problems]
    if facts.run.window is not None:
        evidence.append(f"read: the events from step {facts.run.window.step} on, and the digests of earlier steps")
    return {
        "schema": schema.VERDICT_SCHEMA,
        "kind": verdict["kind"],
        "summary": verdict["summary"],
        "cause": verdict.get("cause", ""),
        "culprits": verdict.get("culprits", []),
        "victims": verdict.get("victims", []),
        "evidence": evidence + problems,
        "ruled_out": list(verdict.get("ruled_out", [])),
        "confidence": round(confidence, 2),
        "world_size": facts.world_size,
        "attempt": facts.attempt,
        "missing_ranks": sorted(facts.missing),
    }
