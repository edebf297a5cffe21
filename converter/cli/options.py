"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from converter.onnx.options import DTYPES, PROFILES, OnnxOptions
from converter.scaling import DYNAMICS, METHODS

F = TypeVar("F", bound=Callable[..., Any])


class Listed(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """Values with commas between them."""

    def __init__(self, name: str, kind: Callable[[str], Any], choices: tuple[str, ...] = ()) -> None:
        self.name, self.kind, self.choices = name, kind, choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        words = [word.strip() for word in value.split(",") if word.strip()]
        for word in words:
            if self.choices and word not in self.choices:
                self.fail(f"{word!r} is none of {', '.join(self.choices)}", param, ctx)
        try:
            return tuple(self.kind(word) for word in words)
        except ValueError:
            self.fail(f"{value!r} is no list of numbers, 2,4 for one", param, ctx)


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
    click.option(
        "--dynamic", type=click.Choice(DYNAMICS), help="A grows with the row, or the position; the default."
    ),
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


def take_onnx_options(arguments: dict[str, Any], *, validate: bool = True) -> OnnxOptions:
    """Takes the graph's options out of a command's arguments."""
    return OnnxOptions(
        profile=arguments.pop("onnx_profile"),
        dtype=arguments.pop("onnx_dtype"),
        standalone=arguments.pop("onnx_standalone"),
        last_logits=arguments.pop("last_logits"),
        provider=arguments.pop("provider"),
        validate=validate,
    )
