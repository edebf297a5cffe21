"""``export``, and ``validate`` for ONNX graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from converter.cli.click_additions import Command, given, progress, show
from converter.cli.options import (
    PROVIDER,
    converted_argument,
    export_option,
    negated,
    onnx_options,
    take_onnx,
)
from converter.result.manifest import MANIFEST


@click.command(cls=Command)
@converted_argument
@onnx_options
@export_option(
    "--no-validate",
    "onnx_validate",
    is_flag=True,
    callback=negated,
    help="Do not run and check the export before it is put in place.",
)
def export(folder: Path, **arguments: Any) -> None:
    """Export a converted model, as an ONNX graph.

    The graph is written into DIR and validated with onnxruntime before it is put in place.
    """
    from converter.exports.onnx.export import export as run

    result = run(folder, take_onnx(arguments), progress=progress())
    show(result.to_json(), str(result.path), *([] if given("quiet") else [result.summary()]))


@click.command(cls=Command)
@converted_argument
@click.option("--provider", **PROVIDER)
def validate(folder: Path, provider: str | None) -> None:
    """Compare the ONNX graphs of a converted model with its torch model.

    A graph that fails is renamed to *.failed. If all pass, the config, the code, the weights and the graphs
    are compared with the SHA-256 in ntk_convert.json.
    """
    from converter.exports.onnx.validate import validate as run

    result = run(folder, provider=provider, progress=progress())
    lines = [] if given("quiet") else [result.summary()]
    if lines and not (folder / MANIFEST).is_file():
        lines.append(f"note: {folder} has no {MANIFEST}, so changed files were not looked for")
    show(result.to_json(), *lines)
    result.check()


COMMANDS = (export, validate)
