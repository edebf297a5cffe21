"""The command line's options for ONNX graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from converter.exports.onnx.choices import DTYPES, PROFILES, TASKS
from converter.exports.onnx.options import OnnxOptions

provider_option = click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda"]),
    help="Where to validate; by default on the CPU, and on CUDA if there is one.",
)
OPTIONS = (
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
        help="Dtype that the graph computes in, or bits of its weights.",
    ),
    click.option(
        "--onnx-task",
        type=click.Choice(TASKS),
        metavar="TASK",
        help="What the graph computes, such as fill-mask; by default what the model's class does. "
        "feature-extraction gives the hidden states of an encoder with any head.",
    ),
    click.option(
        "--pooled",
        is_flag=True,
        help="Also compute one vector of each text (sentence_embedding), pooled as the model's files for "
        "sentence-transformers say.",
    ),
    click.option(
        "--onnx-standalone", is_flag=True, help="Write onnx/model.onnx, with a copy of the weights."
    ),
    click.option(
        "--calibrate",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Text like what the model will read. int4 weights are rounded so that the layers compute almost "
        "the same on it. May be repeated.",
    ),
    click.option("--last-logits", is_flag=True, help="Compute the logits of each row's last token only."),
    provider_option,
)
"""The options of a graph, as decorators of a command."""


def take(arguments: dict[str, Any], *, validate: bool = True) -> OnnxOptions:
    """Takes the graph's options out of a command's arguments; see ``ExportKind.take``."""
    return OnnxOptions(
        profile=arguments.pop("onnx_profile"),
        dtype=arguments.pop("onnx_dtype"),
        task=arguments.pop("onnx_task"),
        pooled=arguments.pop("pooled"),
        standalone=arguments.pop("onnx_standalone"),
        last_logits=arguments.pop("last_logits"),
        calibrate=arguments.pop("calibrate"),
        provider=arguments.pop("provider"),
        validate=validate,
    )
