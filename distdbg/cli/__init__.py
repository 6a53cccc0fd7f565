"""The command line: one thin module a subcommand, loaded when it is asked for."""

import importlib
import io
import os
import sys

from distdbg.errors import DistdbgError

# subcommand -> (module, what it does)
COMMANDS = {
    "run": ("distdbg.cli.run", "launch a job as torchrun does, recorded; ends with the verdict"),
    "diagnose": ("distdbg.cli.diagnose", "say which rank stalled or failed, where, and why the others wait"),
    "merge": ("distdbg.cli.merge", "merge the shards of all ranks into one timeline (CSV or Parquet)"),
    "export": ("distdbg.cli.export", "write a trace for the Perfetto UI and chrome://tracing"),
    "report": ("distdbg.cli.report", "write one HTML file with the verdict and pictures of the run"),
    "replay": ("distdbg.cli.replay", "describe a captured node and run it again, without the job"),
    "build-native": ("distdbg.cli.build_native", "compile the native recorder for this torch, once"),
    "compare": ("distdbg.cli.compare", "say what got slower between two runs, by phase, module and node"),
}


def _help() -> str:
    lines = ["usage: distdbg COMMAND [ARGS]", "", "commands:"]
    lines += [f"  {name:<14}{about}" for name, (_, about) in COMMANDS.items()]
    lines += ["", "distdbg COMMAND --help tells more; distdbg --version prints the version"]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return 0 if args else 2
    if args[0] == "--version":
        from distdbg import __version__

        print(f"distdbg {__version__}")
        return 0
    if args[0] not in COMMANDS:
        print(f"distdbg: no such command: {args[0]}\n\n{_help()}", file=sys.stderr)
        return 2
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # names and messages are the user's; the terminal may be ASCII
    try:
        command = importlib.import_module(COMMANDS[args[0]][0])
        code = int(command.main(args[1:]))
        sys.stdout.flush()  # here, where a reader that has left can still be told from an error
        return code
    except DistdbgError as error:
        print(f"distdbg: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
