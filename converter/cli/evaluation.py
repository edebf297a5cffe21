"""``eval``, ``tune`` and ``fit``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from converter.cli.click_additions import (
    PATH,
    Command,
    F,
    argument,
    folders,
    given,
    progress,
    say,
    section,
    show,
)
from converter.cli.options import (
    Listed,
    hub_options,
    model_argument,
    options,
    out_option,
    output_option,
    scaling_option,
    source_options,
    target_option,
    train_length_option,
    trial_options,
)
from converter.errors import NoGain, UsageError
from converter.evaluation import tasks
from converter.evaluation.results import PERPLEXITY, RESULTS, Results
from converter.evaluation.tasks import AnyTask, TaskType, make_task
from converter.evaluation.tasks.files import PromptFile

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
TASKS = (PERPLEXITY, *tasks.NAMES)

task_option = section("Tasks")
run_option = section("Computation")

seed_option = task_option(
    "--seed", type=int, default=0, show_default=True, help="Random seed of the generated prompts."
)
run_options = options(
    run_option(
        "--device",
        type=click.Choice(["cpu", "cuda", "auto"]),
        help="Where to run; by default CUDA if available. auto spreads layers over all GPUs, CPU and disk.",
    ),
    run_option("--dtype", type=click.Choice(["fp32", "fp16", "bf16"]), help="Type to compute in."),
    run_option("--batch-size", type=int, metavar="N", help="Largest number of sequences in a batch."),
)


def text_option(what: str) -> Callable[[F], F]:
    return task_option("--text", type=FILE, multiple=True, metavar="FILE", help=f"{what}; may be repeated.")


def _option(task: TaskType) -> Callable[[F], F]:
    kind, metavar = (FOLDER, "DIR") if task.folder else (FILE, "FILE")
    return task_option(task.option, task.name, type=kind, metavar=metavar, help=task.file_help)


shared_options = options(
    task_option(
        "--tasks",
        "names",
        type=Listed("LIST", str, TASKS),
        help=f"Any of {', '.join(TASKS)}; by default those that have a file, and without any file "
        f"{', '.join(tasks.GENERATED)}, as far as the model can read them (decoders only).",
    ),
    text_option("UTF-8 text for perplexity"),
    *(_option(task) for task in tasks.TYPES.values() if task.read),
    seed_option,
    run_options,
    source_options,
    hub_options,
    output_option(
        "--out",
        type=PATH,
        shell_complete=folders,
        metavar="DIR",
        help="Write JSON, tables and curves to this folder.",
    ),
    output_option("--overwrite", is_flag=True, help="Replace earlier results in that folder."),
)
"""The options of ``eval`` and ``tune``, beside items, lengths and scalings."""


def _chosen(names: tuple[str, ...] | None, arguments: dict[str, Any]) -> list[AnyTask]:
    """Removes the tasks' files from a command's arguments and returns the tasks to measure."""
    files = {name: arguments.pop(name) for name in tasks.READ}
    given_files = [name for name, file in files.items() if file is not None]
    if names:
        for name in given_files:
            if name not in names:
                option = tasks.TYPES[name].option
                raise UsageError(
                    f"--tasks {','.join(names)} does not include {name}; add it, or drop {option}"
                )
        if (PERPLEXITY in names) != bool(arguments["text"]):
            raise UsageError("perplexity in --tasks and --text FILE need each other; give both or neither")
    made = []
    for name in names or given_files:
        if name != PERPLEXITY:
            made.append(make_task(name, files.get(name)))
    if any(isinstance(task, PromptFile) and task.unsized for task in made):
        say("prompts without a length are counted under the next length that is asked for, or power of two")
    return made


def _write(place: Path | None, found: Results, more: Mapping[str, bytes] = {}) -> None:
    """Writes results into the folder of ``--out``, after they were printed: a full disk cannot lose them."""
    from converter.pictures.plotting import curves
    from converter.result.outputs import write_files

    if place is None:
        return
    files = {RESULTS: json_bytes(found.to_json()), "results.md": f"{found.report()}\n".encode()}
    paths = write_files(place, {**files, **curves(found), **more})
    say(*map(str, paths))


def json_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


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
@run_option(
    "--server",
    metavar="URL",
    help="Measure MODEL on this OpenAI-compatible server; only its config and tokenizer are read here.",
)
@run_option("--model-name", metavar="NAME", help="Name of MODEL on the server.")
@run_option("--concurrency", type=int, metavar="N", help="Requests to the server at once; 4 by default.")
@shared_options
def evaluate(
    models: tuple[str, ...],
    names: tuple[str, ...] | None,
    out: Path | None,
    overwrite: bool,
    **arguments: Any,
) -> None:
    """Measure perplexity and retrieval at several lengths.

    \b
    Examples:
      ntk-convert eval bigscience/bloom-560m ./bloom-ntk --text book.txt
      ntk-convert eval bigscience/bloom-560m --methods none,by-parts --scales 4
      ntk-convert eval ./bloom-ntk --server http://localhost:8000 --text book.txt
    """
    from converter.evaluation.evaluate import evaluate as run
    from converter.result.outputs import check_folder

    place = None if out is None else check_folder(out, overwrite=overwrite)
    measured = _chosen(names, arguments)
    result = run(models, tasks=measured, progress=progress(), say=say, **arguments)
    show(result.to_json(), result.report())
    _write(place, result)


@click.command(cls=Command)
@model_argument
@target_option
@train_length_option
@task_option(
    "--items",
    type=int,
    default=100,
    show_default=True,
    help="Prompts, or for perplexity windows of text, at each length; half choose, half judge.",
)
@scaling_option(
    "--slopes", type=FILE, metavar="FILE", help="Also try these fitted slopes (JSON), such as fit writes."
)
@shared_options
def tune(
    model: str,
    names: tuple[str, ...] | None,
    out: Path | None,
    overwrite: bool,
    **arguments: Any,
) -> None:
    """Find the best scaling for a length.

    The result includes the command that converts the model this way, or says
    that no scaling helps, or how many prompts it takes to tell.

    \b
    Example:
      ntk-convert tune bigscience/bloom-560m --target-length 8192 --text book.txt
    """
    from converter.cli import report
    from converter.evaluation.tune import tune as run
    from converter.result.outputs import check_folder

    place = None if out is None else check_folder(out, overwrite=overwrite)
    result = run(
        model,
        tasks=_chosen(names, arguments),
        progress=progress(),
        say=say,
        **arguments,
    )
    show(result.to_json(), report.tuning(result))
    _write(place, result.curve, {"tuning.json": json_bytes(result.to_json())})


@click.command(cls=Command)
@model_argument
@target_option
@scaling_option(
    "--dynamic",
    type=click.Choice(["position"]),
    help="position: fit slopes that stay as they are up to the trained length (default for decoders).",
)
@scaling_option("--static", is_flag=True, help="Fit the same slopes for every length (default for encoders).")
@scaling_option("--shared", is_flag=True, help="Fit the same slopes for all layers.")
@scaling_option("--temperatures", is_flag=True, help="Fit a factor on the queries of each head too.")
@train_length_option
@text_option("UTF-8 text to fit to")
@_option(tasks.TYPES["prompts"])
@seed_option
@run_options
@run_option("--steps", type=int, default=200, show_default=True, help="Most steps.")
@run_option("--minutes", type=float, default=10, show_default=True, help="Most time, approximately.")
@source_options
@hub_options
@out_option
@output_option("--overwrite", is_flag=True, help="Replace DIR once the new folder is complete.")
def fit(model: str, out: Path, overwrite: bool, **arguments: Any) -> None:
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
    from converter.conversion import convert
    from converter.evaluation.fit import fit as run
    from converter.model.open import SourceOptions

    source = {name: arguments[name] for name in SourceOptions.__annotations__}
    convert(model, out, method="none", overwrite=overwrite, dry_run=True, **source)  # before the long work
    file = arguments.pop("prompts")
    try:
        found = run(
            model,
            prompts=[] if file is None else [make_task("prompts", file)],
            progress=progress(),
            say=say,
            **arguments,
        )
    except NoGain as error:
        show({"verdict": error.verdict})
        raise
    say(report.fitted(found))
    result = convert(model, out, slopes=found.slopes, overwrite=overwrite, progress=progress(), **source)
    content = {"verdict": "helps", "fit": found.to_json(), "conversion": result.to_json()}
    show(content, str(result.path))
    say(report.summary(result, verbose=given("verbose")))


COMMANDS = (evaluate, tune, fit)
