"""``ntk-convert``: a shell over the library; a module a group of commands.

The result goes to stdout: the path first, then a graph's report. Everything said about it goes to stderr.
Exit codes: 0, 1 (failed), 2 (usage).
Nothing heavy is imported before a command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence

import click

from converter import __version__, interrupts
from converter.cli import conversion, evaluation, graphs, pictures
from converter.errors import ConverterError

DISK_REMEDIES = {
    errno.ENOSPC: "free some space or change --out",
    errno.EDQUOT: "free some of your quota or change --out",
    errno.EACCES: "change its permissions or choose another folder",
    errno.EPERM: "change its permissions or choose another folder",
    errno.EROFS: "choose a folder that can be written",
    errno.EBUSY: "a mount point cannot be replaced; name a folder inside it",
}

LONGEST_LINE = 1000
"""Letters of an error, which may quote what a source's file says."""


class DefaultGroup(click.Group):
    """A group whose first argument may be left out: ``ntk-convert MODEL`` means ``convert MODEL``."""

    default = "convert"
    own_options = ("--help", "-h", "--version")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in self.own_options:
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        command = self.commands[self.default]
        records = [record for option in command.get_params(ctx) if (record := option.get_help_record(ctx))]
        with formatter.section("Options of convert"):
            formatter.write_dl(records[:-1])  # the last is --help again


@click.group(
    cls=DefaultGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="ntk-convert")
def cli() -> None:
    """Bake linear or NTK-aware position scaling into a checkpoint (ALiBi; rotary by its config).

    \b
    ntk-convert bigscience/bloom-1b7 --scale 2 --out ./bloom-ntk
    ntk-convert bigscience/bloom-1b7 --scale 2 --out ./bloom-ntk --push-to-hub USER/NAME
    ntk-convert inspect bigscience/bloom-1b7 --scale 2
    ntk-convert export ./bloom-ntk
    ntk-convert push ./bloom-ntk USER/NAME
    ntk-convert families

    MODEL is a local folder or a Hub id. Without a command, convert is meant.
    """


for module in (conversion, graphs, evaluation, pictures):
    for command in module.COMMANDS:
        cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits; every failure is one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verbose = bool({"-v", "--verbose"} & set(words))
    interrupts.listen()
    if not verbose:
        # The client announces every retry; its final failure has a line of ours.
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        # So does matplotlib announce that it reads the fonts, the first time.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        code = cli.main(words, prog_name="ntk-convert", standalone_mode=False)
        interrupts.ignore()
        sys.exit(code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except Exception as error:
        if verbose:
            traceback.print_exc()
        line, code = _explain(error)
        # One line, whatever a file name or a server's answer holds.
        printable = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)
        if len(printable) > LONGEST_LINE:
            printable = f"{printable[:LONGEST_LINE]} ..."
        click.echo(f"error: {printable}", err=True)
        interrupts.ignore()
        sys.exit(code)


def _explain(error: Exception) -> tuple[str, int]:
    if isinstance(error, click.Abort) or interrupts.came():
        # What a library makes of an interruption is not what happened.
        what = error.__cause__ if isinstance(error.__cause__, interrupts.Interrupted) else ""
        return f"interrupted{what and f'; {what}'}", 1
    if isinstance(error, ConverterError):
        return str(error), error.exit_code
    if isinstance(error, click.ClickException):
        return f"{error.format_message()} See ntk-convert --help.", error.exit_code
    if isinstance(error, OSError):
        remedy = DISK_REMEDIES.get(error.errno or 0)
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}{f'; {remedy}' if remedy else ''}", 1
    return f"unexpected {type(error).__name__}: {error}; this is a bug, please report it with -v", 1
