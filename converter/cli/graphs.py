"""``export``, and ``validate`` for ONNX graphs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from converter.cli.base import EXPORT, Command, section
from converter.cli.options import (
    converted_argument,
    export_options,
    json_option,
    provider_option,
    quiet_option,
    take_onnx,
    verbose_option,
)
from converter.result.manifest import MANIFEST


@click.command(cls=Command)
@converted_argument
@export_options
@section(EXPORT)(
    "--no-validate", is_flag=True, help="Do not run and check the export before it is put in place."
)
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
    """Export a converted model, as an ONNX graph.

    The graph is written into DIR and validated with onnxruntime before it is put in place.
    """
    from converter.exports.onnx.export import export as run

    options = take_onnx({**arguments, "with_onnx": True}, validate=not no_validate)
    assert options is not None
    result = run(folder, options, progress=not quiet and sys.stderr.isatty())
    click.echo(json.dumps(result.to_json()) if as_json else str(result.path))
    if not as_json and not quiet:
        click.echo(result.summary())


@click.command(cls=Command)
@converted_argument
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
    """Compare the ONNX graphs of a converted model with its torch model.

    A graph that fails is renamed to *.failed. If all pass, the config, the code, the weights and the graphs
    are compared with the SHA-256 in ntk_convert.json.
    """
    from converter.exports.onnx.validate import validate as run

    result = run(folder, provider=provider, progress=not quiet and sys.stderr.isatty())
    if as_json:
        click.echo(json.dumps(result.to_json()))
    elif not quiet:
        click.echo(result.summary())
        if not (folder / MANIFEST).is_file():
            click.echo(f"note: {folder} has no {MANIFEST}, so changed files were not looked for")
    result.check()


COMMANDS = (export, validate)
