"""`distdbg run`: all of it is the launcher's."""


def main(argv: list[str]) -> int:
    from distdbg.launcher import main as launch

    return launch(argv)
