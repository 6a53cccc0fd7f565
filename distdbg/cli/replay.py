"""`distdbg replay BUNDLE`: what a captured node received, and the node run again without the job."""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distdbg.replay.bundle import Bundle
    from distdbg.replay.rerun import Result


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="distdbg replay",
        description="Describe a captured node, run it again here, and say whether the outcome is the job's. "
        "Several bundles of one node (of several ranks) are compared, too.",
    )
    parser.add_argument("bundles", metavar="BUNDLE", type=Path, nargs="+", help="RUN_DIR/bundles/*.bundle")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--source", type=Path, metavar="FILE_OR_DIR",
                        help="your code that defines a custom Function: it is imported, its backward run")  # fmt: skip
    parser.add_argument("--pdb", action="store_true", help="run that backward under the debugger (with --source)")
    args = parser.parse_args(argv)
    if args.pdb and args.source is None:
        parser.error("--pdb needs --source: the code to debug is yours")

    from distdbg.replay.bundle import load_bundle
    from distdbg.replay.compare import compare_bundles

    bundles = [load_bundle(path) for path in args.bundles]
    together = bundles if len(bundles) > 1 else [*bundles, *siblings(bundles[0])]
    differences = compare_bundles(together)
    # What the user's own code prints must not stand in the JSON.
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        results = [bundle.replay(args.source, debug=args.pdb) for bundle in bundles]
    if args.json:
        found = [as_json(bundle, result) for bundle, result in zip(bundles, results, strict=True)]
        print(json.dumps({"bundles": found, "differences": differences}, indent=1))
    else:
        for bundle, result in zip(bundles, results, strict=True):
            print(printable("\n".join(lines(bundle, result))))
        if len(together) > 1:
            ranks = ", ".join(str(bundle.about["rank"]) for bundle in together)
            print(
                printable("\n".join([f"ranks {ranks} compared", *(f"  {text}" for text in differences or ["equal"])]))
            )
    return 0


def siblings(bundle: "Bundle") -> list["Bundle"]:
    """Bundles of the same node of other ranks that lie beside one."""
    from distdbg.errors import BundleError
    from distdbg.replay.bundle import BUNDLE_SUFFIX, load_bundle
    from distdbg.replay.compare import place_of

    found: dict[int, Bundle] = {}
    for path in sorted(bundle.path.absolute().parent.glob(f"rank*-step*{BUNDLE_SUFFIX}")):
        try:
            other = load_bundle(path)
        except BundleError:
            continue
        rank = other.about["rank"]
        if rank != bundle.about["rank"] and place_of(other) == place_of(bundle):
            found.setdefault(rank, other)
    return list(found.values())


def as_json(bundle: "Bundle", result: "Result") -> dict[str, Any]:
    return {"path": str(bundle.path), **bundle.about, "here": result.as_dict()}


def printable(text: str) -> str:
    """Without control characters: names in a bundle come from a file."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def lines(bundle: "Bundle", result: "Result") -> list[str]:
    """What a person sees of one bundle."""
    about = bundle.about
    found = [f"{bundle.path.name}: rank {about['rank']}, step {about['step']}, {about['reason']}"]
    for name, value in (
        ("node", f"{about['node']}, number {about.get('node_index')}"),
        ("module", _module(about)),
        ("source", about.get("source")),
        ("error", (about["error"] or {}).get("title")),
    ):
        if value:
            found.append(f"  {name:<9} {value}")
    found += _tensors("received", about["inputs"])
    found += _tensors("returned", about["outputs"])
    for part in ("saved", "context", "parameters", "buffers"):
        found += _tensors(part, list(about[part].values()), list(about[part]))
    found += [f"  left out  {text}" for text in about.get("left_out") or []]
    found += [
        f"  then      {about['outcome']}",
        f"  here      {result.summary}" + (f" ({result.how})" if result.how else ""),
    ]
    return found


def _module(about: dict[str, Any]) -> str:
    kind = about.get("module_class")
    return f"{about.get('module') or ''}{f' ({kind})' if kind else ''}"


def _tensors(title: str, entries: list[Any], names: list[str] | None = None) -> list[str]:
    found = []
    for index, entry in enumerate(entries):
        name = names[index] if names else str(index)
        found.append(f"  {title if index == 0 else '':<9} {name}: {tensor_text(entry)}")
    return found


def tensor_text(entry: Any) -> str:
    """ "float32[8, 16], norm 1.2, -0.5 to 0.7"."""
    if not isinstance(entry, dict):
        return repr(entry)[:100]
    if "unreadable" in entry:
        return f"cannot be read: {entry['unreadable'][:100]}"
    if "shape" not in entry:
        return json.dumps(entry)[:100]
    parts = [f"{entry.get('dtype')}{entry['shape']}"]
    if entry.get("finite") is False:
        parts.append(f"{entry.get('nan')} NaN, {entry.get('inf')} infinite")
    if isinstance(entry.get("norm"), (int, float)):
        parts.append(f"norm {entry['norm']:.4g}")
    if isinstance(entry.get("min"), (int, float)) and isinstance(entry.get("max"), (int, float)):
        parts.append(f"{entry['min']:.4g} to {entry['max']:.4g}")
    if str(entry.get("device", "cpu")) != "cpu":
        parts.append(str(entry["device"]))
    if not entry.get("key"):
        parts.append("values not kept")
    return ", ".join(parts)
