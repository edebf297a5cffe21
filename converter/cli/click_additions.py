"""Additions to click: described arguments, option headings, a default command, ways to print a result."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from converter.errors import ConverterError, OutputError, python_name

F = TypeVar("F", bound=Callable[..., Any])


class _Path(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):  # Path("") would be the current folder
            self.fail("an empty name is no path; give one, or . for the current folder", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Path(path_type=Path)


def folders(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Lets the shell complete folders. For MODEL too, which ``open_source`` takes as any text."""
    return [CompletionItem(incomplete, type="dir")]


def files(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


class Argument(click.Argument):
    """An argument that is described in the help, which click itself does since 8.5 only."""

    def __init__(self, *declarations: Any, help: str, **attributes: Any) -> None:  # noqa: A002 -- click's name
        super().__init__(*declarations, **attributes)
        self.help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:  # noqa: ARG002 -- click's signature
        return self.human_readable_name, self.help or ""


def argument(name: str, **attributes: Any) -> Callable[[F], F]:
    return click.argument(name, cls=Argument, **attributes)


class Option(click.Option):
    """An option that the help lists under a heading of its own."""

    def __init__(self, *declarations: Any, section: str, **attributes: Any) -> None:
        super().__init__(*declarations, **attributes)
        self.section = section


def section(heading: str) -> Callable[..., Callable[[F], F]]:
    """A substitute for ``click.option`` whose options the help lists under ``heading``."""

    def option(*declarations: str, **attributes: Any) -> Callable[[F], F]:
        return click.option(*declarations, cls=Option, section=heading, **attributes)

    return option


def _keep(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta[str(param.name)] = value


PRINTING = [
    click.Option(names, is_flag=True, expose_value=False, callback=_keep, help=text)
    for names, text in (
        (["--json"], "Print the result as one JSON object to stdout."),
        (["-q", "--quiet"], "Print only errors to stderr."),
        (["-v", "--verbose"], "Print more, and tracebacks of failures, to stderr."),
    )
]
"""Options of every command; ``given`` reads them."""
ANYWHERE = [name for option in PRINTING for name in option.opts]


def given(name: str) -> bool:
    """Whether the running command was given ``--json``, ``--quiet`` or ``--verbose``."""
    return bool(click.get_current_context().meta.get(name))


def progress() -> bool:
    """Whether to draw progress bars."""
    return not given("quiet") and sys.stderr.isatty()


def show(result: Mapping[str, Any], *lines: str) -> None:
    """Prints a result to stdout, as JSON or as lines for people."""
    for line in [json.dumps(result)] if given("json") else lines:
        put(line)


def _check_current_folder() -> None:
    """Libraries ask for it, and some of their errors would not name it."""
    try:
        Path.cwd()
    except OSError as error:
        raise ConverterError(
            f"the current folder cannot be opened ({error.strerror}); change to one that exists"
        ) from error


def say(*lines: str) -> None:
    """Prints to stderr, unless ``--quiet`` is given."""
    for line in () if given("quiet") else lines:
        put(line, err=True)


def printable(text: str) -> str:
    """Text of any origin in which nothing but line breaks controls a terminal."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text
    )


def put(line: str, *, err: bool = False) -> None:
    """Prints to stdout or stderr.

    Raises ``OutputError`` if stdout cannot be written. stderr that cannot be written is ignored.
    """
    try:
        click.echo(printable(line), err=err)
    except OSError as error:
        if error.errno == errno.EPIPE and not err:
            raise  # who reads the output has seen enough, which is no failure
        # Python would write what is left in the stream's buffer once more at the end, and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), (sys.stderr if err else sys.stdout).fileno())
        if not err:
            raise OutputError(
                f"the command is done and its result complete, but stdout cannot be written: {error.strerror}"
            ) from error


class Command(click.Command):
    """A command whose usage line has what is required, and whose help has the options by section."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.params += PRINTING

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        required = [param for param in self.params if isinstance(param, click.Option) and param.required]
        arguments = [piece for param in self.params for piece in param.get_usage_pieces(ctx)]
        return [*arguments, *(f"{option.opts[0]} {option.metavar}" for option in required), "[OPTIONS]"]

    def get_short_help_str(self, limit: int = 0) -> str:  # noqa: ARG002 -- click's signature
        """The first sentence. It is never cut: the list of commands wraps it where it is too long."""
        return super().get_short_help_str(limit=1000)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Nothing; ``format_options`` has them, and newer versions of click call both."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_sections(self.get_params(ctx), ctx, formatter)


def write_sections(
    parameters: Iterable[click.Parameter], ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    """Writes one list of parameters for each heading, in the order in which the headings first appear."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in parameters:
        heading = "Arguments" if isinstance(parameter, click.Argument) else "Options"
        if record := parameter.get_help_record(ctx):
            sections.setdefault(getattr(parameter, "section", heading), []).append(record)
    for heading, records in sections.items():
        with formatter.section(heading):
            formatter.write_dl(records)


def _flags(command: click.Command) -> dict[str, str]:
    """A command's flags, by their names in Python, such as no_verify, and by their parameters': verify."""
    found: dict[str, str] = {}
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            flag = parameter.opts[0]
            found.setdefault(flag.removeprefix("--").replace("-", "_"), flag)
            found.setdefault(str(parameter.name), flag)
    return found


class DefaultGroup(click.Group):
    """A group whose first word may be left out: ``ntk-convert MODEL`` means ``ntk-convert convert MODEL``."""

    default = "convert"
    own_options = ("--help", "-h", "--version")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = next((word for word in args if word not in ANYWHERE), None)
        if first is not None and first in self.commands:  # options of every command may stand before its name
            at = args.index(first)
            args = [first, *args[:at], *args[at + 1 :]]
        if args and args[0] not in self.commands and args[0] not in self.own_options:
            longer = [name for name in self.commands if args[0].startswith(name) and args[0].isalpha()]
            meant = longer or get_close_matches(args[0], self.commands, n=1)
            if meant and "/" not in args[0] and not Path(args[0]).exists():
                ctx.fail(f"{args[0]} is no command, and no file or folder; did you mean {meant[0]}?")
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            _check_current_folder()
            return super().invoke(ctx)
        except ConverterError as error:
            error.name_of = partial(self._flag_of, ctx.invoked_subcommand)
            raise

    def _flag_of(self, running: str | None, parameter: str) -> str:
        """A parameter of the library -> its option, such as --train-length.

        That of the running command is meant, if it has one, also in the plural: ``eval`` has ``--scales``.
        Else it is that of another command, which goes before or comes after.
        """
        own = {} if running is None else _flags(self.commands[running])
        for name in (parameter, f"{parameter}s"):
            if name in own:
                return own[name]
        for command in self.commands.values():
            if parameter in _flags(command):
                return _flags(command)[parameter]
        return python_name(parameter)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        pieces = self.commands[self.default].collect_usage_pieces(ctx)
        formatter.write_usage(ctx.command_path, " ".join(pieces))
        formatter.write_usage(ctx.command_path, "COMMAND ...", prefix=" " * len("Usage: "))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands, then the default command's parameters with the group's own options."""
        self.format_commands(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(f"Arguments and options of {self.default}, the default command:")
        write_sections([*self.commands[self.default].params, *self.get_params(ctx)], ctx, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes the first word: a command, an option of the default command, or else a folder."""
        found = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            command = self.commands[self.default]
            with command.make_context(self.default, [], parent=ctx, resilient_parsing=True) as inner:
                options = command.shell_complete(inner, incomplete)
            known = {item.value for item in found}
            return [*found, *(item for item in options if item.value not in known)]
        return found or [CompletionItem(incomplete, type="dir")]
