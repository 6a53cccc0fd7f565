"""Each verdict again with one rank's shard missing: nobody innocent may be named then.

    python -m tests.scenarios.leave_one_out RESULTS

RESULTS is a folder of runs as the harness leaves them: <job>/.../run directories with their truth beside.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from distdbg.analyze.verdict import diagnose
from distdbg.errors import DistdbgError


def runs_below(folder: Path) -> list[Path]:
    """Run directories below a folder."""
    return sorted(path.parent for path in folder.rglob("ranks") if path.is_dir())


def without(run: Path, rank: int, place: Path) -> Path:
    """A copy of a run directory without one rank's shard (the other shards are linked)."""
    copy = place / "run"
    (copy / "ranks").mkdir(parents=True)
    for item in run.iterdir():
        if item.is_file() and item.name != "timeline.csv":
            shutil.copy(item, copy / item.name)
    for shard in (run / "ranks").iterdir():
        if not shard.name.startswith(f"rank{rank:05d}-"):
            (copy / "ranks" / shard.name).symlink_to(shard.resolve())
    return copy


def check(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """(rank left out, verdict) for every rank of a run with more than one."""
    ranks = sorted({int(shard.name[4:9]) for shard in (run / "ranks").iterdir()})
    found = []
    for rank in ranks if len(ranks) > 1 else []:
        with tempfile.TemporaryDirectory() as place:
            try:
                found.append((rank, diagnose(without(run, rank, Path(place)))))
            except DistdbgError as error:
                found.append((rank, {"kind": "unknown", "culprits": [], "summary": str(error)}))
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    args = parser.parse_args(argv)
    checked = misled = named = 0
    for run in runs_below(args.results):
        truth = _truth(run)
        if truth is None:
            continue
        guilty = _ranks(truth["culprit"])
        for rank, verdict in check(run):
            said = {culprit["rank"] for culprit in verdict["culprits"]}
            checked += 1
            named += bool(said)
            if said - guilty:
                misled += 1
                print(f"MISLED {run.parent.name}: without rank {rank} {verdict['kind']} names {sorted(said)}, "
                      f"was {truth['kind']} {sorted(guilty)}: {verdict['summary'][:150]}")  # fmt: skip
    print(f"{checked} verdicts with a shard missing: {named} name a rank, {misled} name an innocent one")
    return 1 if misled else 0


def _truth(run: Path) -> dict[str, Any] | None:
    for folder in (run.parent, run.parent.parent):
        for name in ("result.json", "score.json"):
            path = folder / name
            if path.exists():
                found = json.loads(path.read_text())
                truth = found.get("truth", found)
                return truth if "culprit" in truth else None
    return None


def _ranks(value: Any) -> set[int]:
    return set() if value is None else set(value if isinstance(value, list) else [value])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
