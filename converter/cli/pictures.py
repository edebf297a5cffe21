"""``plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from converter.cli.options import Listed, hub_options, verbose_option
from converter.scaling import DYNAMICS, METHODS, Dynamic, Method


@click.command()
@click.argument("subject", metavar="MODEL|RESULTS.json")
@click.option(
    "--methods", type=Listed("LIST", str, METHODS), help="Scalings to show; ntk where a strength is given."
)
@click.option("--scales", type=Listed("LIST", float), default="", help="Each with these factors: 2,4.")
@click.option(
    "--dynamic", "dynamics", type=Listed("LIST", str, DYNAMICS), default="", help="And dynamically."
)
@click.option("--rates", type=Listed("LIST", float), default="", help="Of --dynamic; 1 by default.")
@click.option("--train-length", type=int, metavar="N", help="Trained length, if it is not a known model.")
@click.option("--heads", type=Listed("LIST", int), help="Heads, from 0, whose bias is drawn: 0,5,11.")
@click.option("--nats", type=float, metavar="N", help="The bias at which a head's span ends; 5 by default.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["png", "svg"]),
    default="png",
    show_default=True,
    help="Of the files.",
)
@hub_options
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Folder to write.")
@click.option("--overwrite", is_flag=True, help="Write into a folder that is not empty.")
@verbose_option
def plot(
    subject: str,
    methods: tuple[Method, ...] | None,
    scales: tuple[float, ...],
    dynamics: tuple[Dynamic, ...],
    rates: tuple[float, ...],
    train_length: int | None,
    verbose: bool,  # noqa: ARG001 -- see main
    **arguments: Any,
) -> None:
    """Draw the slopes, spans and biases of a MODEL, stock beside scaled, or the curves of an evaluation.

    \b
    ntk-convert plot bigscience/bloom-1b7 --methods ntk,linear --scales 2 --out ./pictures
    ntk-convert plot ./bloom-ntk --out ./pictures
    ntk-convert plot ./evaluation/results.json --out ./pictures
    """
    from converter.evaluation.trials import trials
    from converter.pictures.plotting import plot as run

    # Without any of these options, what a converted repository has.
    asked = methods is not None or scales or dynamics or rates
    chosen: tuple[Method, ...] = ("ntk",) if methods is None else methods
    scalings = trials(chosen, scales, dynamics, rates, train_length) if asked else []
    for path in run(subject, scalings=scalings, train_length=train_length, **arguments):
        click.echo(str(path))


COMMANDS = (plot,)
