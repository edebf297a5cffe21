"""``convert``, ``inspect``, ``families``, ``adopt`` and ``push``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from converter.cli.base import PATH, Command, argument, folders, section
from converter.cli.options import (
    converted_argument,
    export_options,
    hub_options,
    json_option,
    output_option,
    push_option,
    push_options,
    quiet_option,
    scaling_options,
    set_option,
    take_onnx,
    token_option,
    verbose_option,
)
from converter.weights.transfer import DTYPES as WEIGHT_DTYPES

verification_option = section("Verification")
model_argument = argument(
    "model",
    shell_complete=folders,
    help="A local folder, or else a model id on the Hub (bigscience/bloom-1b7).",
)


@click.command(cls=Command)
@model_argument
@scaling_options
@output_option(
    "--out", required=True, type=PATH, shell_complete=folders, metavar="DIR", help="Folder to write."
)
@output_option(
    "--base-model",
    metavar="ID",
    help="Hub id that the model card names as the source's, for a local copy.",
)
@output_option("--dtype", type=click.Choice(WEIGHT_DTYPES), help="Round the weights to this type.")
@output_option(
    "--link",
    is_flag=True,
    help="Share the disk space of the weights with the source, if the file system can (reflink).",
)
@output_option(
    "--hard-link",
    is_flag=True,
    help="Like --link, falling back to hard links; editing one file then edits both.",
)
@output_option(
    "--resume", is_flag=True, help="Keep the weight files that an interrupted run has finished, and go on."
)
@output_option(
    "--overwrite",
    is_flag=True,
    help="Replace DIR once the new folder is complete; with --push-to-hub, also what is on the Hub.",
)
@output_option("--dry-run", is_flag=True, help="Show what would be written, but write nothing.")
@verification_option(
    "--no-verify", is_flag=True, help="Do not run and check the result before it is put in place."
)
@set_option
@hub_options
@push_option("--push-to-hub", metavar="USER/NAME", help="Push the result there, as push does.")
@push_options
@export_options
@json_option
@quiet_option
@verbose_option
def convert(
    as_json: bool,
    quiet: bool,
    verbose: bool,
    no_verify: bool,
    link: bool,
    hard_link: bool,
    **arguments: Any,
) -> None:
    """Write a copy of MODEL with scaling built in.

    Plain transformers loads the copy. MODEL is only read.
    """
    from converter.cli import report
    from converter.pipeline import convert as run

    result = run(
        verify=not no_verify,
        link="hard" if hard_link else "reflink" if link else None,
        onnx=take_onnx(arguments),
        progress=not quiet and sys.stderr.isatty(),
        **arguments,
    )
    if as_json:
        click.echo(json.dumps(result.to_json()))
    elif result.dry_run:
        click.echo(report.plan(result))
    else:
        click.echo(str(result.path))
    if not as_json and not quiet and result.onnx is not None:
        click.echo(result.onnx.summary())
    if not quiet and not result.dry_run:
        click.echo(report.summary(result, verbose=verbose), err=True)
    if result.pushed is not None and not as_json:
        click.echo(result.pushed.url)
        if not quiet:
            click.echo(report.pushed(result.pushed, verbose=verbose), err=True)


@click.command(cls=Command)
@model_argument
@scaling_options
@set_option
@hub_options
@json_option
@verbose_option
def inspect(as_json: bool, verbose: bool, **arguments: Any) -> None:  # noqa: ARG001 -- see main
    """Show the family, size, trained length and slopes of MODEL.

    With scaling options, the scaled slopes are shown beside the original ones. Nothing is written.
    """
    from converter.cli import report
    from converter.inspection import inspect as run

    inspection = run(**arguments)
    click.echo(json.dumps(inspection.to_json()) if as_json else report.inspection(inspection))


@click.command(cls=Command)
@argument(
    "name",
    required=False,
    default="",
    help="List the known checkpoints of this family, or those with this text in their Hub id.",
)
@click.option("--markdown", is_flag=True, help="Print the table of the README.")
@json_option
def families(name: str, as_json: bool, markdown: bool) -> None:
    """List the models that can be converted.

    With NAME, the list has the known checkpoints too, with their trained lengths and the source of each.
    """
    from converter import catalogue
    from converter.cli import report

    if markdown:
        click.echo(catalogue.markdown(name))
        return
    entries = catalogue.supported(name)
    if as_json:
        click.echo(json.dumps([entry.to_json() for entry in entries]))
    else:
        click.echo(report.families(entries, checkpoints=bool(name)))


@click.command(cls=Command)
@argument(
    "folder",
    metavar="DIR",
    type=PATH,
    shell_complete=folders,
    help="Folder in which transformers saved a fine-tuned converted model.",
)
@json_option
@quiet_option
@verbose_option
def adopt(folder: Path, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Verify a fine-tuned converted model, so that it can be pushed.

    DIR gets a card and the list of its files, ntk_convert.json. Its weights are not changed.
    """
    from converter.adoption import adopt as run
    from converter.cli import report

    result = run(folder, progress=not quiet and sys.stderr.isatty())
    click.echo(json.dumps(result.to_json()) if as_json else str(result.path))
    if not quiet:
        click.echo(report.adopted(result, verbose=verbose), err=True)


@click.command(cls=Command)
@converted_argument
@argument("repo_id", metavar="USER/NAME", help="Repository on the Hub; it is created if it does not exist.")
@push_options
@push_option("--overwrite", is_flag=True, help="Replace what the repository or branch holds.")
@token_option
@json_option
@quiet_option
@verbose_option
def push(as_json: bool, quiet: bool, verbose: bool, **arguments: Any) -> None:
    """Verify a converted model and push it to the Hub.

    All files are pushed in one commit.
    """
    from converter.cli import report
    from converter.publish.push import push as run

    result = run(**arguments, progress=not quiet and sys.stderr.isatty())
    click.echo(json.dumps(result.to_json()) if as_json else result.url)
    if not quiet:
        click.echo(report.pushed(result, verbose=verbose), err=True)


COMMANDS = (convert, inspect, families, adopt, push)
