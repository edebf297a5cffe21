"""``fit``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from converter.cli.base import PATH, Command, argument, folders
from converter.cli.evaluation import (
    FILE,
    fitting_options,
    run_option,
    run_options,
    seed_option,
    task_option,
)
from converter.cli.options import (
    hub_options,
    json_option,
    output_option,
    quiet_option,
    scaling_option,
    set_option,
    target_option,
    train_length_option,
    verbose_option,
)
from converter.evaluation.tasks import make_task
from converter.scaling.scaling import BASES


@click.command(cls=Command)
@argument("model", shell_complete=folders, help="A local folder, or else a model id on the Hub.")
@target_option
@scaling_option(
    "--dynamic",
    type=click.Choice(BASES),
    help="position: fit slopes that stay as they are up to the trained length (default for decoders).",
)
@scaling_option("--static", is_flag=True, help="Fit the same slopes for every length (default for encoders).")
@scaling_option("--shared", is_flag=True, help="Fit the same slopes for all layers.")
@scaling_option("--temperatures", is_flag=True, help="Fit a factor on the queries of each head too.")
@train_length_option
@task_option(
    "--text", type=FILE, multiple=True, metavar="FILE", help="UTF-8 text to fit to; may be repeated."
)
@fitting_options
@seed_option
@run_options
@run_option("--steps", type=int, default=200, show_default=True, help="Most steps.")
@run_option("--minutes", type=float, default=10, show_default=True, help="Most time, approximately.")
@set_option
@hub_options
@output_option(
    "--out", required=True, type=PATH, shell_complete=folders, metavar="DIR", help="Folder to write."
)
@output_option("--overwrite", is_flag=True, help="Replace DIR once the new folder is complete.")
@json_option
@quiet_option
@verbose_option
def fit(
    model: str,
    out: Path,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **arguments: Any,
) -> None:
    """Fit slopes to your text, and write a copy of MODEL with them.

    One number for each layer and head is learned; the weights stay as they are.
    The result is judged on a part of the text that is kept back. If it is not
    better there, nothing is written. Ctrl-C ends the fit, and the best slopes so
    far are used.

    \b
    Examples:
      ntk-convert fit MODEL --target-length 8192 --text book.txt --out DIR
      ntk-convert fit MODEL --target-length 8192 --prompts asked.jsonl --out DIR
    """
    from converter.cli import report
    from converter.evaluation.fit import fit as run
    from converter.pipeline import convert

    names = ("train_length", "overrides", "revision", "token", "cache_dir")
    source = {name: arguments[name] for name in names}
    progress = not quiet and sys.stderr.isatty()
    convert(model, out, method="none", overwrite=overwrite, dry_run=True, **source)  # before the long work
    file = arguments.pop("prompts")
    found = run(
        model,
        prompts=[] if file is None else [make_task("prompts", file)],
        progress=progress,
        say=str if quiet else lambda line: click.echo(line, err=True),
        **arguments,
    )
    if not quiet:
        click.echo(report.fitted(found), err=True)
    result = convert(model, out, slopes=found.slopes, overwrite=overwrite, progress=progress, **source)
    if as_json:
        click.echo(json.dumps({"fit": found.to_json(), "conversion": result.to_json()}))
    else:
        click.echo(str(result.path))
    if not quiet:
        click.echo(report.summary(result, verbose=verbose), err=True)


COMMANDS = (fit,)
