"""All commands but ``eval``, ``tune`` and ``fit``."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converter.cli.click_additions import (
    Command,
    argument,
    files,
    given,
    progress,
    say,
    section,
    show,
)
from converter.cli.options import (
    PROVIDER,
    converted_argument,
    export_option,
    hub_options,
    model_argument,
    negated,
    onnx_options,
    out_option,
    output_option,
    push_option,
    push_options,
    scaling_options,
    source_options,
    take_onnx,
    token_option,
    trial_options,
)
from converter.errors import ConverterError, UsageError, option
from converter.formatting import argv
from converter.interrupts import Interrupted
from converter.onnx.options import DTYPES as ONNX_DTYPES
from converter.onnx.options import OnnxOptions
from converter.scaling.scaling import read_scaling
from converter.weights.transfer import DTYPES as WEIGHT_DTYPES

if TYPE_CHECKING:
    from converter.conversion import Conversion
    from converter.publish.push import PushOptions


class ConvertCommand(Command):
    """The command that names the option which is meant by a value of ``--onnx``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = " ".join(args).replace("--onnx=", "--onnx ").split()
        try:
            return super().parse_args(ctx, args)
        except click.UsageError:
            for flag, value in pairwise(typed):
                if flag == "--onnx" and value in ONNX_DTYPES:
                    raise UsageError(f"--onnx takes no value; give --onnx-dtype {value} beside it") from None
            raise


@click.command(cls=ConvertCommand)
@model_argument
@scaling_options
@out_option
@output_option(
    "--base-model",
    metavar="ID",
    help="Hub id that the model card names as the source's, for a local copy.",
)
@output_option(
    "--max-length",
    type=int,
    metavar="N",
    help="Let programs cut the texts of an encoder after N tokens. By default what a static scaling reaches, "
    "or 8 times the trained length, and never less than the source's limit.",
)
@output_option("--dtype", type=click.Choice(WEIGHT_DTYPES), help="Round the weights to this type.")
@output_option(
    "--link",
    is_flag=True,
    help="Share the disk space of the weights with the source, if the file system can (reflink).",
)
@output_option(
    "--hard-link",
    is_flag=True,
    help="Like --link, falling back to hard links; editing one file then edits both.",
)
@output_option(
    "--overwrite",
    is_flag=True,
    help="Replace DIR once the new folder is complete; with --push-to-hub, also what is on the Hub.",
)
@output_option("--dry-run", is_flag=True, help="Show what would be written, but write nothing.")
@section("Verification")(
    "--no-verify",
    "verify",
    is_flag=True,
    callback=negated,
    help="Do not run and check the result before it is put in place.",
)
@source_options
@hub_options
@push_option("--push-to-hub", metavar="USER/NAME", help="Push the result there, as push does.")
@push_options
@export_option("--onnx", is_flag=True, help="Export a validated ONNX graph.")
@onnx_options
def convert(link: bool, hard_link: bool, onnx: bool, **arguments: Any) -> None:
    """Write a copy of MODEL with scaling built in.

    Plain transformers loads the copy. MODEL is only read.
    """
    from converter.cli import report
    from converter.conversion import prepare
    from converter.onnx import requirements
    from converter.publish import push as pushing

    graph: OnnxOptions | None = take_onnx(arguments)
    target = _target(arguments)
    if not onnx:
        if graph != OnnxOptions():
            raise UsageError("the options of an export need --onnx; add it, or drop them")
        graph = None
    if hard_link:
        arguments["link"] = "hard"
    elif link:
        arguments["link"] = "reflink"
    # What can be wrong without the weights is found here, before they are downloaded or anything is written.
    if graph is not None:
        requirements.check_installed(graph)
    conversion = prepare(progress=progress(), **arguments)
    if graph is not None:
        requirements.check_exportable(conversion.plan, graph)
    if target is not None:
        pushing.check_names(target)
        if target.has_token or not arguments["dry_run"]:
            pushing.check_target(target, conversion.plan.model.origin, conversion.plan.files.config)
    model, request = conversion.plan.model, conversion.plan.request
    recommended = model.recommended(request)
    if recommended is not None:
        say(report.one_factor(recommended, converted=model.converted))
    if arguments["dry_run"]:
        _show_preview(conversion, graph)
        if target is not None and not target.has_token:
            say(report.not_asked(target.repo_id))
    else:
        _carry_out(conversion, graph, target)


def _show_preview(conversion: Conversion, graph: OnnxOptions | None) -> None:
    from converter.cli import report
    from converter.onnx.files import planned_files

    result = conversion.preview()
    if graph is not None:
        later = dict.fromkeys(planned_files(conversion.plan, graph))
        result = replace(result, files={**result.files, **later})
    show({**result.to_json(), "onnx": None, "pushed": None}, report.plan(result))


def _carry_out(conversion: Conversion, graph: OnnxOptions | None, target: PushOptions | None) -> None:
    """Converts, exports and pushes; what a failure leaves to do is said as command lines."""
    from converter.cli import report
    from converter.onnx.export import export as write_graph
    from converter.onnx.files import graph_bytes
    from converter.publish.push import push as push_folder

    reserve = 0 if graph is None else graph_bytes(conversion.plan, graph)
    result = conversion.carry_out(reserve=reserve, progress=progress())
    place = str(result.path)
    done: dict[str, Any] = {**result.to_json(), "onnx": None, "pushed": None}
    lines, summaries = [place], [report.summary(result, verbose=given("verbose"))]
    remaining = []
    if graph is not None:
        remaining.append(argv("export", place, **graph.options))
    if target is not None:
        remaining.append(argv("push", place, target.repo_id, **target.options))
    try:
        if graph is not None:
            exported = write_graph(place, graph, progress=progress())
            remaining.pop(0)
            done["onnx"] = exported.to_json()
            written = [*result.files, *exported.files]
            done["files"] = {name: (result.path / name).stat().st_size for name in written}
            if not given("quiet"):
                lines.append(exported.summary())
        if target is not None:
            pushed = push_folder(place, progress=progress(), verified=True, **asdict(target))
            done["pushed"] = pushed.to_json()
            lines.append(pushed.url)
            summaries.append(report.pushed(pushed, verbose=given("verbose")))
    except (ConverterError, KeyboardInterrupt) as error:
        show(done)  # for --json; the error says the rest
        there = f"{place} is complete; to go on, run: {' && '.join(map(shlex.join, remaining))}"
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(there) from error
        raise type(error)(f"{error.message}; {there}") from error
    show(done, *lines)
    say(*summaries)


def _target(arguments: dict[str, Any]) -> PushOptions | None:
    """Where the result is pushed to; takes the options of a push out of the arguments."""
    from converter.publish.push import PushOptions

    repo_id = arguments.pop("push_to_hub")
    options = {name: arguments.pop(name) for name in ("private", "branch", "create_pr")}
    if repo_id is None:
        for name in (name for name, value in options.items() if value):
            raise UsageError(f"{option[name]} needs {option.push_to_hub}; add it, or drop {option[name]}")
        return None
    if not arguments["verify"]:
        raise UsageError(
            f"only a verified result can be pushed; drop {option.no_verify} or {option.push_to_hub}"
        )
    return PushOptions(repo_id, **options, overwrite=arguments["overwrite"], token=arguments["token"])


@click.command(cls=Command)
@model_argument
@scaling_options
@source_options
@hub_options
def inspect(**arguments: Any) -> None:
    """Show the family, size, trained length and slopes of MODEL.

    With scaling options, the scaled slopes are shown beside the original ones. Nothing is written.
    """
    from converter.cli import report
    from converter.inspection import inspect as run

    result = run(**arguments)
    show(result.to_json(), report.inspection(result))
    if result.recommended is not None:
        say(report.one_factor(read_scaling(result.recommended), converted=result.converted))


@click.command(cls=Command)
@argument(
    "name",
    required=False,
    default="",
    help="List the known checkpoints of this family, or those with this text in their Hub id.",
)
@click.option("--markdown", is_flag=True, help="Print the table of the README.")
def families(name: str, markdown: bool) -> None:
    """List the models that can be converted.

    With NAME, the list has the known checkpoints too, with their trained lengths and the source of each.
    """
    from converter import catalogue
    from converter.cli import report

    entries = catalogue.supported(name)
    text = catalogue.markdown(name) if markdown else report.families(entries, checkpoints=bool(name))
    show({"families": [entry.to_json() for entry in entries]}, text)


@click.command(cls=Command)
@converted_argument
@argument("repo_id", metavar="USER/NAME", help="Repository on the Hub; it is created if it does not exist.")
@push_options
@push_option("--overwrite", is_flag=True, help="Replace what the repository or branch holds.")
@push_option(
    "--dry-run",
    is_flag=True,
    help="Show what would be sent and what is left out, but send nothing. It needs no token.",
)
@token_option
def push(dry_run: bool, **arguments: Any) -> None:
    """Verify a converted model and push it to the Hub.

    All files are pushed in one commit.
    """
    from converter.cli import report
    from converter.publish.push import preview
    from converter.publish.push import push as run

    if dry_run:
        planned = preview(**arguments, progress=progress())
        show(planned.to_json(), report.push_preview(planned))
        return
    result = run(**arguments, progress=progress())
    show(result.to_json(), result.url)
    say(report.pushed(result, verbose=given("verbose")))


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
    from converter.onnx.export import export as run

    result = run(folder, take_onnx(arguments), progress=progress())
    show(result.to_json(), str(result.path), *([] if given("quiet") else [result.summary()]))


@click.command(cls=Command)
@converted_argument
@click.option("--provider", **PROVIDER)
def validate(folder: Path, provider: str | None) -> None:
    """Check a converted model, and change nothing in it.

    Files are compared with ntk_convert.json and code with this version's. Slopes are measured, the model is
    loaded, and its ONNX graphs are compared with it. Exit code 1 if a check fails.
    """
    from converter.validation import validate as run

    result = run(folder, provider=provider, progress=progress())
    notes = [f"note    {note}" for note in result.notes]
    show(result.to_json(), *map(str, result.outcomes), *notes)
    result.check()


@click.command(cls=Command)
@argument(
    "subject",
    shell_complete=files,
    metavar="MODEL|RESULTS.json",
    help="A local folder or a model id on the Hub, or the results.json that eval or tune wrote.",
)
@trial_options
@out_option
@output_option("--overwrite", is_flag=True, help="Write into a folder that is not empty.")
@source_options
@hub_options
def plot(subject: str, **arguments: Any) -> None:
    """Draw slopes and spans, or the curves of an evaluation.

    A strength without --methods is one of ntk.

    \b
    Examples:
      ntk-convert plot bigscience/bloom-1b7 --scales 2 --out ./pictures
      ntk-convert plot ./bloom-ntk --out ./pictures
      ntk-convert plot ./evaluation/results.json --out ./pictures
    """
    from converter.pictures.plotting import plot as run

    files = [str(path) for path in run(subject, **arguments)]
    show({"files": files}, *files)


COMMANDS = (convert, inspect, families, push, export, validate, plot)
