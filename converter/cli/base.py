"""Additions to click: described arguments, option headings, a default command, completion of folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from converter.errors import ConverterError

F = TypeVar("F", bound=Callable[..., Any])
ARGUMENTS, EXPORT, OPTIONS = "Arguments", "Export", "Options"
"""Headings of the help; ``OPTIONS`` is that of options without their own."""
PATH = click.Path(path_type=Path)


def folders(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Lets the shell complete folders. For MODEL too, which ``open_source`` takes as any text."""
    return [CompletionItem(incomplete, type="dir")]


def files(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Lets the shell complete files and folders."""
    return [CompletionItem(incomplete, type="file")]


class Argument(click.Argument):
    """An argument that is described in the help, which click itself does since 8.5 only."""

    def __init__(self, *declarations: Any, help: str, **attributes: Any) -> None:  # noqa: A002 -- click's name
        super().__init__(*declarations, **attributes)
        self.help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:  # noqa: ARG002 -- click's signature
        return self.human_readable_name, self.help or ""


def argument(name: str, **attributes: Any) -> Callable[[F], F]:
    """An argument of a command; ``help`` describes it."""
    return click.argument(name, cls=Argument, **attributes)


def under(heading: str, option: Callable[[F], F]) -> Callable[[F], F]:
    """Makes the help list an option, as ``click.option`` returns it, under ``heading``."""

    def decorate(function: F) -> F:
        function = option(function)
        vars(function)["__click_params__"][-1].section = heading
        return function

    return decorate


def section(heading: str) -> Callable[..., Callable[[F], F]]:
    """A substitute for ``click.option`` whose options the help lists under ``heading``."""

    def option(*declarations: str, **attributes: Any) -> Callable[[F], F]:
        return under(heading, click.option(*declarations, **attributes))

    return option


class Command(click.Command):
    """A command whose usage line has what is required, and whose help has the options by section.

    The library's messages name parameters as Python does, in backquotes; here they become options.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConverterError as error:
            error.args = (self._with_options(str(error)),)
            raise

    def _with_options(self, message: str) -> str:
        """The message with, for example, `train_length` replaced by --train-length."""
        options = [param for param in self.params if isinstance(param, click.Option)]
        names = {option.opts[0].removeprefix("--").replace("-", "_"): option.opts[0] for option in options}
        names |= {option.name: option.opts[0] for option in options if option.name is not None}
        # Where an option takes several, `scale` in a message is one of --scales.
        names = {name.removesuffix("s"): option for name, option in names.items()} | names
        return re.sub(r"`(\w+)`", lambda found: names.get(found[1], found[0]), message)

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
        heading = ARGUMENTS if isinstance(parameter, click.Argument) else OPTIONS
        if record := parameter.get_help_record(ctx):
            sections.setdefault(getattr(parameter, "section", heading), []).append(record)
    for heading, records in sections.items():
        with formatter.section(heading):
            formatter.write_dl(records)


class DefaultGroup(click.Group):
    """A group whose first word may be left out: ``ntk-convert MODEL`` means ``ntk-convert convert MODEL``."""

    default = "convert"
    own_options = ("--help", "-h", "--version")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in self.own_options:
            if not ctx.resilient_parsing:  # as it is while a shell completes
                self._check_spelling(ctx, args[0])
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def _check_spelling(self, ctx: click.Context, word: str) -> None:
        """Refuses a word that looks like a mistyped command, and not like a model.

        Raises:
            UsageError: it is close to a command's name, and there is no such folder.
        """
        if "/" in word or word.startswith("-"):
            return
        meant = " or ".join(get_close_matches(word, self.commands))
        if meant and not Path(word).exists():
            raise click.UsageError(
                f"there is no command {word!r}; did you mean {meant}? "
                f"For a model of that name, type ntk-convert {self.default} {word}.",
                ctx,
            )

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
        """Completes the first word: a command, an option of the default command, or a folder."""
        found = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            command = self.commands[self.default]
            with command.make_context(self.default, [], parent=ctx, resilient_parsing=True) as inner:
                options = command.shell_complete(inner, incomplete)
            known = {item.value for item in found}
            return [*found, *(item for item in options if item.value not in known)]
        if not found:
            return [CompletionItem(incomplete, type="dir")]
        # Shells complete either words or paths, so beside words the folders have to be words too.
        return [*found, *(CompletionItem(f"{name}/") for name in _folders(incomplete))]


def _folders(start: str) -> Iterator[str]:
    """Names of the folders here that begin so; hidden ones are left out."""
    with suppress(OSError):
        for path in sorted(Path().iterdir()):
            if path.name.startswith(start) and not path.name.startswith(".") and path.is_dir():
                yield path.name
