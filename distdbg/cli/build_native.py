"""`distdbg build-native`: compile the native recorder once, for this torch and Python."""

import argparse

from distdbg.native import build


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="distdbg build-native",
        description="Compile the recorder of backward nodes in C++. `distdbg run` then uses it (--recorder auto).",
    )
    parser.add_argument("--check", action="store_true", help="build nothing; say what there is (exit code 1: nothing)")
    options = parser.parse_args(argv)
    if options.check:
        found = build.find()
        if found is not None:
            print(f"built: {found}")
            return 0
        others = build.stale()
        print(f"not built for torch {build.torch_version() or '(not installed)'}: run `distdbg build-native`")
        for path in others:
            print(f"  does not fit this torch, Python or version of distdbg: {path}")
        return 1
    path, made = build.build()
    print(f"{'built' if made else 'already built'}: {path}")
    return 0
