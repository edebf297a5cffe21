"""``eval`` and ``tune``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from converter.cli.base import PATH, Command, F, argument, folders, section
from converter.cli.options import (
    Listed,
    hub_options,
    json_option,
    options,
    output_option,
    quiet_option,
    scaling_option,
    set_option,
    target_option,
    train_length_option,
    trial_options,
    verbose_option,
)
from converter.errors import UsageError
from converter.evaluation import tasks
from converter.evaluation.results import PERPLEXITY
from converter.evaluation.tasks import AnyTask, TaskType, make_task
from converter.scaling.request import SLOPES_FILE

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
TASKS = (PERPLEXITY, *tasks.NAMES)
DEFAULTS = (
    " (in encoders ".join(
        ", ".join(name for name in tasks.GENERATED if (name in tasks.EMBEDDED) == embeds)
        for embeds in (False, True)
    )
    + ")"
)
"""What is measured without ``--tasks``, for help texts."""

task_option = section("Tasks")
run_option = section("Computation")

text_option = task_option(
    "--text", type=FILE, multiple=True, metavar="FILE", help="UTF-8 text for perplexity; may be repeated."
)
seed_option = task_option(
    "--seed", type=int, default=0, show_default=True, help="Random seed of the generated prompts."
)
run_options = options(
    run_option(
        "--device", type=click.Choice(["cpu", "cuda"]), help="Where to run; by default CUDA if available."
    ),
    run_option("--dtype", type=click.Choice(["fp32", "fp16", "bf16"]), help="Type to compute in."),
    run_option("--batch-size", type=int, metavar="N", help="Largest number of sequences in a batch."),
)
result_options = options(
    output_option(
        "--out",
        type=PATH,
        shell_complete=folders,
        metavar="DIR",
        help="Write JSON, CSV, tables and curves to this folder.",
    ),
    output_option("--overwrite", is_flag=True, help="Replace earlier results in that folder."),
    json_option,
    quiet_option,
    verbose_option,
)


def _option(task: TaskType) -> Callable[[F], F]:
    """The option that takes a task's file."""
    kind, metavar = (FOLDER, "DIR") if task.folder else (FILE, "FILE")
    return task_option(task.option, task.name, type=kind, metavar=metavar, help=task.file_help)


def _size_option(task: TaskType) -> Callable[[F], F]:
    """The option that sets the size of a task's generated prompts."""
    return task_option(task.size_option, f"num_{task.name}", type=int, metavar="N", help=task.size_help)


TYPES = tasks.TYPES.values()
file_options = options(
    *(
        option(task)
        for task in TYPES
        for option, offered in ((_option, task.read), (_size_option, task.generate_sized))
        if offered
    )
)
TUNED = tuple(task for task in TYPES if task.tunes)
"""Tasks whose files ``tune`` takes."""
tuning_options = options(*map(_option, TUNED))
FITTED = tuple(task for task in TUNED if not task.embeds)
"""Tasks whose files ``fit`` takes."""
fitting_options = options(*map(_option, FITTED))


def _chosen(names: tuple[str, ...] | None, arguments: dict[str, Any]) -> list[AnyTask]:
    """Removes the tasks' files and sizes from a command's arguments and returns the tasks to measure."""
    files = {name: arguments.pop(name) for name in tasks.READ}
    sizes = {task.name: arguments.pop(f"num_{task.name}") for task in TYPES if task.generate_sized}
    given = tuple(name for name, file in files.items() if file is not None)
    sized = tuple(name for name, size in sizes.items() if size is not None)
    # Without names, the model decides which tasks are generated beside these.
    wanted = (*given, *(name for name in sized if name not in given)) if names is None else names
    for name, file in files.items():
        if file is not None and name not in wanted:
            option = tasks.TYPES[name].option
            raise UsageError(f"--tasks {','.join(wanted)} does not include {name}; add it, or drop {option}")
    if names is not None and (PERPLEXITY in names) != bool(arguments["text"]):
        raise UsageError("perplexity in --tasks and --text FILE need each other; give both or neither")
    for name, size in sizes.items():
        if size is not None and name not in wanted:
            option = tasks.TYPES[name].size_option
            raise UsageError(f"--tasks {','.join(wanted)} does not include {name}; add it, or drop {option}")
    return [make_task(name, files.get(name), sizes.get(name)) for name in wanted if name != PERPLEXITY]


@click.command("eval", cls=Command)
@argument(
    "models",
    shell_complete=folders,
    nargs=-1,
    required=True,
    metavar="MODEL...",
    help="Local folders or Hub ids, of original or converted models.",
)
@trial_options
@task_option(
    "--tasks",
    "names",
    type=Listed("LIST", str, TASKS),
    help=f"Any of {', '.join(TASKS)}; by default those that have a file, and {DEFAULTS}.",
)
@task_option(
    "--lengths",
    type=Listed("LIST", int),
    default="",
    help="Lengths in tokens; by default 1, 2 and 4 times the trained length.",
)
@task_option(
    "--items",
    type=int,
    default=50,
    show_default=True,
    help="Prompts, or for perplexity windows of text, at each length.",
)
@text_option
@file_options
@seed_option
@run_options
@set_option
@hub_options
@result_options
def evaluate(
    models: tuple[str, ...],
    names: tuple[str, ...] | None,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,  # noqa: ARG001 -- see main
    **arguments: Any,
) -> None:
    """Measure perplexity and retrieval at several lengths.

    \b
    Examples:
      ntk-convert eval bigscience/bloom-560m ./bloom-ntk --text book.txt
      ntk-convert eval bigscience/bloom-560m --methods none,ntk --scales 2,4
    """
    from converter.cli.results import result_files
    from converter.evaluation.evaluate import evaluate as run
    from converter.result.outputs import check_folder, write_files

    place = None if out is None else check_folder(out, overwrite=overwrite)
    measured = _chosen(names, arguments)
    progress = not quiet and sys.stderr.isatty()
    result = run(models, tasks=measured, generated=names is None, progress=progress, **arguments)
    click.echo(json.dumps(result.to_json()) if as_json else result.report())
    if place is not None:  # printed first, so a full disk cannot lose it
        paths = write_files(place, result_files(result))
        if not quiet:
            click.echo("\n".join(str(path) for path in paths), err=True)


@click.command(cls=Command)
@argument("model", shell_complete=folders, help="A local folder, or else a model id on the Hub.")
@target_option
@train_length_option
@task_option(
    "--tasks",
    "names",
    type=Listed("LIST", str, tasks.GENERATED),
    help=f"Any of {', '.join(tasks.GENERATED)}; by default all for this kind of model, or with a file of "
    "prompts or texts none of them.",
)
@text_option
@tuning_options
@seed_option
@run_options
@run_option(
    "--minutes", type=float, default=10, show_default=True, help="Time for the search, approximately."
)
@scaling_option("--fit", is_flag=True, help="Also try slopes fitted to a part of the prompts and text.")
@set_option
@hub_options
@result_options
def tune(
    model: str,
    names: tuple[str, ...] | None,
    fit: bool,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,  # noqa: ARG001 -- see main
    **arguments: Any,
) -> None:
    """Find the best scaling for a length.

    The result includes the command that converts the model this way.

    \b
    Example:
      ntk-convert tune bigscience/bloom-560m --target-length 8192 --text book.txt
    """
    from converter.cli import report
    from converter.cli.results import json_bytes, result_files
    from converter.evaluation.tune import tune as run
    from converter.result.outputs import check_folder, write_files

    if fit and out is None:
        raise UsageError("--fit keeps the fitted slopes in a folder; give --out")
    place = None if out is None else check_folder(out, overwrite=overwrite)
    fitted = str(out / SLOPES_FILE) if out is not None and fit else None
    files = {task.name: arguments.pop(task.name) for task in TUNED}
    given = [make_task(name, file) for name, file in files.items() if file is not None]
    measured = [*map(make_task, names or ()), *given]
    generated = names is None and not given
    progress = not quiet and sys.stderr.isatty()
    result = run(model, tasks=measured, generated=generated, fitted=fitted, progress=progress, **arguments)
    click.echo(json.dumps(result.to_json()) if as_json else report.tuning(result))
    if place is not None:  # printed first, so a full disk cannot lose it
        files = result_files(result.curve) | {"tuning.json": json_bytes(result.to_json())}
        files |= {} if result.slopes is None else {SLOPES_FILE: json_bytes(result.slopes)}
        paths = write_files(place, files)
        if not quiet:
            click.echo("\n".join(str(path) for path in paths), err=True)


COMMANDS = (evaluate, tune)
