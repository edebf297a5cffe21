"""``eval`` and ``tune``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from converter.cli.options import (
    Listed,
    hub_options,
    json_option,
    options,
    quiet_option,
    verbose_option,
)
from converter.errors import UsageError
from converter.scaling import DYNAMICS, METHODS

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
FILE_TASKS = ("topics", "trec", "multifieldqa_en", "prompts")
"""Tasks that are read from a file, which an option of their name gives."""
TASKS = ("perplexity", "passkey", "lines", *FILE_TASKS)


measuring_options = options(
    click.option("--text", type=FILE, multiple=True, metavar="FILE", help="UTF-8 text, for perplexity."),
    click.option("--prompts", type=FILE, metavar="FILE", help="Prompts of your own, as JSON lines."),
    click.option("--train-length", type=int, metavar="N", help="Trained length, if it is not a known model."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts that are made."),
    click.option("--device", type=click.Choice(["cpu", "cuda"]), help="CUDA where there is one by default."),
    click.option("--dtype", type=click.Choice(["fp32", "fp16", "bf16"]), help="What to compute in."),
    click.option("--batch-size", type=int, metavar="N", help="Rows at once, at most."),
)
result_options = options(
    hub_options,
    click.option(
        "--out", type=click.Path(path_type=Path), metavar="DIR", help="Write JSON, CSV, tables, curves."
    ),
    click.option("--overwrite", is_flag=True, help="Replace results in that folder."),
    json_option,
    quiet_option,
    verbose_option,
)


def _tasks(chosen: tuple[str, ...] | None, arguments: dict[str, Any]) -> list[Any]:
    """Takes the tasks' files out of a command's arguments; the tasks that are to be measured."""
    from converter.evaluation.tasks import Lines, make_task

    count = arguments.pop("num_lines")
    files = {name: arguments.pop(name) for name in ("lines", *FILE_TASKS)}
    given = tuple(name for name in FILE_TASKS if files[name] is not None)
    names = chosen if chosen is not None else ("passkey", "lines", *given)
    for name, file in files.items():
        if file is not None and name not in names:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is not among the --tasks {','.join(names)}; add {name}, or drop it")
    if ("perplexity" in names) != bool(arguments["text"]) and chosen is not None:
        raise UsageError("perplexity is measured on --text FILE; give both or neither")
    if count is not None and (files["lines"] is not None or "lines" not in names):
        raise UsageError("--num-lines is for the task lines where it reads no file; drop it, or --lines")
    return [
        Lines(count) if name == "lines" and count is not None else make_task(name, files.get(name))
        for name in names
        if name != "perplexity"
    ]


@click.command("eval")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option(
    "--methods", type=Listed("LIST", str, METHODS), default="", help="Scalings to try: none,linear,ntk."
)
@click.option("--scales", type=Listed("LIST", float), default="", help="Each with these factors: 2,4.")
@click.option(
    "--dynamic",
    "dynamics",
    type=Listed("LIST", str, DYNAMICS),
    default="",
    help="And growing with length,position.",
)
@click.option("--rates", type=Listed("LIST", float), default="", help="Of --dynamic; 1 by default.")
@click.option("--tasks", type=Listed("LIST", str, TASKS), help="All that --text and files allow by default.")
@click.option("--lines", type=FILE, metavar="FILE", help="LongEval's lines cases; made here by default.")
@click.option("--num-lines", type=int, metavar="N", help="Lines of each prompt, whatever the length.")
@click.option("--topics", type=FILE, metavar="FILE", help="LongEval's topics cases.")
@click.option("--trec", type=FILE, metavar="FILE", help="LongBench's trec.jsonl.")
@click.option("--multifieldqa-en", type=FILE, metavar="FILE", help="LongBench's multifieldqa_en.jsonl.")
@click.option("--lengths", type=Listed("LIST", int), default="", help="Tokens; 1, 2, 4 x trained by default.")
@click.option("--items", type=int, default=50, show_default=True, help="Prompts, or windows, of a length.")
@measuring_options
@result_options
def evaluate(
    models: tuple[str, ...],
    tasks: tuple[str, ...] | None,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,  # noqa: ARG001 -- see main
    **arguments: Any,
) -> None:
    """Measure perplexity and retrieval of MODEL, stock or converted, by length.

    \b
    ntk-convert eval bigscience/bloom-560m ./bloom-ntk --text book.txt
    ntk-convert eval bigscience/bloom-560m --methods none,linear,ntk --scales 2,4
    """
    from converter.evaluation.evaluate import evaluate as run
    from converter.evaluation.files import result_files
    from converter.outputs import check_folder, write_files

    place = None if out is None else check_folder(out, overwrite=overwrite)
    chosen = _tasks(tasks, arguments)
    result = run(models, tasks=chosen, progress=not quiet and sys.stderr.isatty(), **arguments)
    click.echo(json.dumps(result.to_json()) if as_json else result.report())
    if place is not None:  # after the result is said, which a full disk must not lose
        paths = write_files(place, result_files(result))
        if not quiet:
            click.echo("\n".join(str(path) for path in paths), err=True)


@click.command()
@click.argument("model")
@click.option("--target-length", type=int, required=True, metavar="N", help="Tokens to reach.")
@click.option(
    "--tasks",
    type=Listed("LIST", str, ("passkey", "lines")),
    help="passkey,lines by default; none with --prompts.",
)
@measuring_options
@click.option("--minutes", type=float, default=10, show_default=True, help="What it may take, about.")
@result_options
def tune(
    model: str,
    tasks: tuple[str, ...] | None,
    prompts: Path | None,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,  # noqa: ARG001 -- see main
    **arguments: Any,
) -> None:
    """Find the scaling that serves a length best, and the command that bakes it in.

    \b
    ntk-convert tune bigscience/bloom-560m --target-length 8192 --text book.txt
    """
    from converter import report
    from converter.evaluation.files import json_bytes, result_files
    from converter.evaluation.tasks import make_task
    from converter.evaluation.tune import tune as run
    from converter.outputs import check_folder, write_files

    place = None if out is None else check_folder(out, overwrite=overwrite)
    names = tasks if tasks is not None else () if prompts else ("passkey", "lines")
    chosen = [make_task(name) for name in names] + ([make_task("prompts", prompts)] if prompts else [])
    result = run(model, tasks=chosen, progress=not quiet and sys.stderr.isatty(), **arguments)
    click.echo(json.dumps(result.to_json()) if as_json else report.tuning(result))
    if place is not None:  # after the result is said, which a full disk must not lose
        files = result_files(result.curve) | {"tuning.json": json_bytes(result.to_json())}
        paths = write_files(place, files)
        if not quiet:
            click.echo("\n".join(str(path) for path in paths), err=True)


COMMANDS = (evaluate, tune)
