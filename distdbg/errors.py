"""The exceptions that distdbg raises itself, none of them ever into a training process.

::

    DistdbgError            exit code 2; every message names the file, the rank (if known) and the next step
    |-- RunDirError         a run directory that is missing, empty, mixed, not writable
    |-- ShardError          a shard that is foreign, truncated or newer than this version
    |-- DumpError           a dump of torch's Flight Recorder that is foreign, truncated, harmful or too large
    |-- BundleError         a bundle of a node (`distdbg replay`) that is foreign, truncated or newer
    |-- BuildError          the native recorder could not be compiled, or is asked for and not there
    |-- LaunchError         a command line or a script that cannot be launched
    `-- RecordingError      recording could not be set up in this process (`distdbg.start()`)
"""

import sys


def say(text: str) -> None:
    """Print to stderr; a script that closed it, or a reader that has left, is no reason to fail."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        return


class DistdbgError(Exception):
    """Base of all; ``exit_code`` is what the command line returns for it."""

    exit_code = 2


class RunDirError(DistdbgError):
    """A run directory that cannot be used."""


class ShardError(DistdbgError):
    """A file of a run directory that cannot be read."""


class DumpError(DistdbgError):
    """A dump of the Flight Recorder that cannot be read; nothing of it has been run."""


class BundleError(DistdbgError):
    """A node's bundle that cannot be read; nothing of it has been run."""


class BuildError(DistdbgError):
    """The native recorder cannot be had."""


class LaunchError(DistdbgError):
    """A job that cannot be started."""


class RecordingError(DistdbgError):
    """Recording that cannot start here."""
