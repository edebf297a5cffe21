"""The program: ``ntk-convert``, or ``python -m converter``."""

import signal


def main() -> None:
    """Runs the command line; Ctrl-C ends the process without a traceback while its modules are imported."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until ``converter.cli.main`` listens
    from converter.cli import main as run

    run()


if __name__ == "__main__":
    main()
