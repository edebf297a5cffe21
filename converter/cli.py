"""``ntk-convert``: a shell over ``converter.convert``, ``inspect``, ``export`` and ``validate``.

The result goes to stdout: the path first, then a graph's report. Everything said about it goes to stderr.
Exit codes: 0, 1 (failed), 2 (usage).
Nothing heavy is imported before a command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from converter import __version__, interrupts
from converter.errors import ConverterError, UsageError
from converter.onnx.options import DTYPES, PROFILES, OnnxOptions
from converter.scaling import DYNAMICS, METHODS
from converter.weights.transfer import DTYPES as WEIGHT_DTYPES

F = TypeVar("F", bound=Callable[..., Any])

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


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several click options as one decorator, in the order given."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


scaling_options = options(
    click.option("--scale", type=float, metavar="A", help="Scale factor, at least 1."),
    click.option("--target-length", type=int, metavar="N", help="Tokens to reach: A = N / trained length."),
    click.option(
        "--method", type=click.Choice(METHODS), default="ntk", show_default=True, help="How to scale."
    ),
    click.option("--dynamic", type=click.Choice(DYNAMICS), help="A grows with the row or the position."),
    click.option("--rate", type=float, metavar="A0", help="Of --dynamic: A = max(1, A0 * tokens / trained)."),
    click.option("--train-length", type=int, metavar="N", help="Trained length, if it is not a known model."),
)
hub_options = options(
    click.option("--revision", metavar="REV", help="Branch, tag or commit of a Hub id."),
    click.option("--token", metavar="TOKEN", help="Hub token; HF_TOKEN or the saved login by default."),
    click.option(
        "--cache-dir", type=click.Path(path_type=Path), metavar="DIR", help="The Hub cache's folder."
    ),
)
push_options = options(
    click.option("--private", is_flag=True, help="Create the repository private."),
    click.option("--branch", metavar="NAME", help="Commit to this branch, created if there is none."),
    click.option("--create-pr", is_flag=True, help="Open a pull request instead."),
)
provider_option = click.option(
    "--provider", type=click.Choice(["cpu", "cuda"]), help="Validate there; by default wherever it can be."
)
onnx_options = options(
    click.option(
        "--onnx-profile",
        type=click.Choice(PROFILES),
        default="ort",
        show_default=True,
        help="onnxruntime's fused attention, or standard ONNX operators only.",
    ),
    click.option(
        "--onnx-dtype",
        type=click.Choice(DTYPES),
        default="native",
        show_default=True,
        help="What the graph computes in, or its weights' bits.",
    ),
    click.option("--onnx-standalone", is_flag=True, help="Copy the weights beside the graph, in onnx/."),
    click.option("--last-logits", is_flag=True, help="Logits of each row's last token only."),
    provider_option,
)
json_option = click.option("--json", "as_json", is_flag=True, help="The result as one JSON object on stdout.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
verbose_option = click.option("-v", "--verbose", is_flag=True, help="Say more, with tracebacks of failures.")


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


@cli.command()
@click.argument("model")
@scaling_options
@hub_options
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Folder to write.")
@click.option("--dtype", type=click.Choice(WEIGHT_DTYPES), help="Round the weights to it on the way.")
@click.option("--link", is_flag=True, help="Share the weights' bytes with the source, where the disk can.")
@click.option("--hard-link", is_flag=True, help="As --link, or else make the weights the source's own files.")
@click.option("--resume", is_flag=True, help="Go on from what an interrupted run has finished.")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the folder when the new one is complete, and with --push-to-hub what is there.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be written, and write nothing.")
@click.option("--no-verify", is_flag=True, help="Do not run the result before it is put in place.")
@click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Let verification run, with your rights, the modeling code that MODEL brings, or names in another "
    "repository whose newest commit is then downloaded (auto_map), and compare the result with it. "
    "Nothing of MODEL is run otherwise.",
)
@click.option("--push-to-hub", metavar="USER/NAME", help="Then push the result there; see push.")
@push_options
@click.option("--onnx", "with_onnx", is_flag=True, help="Write a validated ONNX graph too.")
@onnx_options
@json_option
@quiet_option
@verbose_option
def convert(
    as_json: bool,
    quiet: bool,
    verbose: bool,
    no_verify: bool,
    with_onnx: bool,
    link: bool,
    hard_link: bool,
    **arguments: Any,
) -> None:
    """Write a scaled copy of MODEL that plain transformers loads."""
    from converter import report
    from converter.pipeline import convert as run

    onnx = _onnx_options(arguments)
    if onnx != OnnxOptions() and not with_onnx:
        raise UsageError("the options of a graph need --onnx; give it too, or drop them")
    result = run(
        verify=not no_verify,
        link="hard" if hard_link else "reflink" if link else None,
        onnx=onnx if with_onnx else None,
        progress=not quiet and sys.stderr.isatty(),
        **arguments,
    )
    if as_json:
        click.echo(json.dumps(result.to_json()))
    elif result.dry_run:
        click.echo(report.plan(result))
    else:
        click.echo(str(result.path))
    if result.onnx is not None and not as_json and not quiet:
        click.echo(report.exported(result.onnx))
    if not quiet and not result.dry_run:
        click.echo(report.summary(result, verbose=verbose), err=True)
    if result.pushed is not None and not as_json:
        click.echo(result.pushed.url)
        if not quiet:
            click.echo(report.pushed(result.pushed, verbose=verbose), err=True)


@cli.command()
@click.argument("model")
@scaling_options
@hub_options
@json_option
@verbose_option
def inspect(as_json: bool, verbose: bool, **arguments: Any) -> None:  # noqa: ARG001 -- see main
    """Show what MODEL is: sizes, trained length, slopes and, with scaling options, scaled slopes."""
    from converter import report
    from converter.inspection import inspect as run

    inspection = run(**arguments)
    click.echo(json.dumps(inspection.to_json()) if as_json else report.inspection(inspection))


@cli.command()
@click.option("--markdown", is_flag=True, help="As the README's table.")
@json_option
def families(as_json: bool, markdown: bool) -> None:
    """List the models that can be converted."""
    from converter import catalogue, report

    if as_json:
        click.echo(json.dumps([entry.to_json() for entry in catalogue.supported()]))
    else:
        click.echo(catalogue.markdown() if markdown else report.families(catalogue.supported()))


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@onnx_options
@click.option("--no-validate", is_flag=True, help="Do not run the graph before it is put in place.")
@json_option
@quiet_option
@verbose_option
def export(
    folder: Path,
    as_json: bool,
    quiet: bool,
    verbose: bool,  # noqa: ARG001 -- see main
    no_validate: bool,
    **arguments: Any,
) -> None:
    """Write an ONNX graph of the converted repository DIR into it, validated under onnxruntime."""
    from converter import report
    from converter.onnx.export import export as run

    options = _onnx_options(arguments, validate=not no_validate)
    result = run(folder, options, progress=not quiet and sys.stderr.isatty())
    click.echo(json.dumps(result.to_json()) if as_json else str(result.path))
    if not as_json and not quiet:
        click.echo(report.exported(result))


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@provider_option
@json_option
@quiet_option
@verbose_option
def validate(
    folder: Path,
    provider: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,  # noqa: ARG001 -- see main
) -> None:
    """Run DIR's ONNX graphs against its torch model; one that fails is renamed to *.failed."""
    from converter import report
    from converter.onnx.validate import validate as run

    result = run(folder, provider=provider, progress=not quiet and sys.stderr.isatty())
    if as_json:
        click.echo(json.dumps(result.to_json()))
    elif not quiet:
        click.echo(report.validation(result))
    result.check()


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("repo_id", metavar="USER/NAME")
@push_options
@click.option("--overwrite", is_flag=True, help="Replace what the repository holds.")
@click.option("--token", metavar="TOKEN", help="Hub token; HF_TOKEN or the saved login by default.")
@json_option
@quiet_option
@verbose_option
def push(as_json: bool, quiet: bool, verbose: bool, **arguments: Any) -> None:
    """Verify the converted repository DIR and push it to the Hub, as one commit."""
    from converter import report
    from converter.publish.push import push as run

    result = run(**arguments, progress=not quiet and sys.stderr.isatty())
    click.echo(json.dumps(result.to_json()) if as_json else result.url)
    if not quiet:
        click.echo(report.pushed(result, verbose=verbose), err=True)


def _onnx_options(arguments: dict[str, Any], *, validate: bool = True) -> OnnxOptions:
    """Takes the graph's options out of a command's arguments."""
    return OnnxOptions(
        profile=arguments.pop("onnx_profile"),
        dtype=arguments.pop("onnx_dtype"),
        standalone=arguments.pop("onnx_standalone"),
        last_logits=arguments.pop("last_logits"),
        provider=arguments.pop("provider"),
        validate=validate,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits; every failure is one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verbose = bool({"-v", "--verbose"} & set(words))
    interrupts.listen()
    if not verbose:
        # The client announces every retry; its final failure has a line of ours.
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
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
