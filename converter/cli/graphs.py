"""``export`` and ``validate``, of ONNX graphs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from converter.cli.options import (
    json_option,
    onnx_options,
    provider_option,
    quiet_option,
    take_onnx_options,
    verbose_option,
)


@click.command()
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

    options = take_onnx_options(arguments, validate=not no_validate)
    result = run(folder, options, progress=not quiet and sys.stderr.isatty())
    click.echo(json.dumps(result.to_json()) if as_json else str(result.path))
    if not as_json and not quiet:
        click.echo(report.exported(result))


@click.command()
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


COMMANDS = (export, validate)
