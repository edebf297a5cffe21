"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from converter.cli.click_additions import PATH, F, argument, folders, section
from converter.errors import UsageError
from converter.onnx.options import DTYPES, POOLINGS, PROFILES, PROVIDERS, TASKS, OnnxOptions
from converter.scaling.scaling import BASES, METHODS


def _parsed(_: click.Context, __: click.Parameter, values: Sequence[str]) -> Mapping[str, Any]:
    """The values of ``--set`` by key."""
    from converter.model.overrides import parse

    result: dict[str, Any] = {}
    for key, value in map(parse, values):
        if key in result:
            raise UsageError(f"--set {key} is given twice; drop one of them")
        result[key] = value
    return result


class Listed(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    def __init__(self, name: str, kind: Callable[[str], Any], choices: tuple[str, ...] = ()) -> None:
        self.name, self.kind, self.choices = name, kind, choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        words = [word.strip() for word in value.split(",") if word.strip()]
        for word in words:
            if self.choices and word not in self.choices:
                self.fail(f"{word!r} is not one of {', '.join(self.choices)}", param, ctx)
        try:
            return tuple(self.kind(word) for word in words)
        except ValueError:
            self.fail(f"{value!r} is not a comma-separated list of numbers, e.g. 2,4", param, ctx)


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several click options as one decorator, in the order given."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def negated(_: click.Context, __: click.Parameter, value: bool) -> bool:
    """The value of a parameter that the flag ``--no-...`` turns off."""
    return not value


model_argument = argument(
    "model",
    shell_complete=folders,
    help="A local folder, or else a model id on the Hub (bigscience/bloom-1b7).",
)
converted_argument = argument(
    "folder", metavar="DIR", type=PATH, shell_complete=folders, help="Folder of a converted model."
)

scaling_option = section("Scaling")
output_option = section("Output")
hub_option = section("Hub access")
push_option = section("Push to the Hub")
export_option = section("Export")

out_option = output_option(
    "--out", required=True, type=PATH, shell_complete=folders, metavar="DIR", help="Folder to write."
)
train_length_option = scaling_option(
    "--train-length", type=int, metavar="N", help="Trained length in tokens, if the checkpoint is not known."
)
target_option = scaling_option(
    "--target-length", type=int, required=True, metavar="N", help="Length to reach, in tokens."
)
trial_options = options(
    scaling_option(
        "--methods",
        type=Listed("LIST", str, METHODS),
        default="",
        help="Methods to compare, e.g. none,concave,by-parts.",
    ),
    scaling_option(
        "--scales", type=Listed("LIST", float), default="", help="Scale factors of each method, e.g. 2,4."
    ),
    scaling_option(
        "--dynamic",
        type=Listed("LIST", str, BASES),
        default="",
        help="Also dynamic scaling: length, position or both.",
    ),
    scaling_option(
        "--rates", type=Listed("LIST", float), default="", help="Rates of dynamic scaling; 1 by default."
    ),
    scaling_option(
        "--ramp",
        "ramps",
        type=(float, float),
        multiple=True,
        metavar="LO HI",
        help="Ramp of by-parts, in parts of the trained length; may be repeated.",
    ),
    train_length_option,
)
source_option = section("Source")
source_options = options(
    source_option("--subfolder", metavar="NAME", help="Folder in MODEL that holds the checkpoint."),
    source_option(
        "--set",
        "overrides",
        multiple=True,
        callback=_parsed,
        metavar="KEY=VALUE",
        help="Value for a key that MODEL's config.json lacks or has wrong, e.g. norm_head=true; may be "
        "repeated.",
    ),
)
scaling_options = options(
    scaling_option("--scale", type=float, metavar="A", help="Scale factor, at least 1."),
    scaling_option(
        "--target-length",
        type=int,
        metavar="N",
        help="Length to reach in tokens, by one factor for all lengths: A = N / trained length. The "
        "default, by position, needs none.",
    ),
    scaling_option(
        "--method",
        type=click.Choice(METHODS),
        help="How to scale the positions; none leaves them as they are. By default ntk, or by-parts where a "
        "decoder's scaling is dynamic.",
    ),
    scaling_option(
        "--dynamic",
        type=click.Choice(BASES),
        help="Let the factor grow with the sequence length or with each query's position (default).",
    ),
    scaling_option(
        "--rate",
        type=float,
        metavar="A0",
        help="Rate of dynamic scaling: A = max(1, A0 * tokens / trained length). 1 by default.",
    ),
    scaling_option(
        "--ramp",
        type=(float, float),
        metavar="LO HI",
        help="Spans where by-parts (then the default) starts to scale, and scales fully, in parts of the "
        "trained length.",
    ),
    scaling_option(
        "--slopes",
        type=PATH,
        metavar="FILE",
        help="Fitted slopes (JSON), instead of a method and its strength.",
    ),
    train_length_option,
)


token_option = hub_option(
    "--token", metavar="TOKEN", help="Hub access token; by default HF_TOKEN or the saved login."
)
hub_options = options(
    hub_option("--revision", metavar="REV", help="Branch, tag or commit of a Hub id."),
    token_option,
    hub_option(
        "--cache-dir", type=PATH, shell_complete=folders, metavar="DIR", help="Folder of the Hub cache."
    ),
)
push_options = options(
    push_option("--private", is_flag=True, help="Create the repository as a private one."),
    push_option(
        "--branch", metavar="NAME", help="Commit to this branch; it is created if it does not exist."
    ),
    push_option("--create-pr", is_flag=True, help="Open a pull request instead of committing."),
)


PROVIDER: dict[str, Any] = {
    "type": click.Choice([*PROVIDERS]),
    "help": "Where to validate; by default on the CPU, and on CUDA if there is one.",
}
onnx_options = options(
    export_option(
        "--onnx-profile",
        type=click.Choice(PROFILES),
        default=OnnxOptions.profile,
        show_default=True,
        help="onnxruntime's fused attention, or standard ONNX operators.",
    ),
    export_option(
        "--onnx-dtype",
        type=click.Choice(DTYPES),
        default=OnnxOptions.dtype,
        show_default=True,
        help="Dtype that the graph computes in, or bits of its weights, or both.",
    ),
    export_option(
        "--onnx-task",
        type=click.Choice(TASKS),
        metavar="TASK",
        help="What the graph computes, such as fill-mask; by default what the model's class does. "
        "feature-extraction gives the hidden states of an encoder with any head.",
    ),
    export_option(
        "--pooled",
        "onnx_pooled",
        is_flag=True,
        help="Also compute one vector of each text (sentence_embedding), pooled as the model's files for "
        "sentence-transformers say.",
    ),
    export_option(
        "--pooling",
        "onnx_pooling",
        type=click.Choice(POOLINGS),
        help="With --pooled, how to pool a model without such files: the mean of all tokens, or the first.",
    ),
    export_option(
        "--onnx-standalone",
        is_flag=True,
        help="Write onnx/model.onnx, with a copy of the weights.",
    ),
    export_option(
        "--calibrate",
        "onnx_calibrate",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Text like what the model will read. int4 weights are rounded so that the layers compute almost "
        "the same on it. May be repeated.",
    ),
    export_option(
        "--last-logits",
        "onnx_last_logits",
        is_flag=True,
        help="Compute the logits of each row's last token only.",
    ),
    export_option("--provider", "onnx_provider", **PROVIDER),
)
"""Parameters ``onnx_NAME`` for the fields of ``OnnxOptions``."""


def take_onnx(arguments: dict[str, Any]) -> OnnxOptions:
    """Removes the parameters of ``onnx_options`` from a command's arguments, and returns their values."""
    names = [name for name in arguments if name.startswith("onnx_")]
    return OnnxOptions(**{name.removeprefix("onnx_"): arguments.pop(name) for name in names})
