"""``plot``."""

from __future__ import annotations

from typing import Any

import click

from converter.cli.click_additions import Command, argument, files, show
from converter.cli.options import (
    Listed,
    hub_options,
    out_option,
    output_option,
    set_option,
    trial_options,
)
from converter.scaling.request import Parts
from converter.scaling.scaling import Basis, Method


@click.command(cls=Command)
@argument(
    "subject",
    shell_complete=files,
    metavar="MODEL|RESULTS.json",
    help="A local folder or a model id on the Hub, or the results.json that eval or tune wrote.",
)
@trial_options
@output_option(
    "--heads", type=Listed("LIST", int), help="Heads whose bias is drawn, counted from 0, e.g. 0,5,11."
)
@output_option(
    "--nats", type=float, metavar="N", help="A head's span ends where its bias reaches this; 5 by default."
)
@output_option(
    "--format",
    "form",
    type=click.Choice(["png", "svg"]),
    default="png",
    show_default=True,
    help="Format of the files.",
)
@out_option
@output_option("--overwrite", is_flag=True, help="Write into a folder that is not empty.")
@set_option
@hub_options
def plot(
    subject: str,
    methods: tuple[Method, ...],
    scales: tuple[float, ...],
    dynamics: tuple[Basis, ...],
    rates: tuple[float, ...],
    ramps: tuple[Parts, ...],
    train_length: int | None,
    **arguments: Any,
) -> None:
    """Draw slopes, spans and biases, or the curves of an evaluation.

    A strength without --methods is one of ntk.

    \b
    Examples:
      ntk-convert plot bigscience/bloom-1b7 --scales 2 --out ./pictures
      ntk-convert plot ./bloom-ntk --out ./pictures
      ntk-convert plot ./evaluation/results.json --out ./pictures
    """
    from converter.evaluation.scalings import trials
    from converter.pictures.plotting import plot as run

    # Without any of these options, a converted model's own scaling is drawn.
    asked = methods or scales or dynamics or rates or ramps
    scalings = trials(methods or ("ntk",), scales, dynamics, rates, train_length, ramps) if asked else []
    files = [str(path) for path in run(subject, scalings=scalings, train_length=train_length, **arguments)]
    show({"files": files}, *files)


COMMANDS = (plot,)
