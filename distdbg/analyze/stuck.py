"""What is known of a rank that stands: what its open node received, and the native frames it stands in."""

from typing import Any

from distdbg.analyze.facts import Facts

FRAMES = 5  # of a native stack, in a sentence
MAX_TEXT = 400


def sentences(facts: Facts, entry: dict[str, Any]) -> list[str]:
    """Evidence for a culprit, from stacks.json and stacks-native.json; [] where they are older than its last event."""
    view = facts.views.get(entry["rank"])
    if view is None:
        return []
    found = []
    stacks = _fresh(view.shard.stacks, view.last_t)
    if stacks is not None and entry["node"]:
        found += _received(stacks, entry)
    native = _fresh(view.shard.native_stacks, view.last_t)
    if native is not None:
        found += _native(native, entry["rank"])
    return [text[:MAX_TEXT] for text in found]


def _fresh(stacks: dict[str, Any] | None, last_t: int) -> dict[str, Any] | None:
    taken = stacks.get("t_unix_ns") if isinstance(stacks, dict) else None
    return stacks if isinstance(taken, int) and taken >= last_t else None


def _received(stacks: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    nodes = stacks.get("open_nodes")
    for node in nodes if isinstance(nodes, list) else []:
        if not isinstance(node, dict) or not isinstance(node.get("received"), list):
            continue
        if (node.get("node"), node.get("node_index")) == (entry["node"], entry["node_index"]):
            what = ", ".join(_tensor(tensor) for tensor in node["received"][:8]) or "nothing"
            return [f"{entry['node']} of rank {entry['rank']} received {what}"]
    return []


def _tensor(about: Any) -> str:
    if not isinstance(about, dict):
        return "None"
    text = f"{about.get('dtype')}{about.get('shape')}"
    return text + (", not finite" if about.get("finite") is False else "")


def _native(native: dict[str, Any], rank: int) -> list[str]:
    threads = [t for t in native.get("threads") or [] if isinstance(t, dict) and isinstance(t.get("frames"), list)]
    main = next((t for t in threads if t.get("os_thread_id") == native.get("pid")), None)
    if main is None:
        return []
    frames = [frame for frame in main["frames"] if isinstance(frame, list) and len(frame) == 3][:FRAMES]
    names = [f"{name} ({place}:{line})" if line else f"{name} ({place})" for name, place, line in frames]
    return [f"rank {rank}'s main thread stands in " + ", called by ".join(names)] if names else []
