"""``convert``, ``inspect``, ``families`` and ``push``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from converter.cli.options import (
    hub_options,
    json_option,
    onnx_options,
    push_options,
    quiet_option,
    scaling_options,
    take_onnx_options,
    verbose_option,
)
from converter.errors import UsageError
from converter.onnx.options import OnnxOptions
from converter.weights.transfer import DTYPES as WEIGHT_DTYPES


@click.command()
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

    onnx = take_onnx_options(arguments)
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


@click.command()
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


@click.command()
@click.option("--markdown", is_flag=True, help="As the README's table.")
@json_option
def families(as_json: bool, markdown: bool) -> None:
    """List the models that can be converted."""
    from converter import catalogue, report

    if as_json:
        click.echo(json.dumps([entry.to_json() for entry in catalogue.supported()]))
    else:
        click.echo(catalogue.markdown() if markdown else report.families(catalogue.supported()))


@click.command()
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


COMMANDS = (convert, inspect, families, push)
