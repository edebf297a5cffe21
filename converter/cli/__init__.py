"""``ntk-convert``: a thin command line over the library, with one module for each group of commands.

Results go to stdout: the path first, then the report of a graph. Messages go to stderr.
Exit codes: 0 (success), 1 (failure), 2 (wrong usage).
Nothing heavy is imported before a command runs, so ``--help`` and shell completion answer at once.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

from converter import interrupts
from converter._version import __version__
from converter.cli import conversion, evaluation
from converter.cli.click_additions import DefaultGroup, printable, put
from converter.errors import TOO_MANY_FILES, ConverterError, out_of_memory
from converter.progress import LOG

DISK_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some of your quota, or choose another disk",
    errno.EACCES: "change its permissions or choose another folder",
    errno.EPERM: "change its permissions or choose another folder",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or choose another disk",
    errno.EROFS: "choose a folder that can be written",
    errno.EBUSY: "a mount point cannot be replaced; choose a folder inside it",
}

LONGEST_LINE = 1000
"""Characters of an error message, which may quote a file of the source."""


@click.group(
    cls=DefaultGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="ntk-convert", help="Show the version and exit.")
def cli() -> None:
    """Adapt a model with ALiBi or rotary positions to longer contexts.

    ntk-convert writes a copy of a checkpoint with by-parts, NTK-aware or linear scaling
    built in, without fine-tuning. Plain transformers loads the copy.

    \b
    Examples:
      ntk-convert inspect bigscience/bloom-1b7 --scale 2
      ntk-convert bigscience/bloom-1b7 --scale 2 --out ./bloom-ntk
      ntk-convert eval bigscience/bloom-1b7 ./bloom-ntk --text book.txt
      ntk-convert export ./bloom-ntk
      ntk-convert push ./bloom-ntk USER/bloom-ntk

    "ntk-convert COMMAND --help" describes a command. Without COMMAND, convert is run.
    """


for module in (conversion, evaluation):
    for command in module.COMMANDS:
        cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits; every failure is reported as one line on stderr."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    verbose = bool({"-v", "--verbose"} & set(argv))
    interrupts.listen()
    _open_streams()
    if not verbose:
        # huggingface_hub logs every retry; its final failure is reported below.
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        # matplotlib logs that it builds its font cache on its first run.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if {"-q", "--quiet"} & set(argv):
        LOG.setLevel(logging.ERROR)
    elif not sys.stderr.isatty():  # no bar is drawn there
        LOG.setLevel(logging.INFO)
        LOG.addHandler(logging.StreamHandler())
    reserve = bytearray(8 << 20)  # so that there is memory left to say that there is none
    try:
        code = cli.main(argv, prog_name="ntk-convert", standalone_mode=False)
        interrupts.ignore()
        sys.exit(code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except Exception as error:
        del reserve
        if verbose:
            traceback.print_exc()
        line, code = _explain(error)
        # Keep it to one line, whatever a file name or a server's answer contains.
        line = printable(line).replace("\n", "\\n")
        put(f"error: {line if len(line) <= LONGEST_LINE else f'{line[:LONGEST_LINE]} ...'}", err=True)
        interrupts.ignore()
        sys.exit(code)


def _open_streams() -> None:
    """Opens the standard streams that are closed, so that no file of the run gets their numbers.

    stdout prints what its encoding lacks as escapes, as stderr does.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _explain(error: Exception) -> tuple[str, int]:
    if isinstance(error, click.Abort) or interrupts.came():
        # A library that is interrupted may raise an error of its own, which would hide the cause.
        what = error.__cause__ if isinstance(error.__cause__, interrupts.Interrupted) else ""
        return f"interrupted{what and f'; {what}'}", 1
    if isinstance(error, ConverterError):
        return str(error), error.exit_code
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "ntk-convert"
        message = error.format_message()
        stop = "" if message.endswith((".", "?", ")")) else "."
        return f"{message}{stop} See {command} --help.", error.exit_code
    if out_of_memory(error):
        return "not enough memory; end other programs, or raise the limit (ulimit -v and -d)", 1
    if isinstance(error, OSError):
        remedy = DISK_REMEDIES.get(error.errno or 0)
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}{f'; {remedy}' if remedy else ''}", 1
    if TOO_MANY_FILES in str(error):  # of a library that has errors of its own
        return f"{TOO_MANY_FILES}; {DISK_REMEDIES[errno.EMFILE]}", 1
    return f"unexpected {type(error).__name__}: {error}; this is a bug, please report it with -v", 1
