"""What bundles and descriptions say of a failed or stuck node: what it received, against its peers and its own past.

Reads bundle.json only, no tensor; what cannot be read is left out, since it is the evidence's evidence.
"""

from collections.abc import Iterator
from typing import Any

from distdbg.analyze.facts import Facts
from distdbg.errors import BundleError
from distdbg.replay.bundle import BUNDLE_SUFFIX, BUNDLES_FOLDER, Bundle, load_bundle
from distdbg.replay.compare import compare_bundles, place_of
from distdbg.schema import EventKind as K

MAX_BUNDLES = 64  # that are opened for one verdict
MAX_TEXT = 300


def sentences(facts: Facts, rank: int, entry: dict[str, Any]) -> list[str]:
    """How the failed node's replays ended and what it received that others did not; [] where nothing is known."""
    found = []
    own = _own(facts, rank, entry)
    if own is not None:
        found.append(f"run again alone: {own.outcome[:MAX_TEXT]}")
        found += [text[:MAX_TEXT] for text in _between(facts, own)]
    return found + _before(facts, rank, entry)


def _own(facts: Facts, rank: int, entry: dict[str, Any]) -> Bundle | None:
    for bundle in _bundles(facts, f"rank{rank}-step{entry['step']}-*"):
        about = bundle.about
        index = about.get("node_index")
        same = about["node"] == entry["node"] and (entry["node_index"] is None or index in (None, entry["node_index"]))
        if same and about["rank"] == rank and about["reason"] == "failure":
            return bundle
    return None


def _between(facts: Facts, own: Bundle) -> list[str]:
    """How the node's bundle differs from those of its peers, where --capture (or their own failure) left some."""
    step, rank = own.about["step"], own.about["rank"]
    peers: dict[int, Bundle] = {}
    for bundle in _bundles(facts, f"rank*-step{step}-*"):
        if bundle.about["rank"] != rank and place_of(bundle) == place_of(own):
            peers.setdefault(bundle.about["rank"], bundle)
    return compare_bundles([own, *peers.values()], of=rank) if peers else []


def _bundles(facts: Facts, pattern: str) -> Iterator[Bundle]:
    """The bundles of this attempt that can be read, in order of their names."""
    folder = facts.run.path / BUNDLES_FOLDER
    for path in sorted(folder.glob(pattern + BUNDLE_SUFFIX))[:MAX_BUNDLES]:
        try:
            bundle = load_bundle(path)
        except (BundleError, OSError):
            continue
        if bundle.about["attempt"] == facts.attempt:
            yield bundle


def _before(facts: Facts, rank: int, entry: dict[str, Any]) -> list[str]:
    """With --describe: what the same node of the same rank received a step earlier, where that was something else."""
    view = facts.views.get(rank)
    if view is None or not entry["node"] or entry["node_index"] is None or not entry["step"]:
        return []
    records = view.records[(view.records["kind"] == K.DESCRIBE) & (view.records["seq"] == entry["node_index"])]
    texts: dict[int, set[str]] = {}
    for record in records[records["step"] + 1 >= entry["step"]]:
        text = view.text(int(record["b"]))
        here = view.text(int(record["name"])), view.text(int(record["module"])) or None
        if text.startswith("received ") and here == (entry["node"], entry["module"]):
            texts.setdefault(int(record["step"]), set()).add(text)
    now, before = texts.get(entry["step"], set()), texts.get(entry["step"] - 1, set())
    if len(now) != 1 or len(before) != 1 or now == before:
        return []
    told = f"{entry['node']} {now.pop()} in step {entry['step']}, where a step earlier it {before.pop()}"
    return [told[:MAX_TEXT]]
