"""Importing is cheap, and analysis never needs torch."""

import pkgutil
import subprocess
import sys

import pytest

import distdbg

HEAVY = ("torch", "numpy", "pandas", "polars")


def loaded_by(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after some code."""
    script = f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_the_package_loads_nothing_heavy() -> None:
    """`import distdbg`, its command line and the recorder's session load none of the heavy packages."""
    code = "import distdbg, distdbg.cli, distdbg.worker, distdbg.record, distdbg.shard, distdbg.schema, distdbg.errors"
    assert loaded_by(code) == set()


@pytest.mark.parametrize("package", ["analyze", "report", "export", "cli"])
def test_analysis_never_imports_torch(package: str) -> None:
    """No module of analysis, reports, exports and commands imports torch."""
    module = __import__(f"distdbg.{package}", fromlist=["__path__"])
    names = [found.name for found in pkgutil.walk_packages(module.__path__, f"distdbg.{package}.")]
    assert names
    assert "torch" not in loaded_by("import " + ", ".join(names))


def test_public_names_are_what_is_exported() -> None:
    """__all__ is sorted, every name in it loads, and nothing else pretends to be public."""
    assert distdbg.__all__ == sorted(distdbg.__all__)
    for name in distdbg.__all__:
        assert getattr(distdbg, name) is not None
    assert set(distdbg.__all__) <= set(dir(distdbg))
    with pytest.raises(AttributeError):
        _ = distdbg.nonsense
