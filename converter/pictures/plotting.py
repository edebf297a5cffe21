"""Draws all pictures of a model, or of measured results, into a folder."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from converter.errors import OutputError, SourceError, UsageError, option
from converter.evaluation.results import RESULTS, Results
from converter.evaluation.scalings import grid as trials
from converter.pictures.curves import draw_curves, draw_models
from converter.pictures.per_head import draw_penalty, draw_slopes, draw_span, draw_wavelengths
from converter.pictures.positions import Positions, read_positions
from converter.pictures.style import render
from converter.result.outputs import check_folder, write_files
from converter.scaling.request import Parts
from converter.scaling.scaling import Basis, Method
from converter.source.jsonfile import read_object
from converter.source.source import CONFIG

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from converter.model.open import SourceOptions

LONGEST_NAME = 200
"""Most characters of a file's name; disks take 255."""


def plot(
    subject: str | Path | Results,
    out: str | Path,
    *,
    methods: Sequence[Method] = (),
    scales: Sequence[float] = (),
    dynamic: Sequence[Basis] = (),
    rates: Sequence[float] = (),
    ramps: Sequence[Parts] = (),
    overwrite: bool = False,
    **source: Unpack[SourceOptions],
) -> list[Path]:
    """Draws a model's slopes, attention spans and penalties, or the curves of an evaluation.

    Args:
        subject: a checkpoint, stock or converted (a local folder or a Hub id); or results, or their file.
        out: the folder to write; its parent must exist.
        methods: for a model, the scaling methods to show beside stock, each with all ``scales`` (static
            factors) and all ``dynamic`` (each with all ``rates``); ntk if there is only a strength. Without
            any of these, a converted repository shows its own scaling.
        ramps: ramps of ``by-parts`` to show, each in parts of the trained length.
        overwrite: write into a folder that is not empty, over files with the same names.
        source: for a model, see ``SourceOptions``.

    Returns:
        Paths of the files.

    Raises:
        UsageError: options do not fit the subject, or each other; a file that holds no results.
        SourceError: the checkpoint or the results file is missing, unreadable or damaged.
        UnsupportedModel: the model's positions cannot be scaled.
        OutputError: the folder cannot be used.
    """
    scalings: dict[str, Any] = {
        "methods": methods,
        "scales": scales,
        "dynamic": dynamic,
        "rates": rates,
        "ramps": ramps,
    }
    place = check_folder(out, overwrite=overwrite)
    if isinstance(subject, Results) or Path(subject).is_file():
        held = "it" if isinstance(subject, Results) else Path(subject).name
        for name, value in {**scalings, **source}.items():
            if value:
                raise UsageError(
                    f"{held} holds results, but {option[name]} is for pictures of a model; drop it"
                )
        pictures = curves(subject if isinstance(subject, Results) else _read_results(Path(subject)))
    else:
        if (Path(subject) / RESULTS).is_file() and not (Path(subject) / CONFIG).exists():
            raise UsageError(f"{subject} holds results, not a model; give {Path(subject) / RESULTS}")
        if place.is_relative_to(os.path.realpath(subject)):
            raise OutputError(
                f"{option.out} {out} is inside {subject}, which is only read; name another folder"
            )
        scalings["methods"] = methods or (("ntk",) if scales or dynamic else ())
        requests = trials(**scalings, train_length=source.get("train_length"))
        model = read_positions(str(subject), requests, **source)
        pictures = _rendered(_of_model(model))
    return write_files(place, pictures)


def _read_results(path: Path) -> Results:
    """The results in a file; raises ``UsageError`` for one that holds something else."""
    no_results = UsageError(
        f"{path.name} is not the results of an evaluation; give the {RESULTS} that eval or tune writes with "
        f"{option.out}, or a model's folder or Hub id"
    )
    try:
        value = read_object(path)
    except SourceError as error:
        if path.name == RESULTS:  # it is damaged
            raise
        raise no_results from error
    if "format" not in value or "measurements" not in value:
        raise no_results
    return Results.from_json(value)


def curves(results: Results) -> dict[str, bytes]:
    """File name -> content, for every model and task in the results, and for tasks of several models."""
    return _rendered(_of_results(results))


def _rendered(figures: Iterator[tuple[str, Figure]]) -> dict[str, bytes]:
    """File name -> content; a number is added to names that would otherwise be the same."""
    pictures: dict[str, bytes] = {}
    for name, figure in figures:
        names = (f"{name}-{number}.png" if number > 1 else f"{name}.png" for number in itertools.count(1))
        pictures[next(each for each in names if each not in pictures)] = render(figure)
    return pictures


def _of_model(model: Positions) -> Iterator[tuple[str, Figure]]:
    if model.rotary:
        yield "wavelengths", draw_wavelengths(model)
    else:
        yield "slopes", draw_slopes(model)
        yield "span", draw_span(model)
        yield "penalty", draw_penalty(model)


def _of_results(results: Results) -> Iterator[tuple[str, Figure]]:
    pairs = dict.fromkeys((each.model, each.task) for each in results.measurements)
    if not pairs:
        raise UsageError("the results hold no measurements; run the evaluation again")
    several = len({model for model, _ in pairs}) > 1
    for task in results.tasks():
        if len([each for _, each in pairs if each == task]) > 1:
            yield _slug(task), draw_models(results, task)
    for model, task in pairs:
        of = f"-{_slug(model.rpartition('/')[2])}" if several else ""
        yield f"{_slug(task)}{of}", draw_curves(results, model, task)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:LONGEST_NAME] or "unnamed"
