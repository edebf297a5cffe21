"""Show what scaling does to small models: train them, measure them, write the tables and pictures.

    python examples/evidence.py                # train and measure what is missing; hours on one core
    python examples/evidence.py --only fits    # the same for one study
    python examples/evidence.py --tables       # rewrite comparisons, tables and pictures, from stored scores

There are three studies: `results`, of the models under the formulas; `ramps`, of the ramp of by-parts; and
`fits`, of fitted slopes (evidence_fits.py). A fourth, of temperatures, was measured with an option that
`eval` no longer has; its results are only read. Models and full results are kept in .evidence/; anything
deleted there is made again. The part of the results that tables and pictures need is in
examples/evidence/NAME.json, which `ntk-convert plot` can read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import evidence_fits
from evidence_design import (
    BY_PARTS,
    EXAMPLES,
    MODELS,
    NONE,
    NTK,
    PROMPTS,
    RAMP,
    RUNS,
    RUNS_OF_12_HEADS,
    SCALE,
    TRAINED_LENGTH,
    WINDOWS,
    Model,
    dynamic,
)
from evidence_fits import POSITION
from evidence_measure import MODELS_FOLDER, ROOT, Run, Study, compare_again, read
from evidence_tables import LATE, TABLES, as_csv, with_tables
from matplotlib.figure import Figure

from converter.evaluation.results import PERPLEXITY, Results
from converter.pictures.curves import draw_curves
from converter.pictures.style import look, render, styled
from converter.scaling.slopes import NATS, exponents

DOCUMENTS = (
    EXAMPLES / "evidence" / "README.md",
    EXAMPLES / "tiny-bloom" / "README.md",
    ROOT / "README.md",
    ROOT / "README.zh.md",
)
PICTURES = {
    "evidence-lines.png": (Model("lines", 8, 0), "prompts"),
    "evidence-text.png": (LATE, PERPLEXITY),
}
"""File in docs/images -> the model and the task that it shows."""
DRAWN = (NONE, NTK, dynamic("position", 1), BY_PARTS)
"""Scalings in these pictures."""


def runs(model: Model, models: Path) -> Sequence[Run]:
    """The scalings that a model gets."""
    published = model.heads == 12 and model.bias_max is None
    scalings = RUNS + (RUNS_OF_12_HEADS if published else ())
    return [Run(model.folder(models), each) for each in scalings]


FORMULAS = Study(
    name="results",
    models=MODELS,
    prompts=PROMPTS,
    windows=WINDOWS,
    runs=runs,
    drawn=frozenset(model for model, _ in PICTURES.values()),
)
# The ramps: where that of by-parts should lie, for models of two kinds.

RAMPS = ((1 / 32, 1 / 8), (1 / 16, 1 / 4), (1 / 8, 1 / 2), (1 / 4, 1))
"""In parts of the trained length."""


def with_ramps(model: Model, models: Path) -> Sequence[Run]:
    """The scalings of the study of ramps. One more ramp ends at the middle of the model's spans.

    The slopes of 12 heads are not evenly spaced, so it is the middle of the shortest span and the longest, by
    their logarithms.
    """
    shortest, longest = (NATS / slope / TRAINED_LENGTH for slope in (max(model.slopes), min(model.slopes)))
    ramps = [*RAMPS, (shortest, shortest * (longest / shortest) ** 0.5)]
    scalings: tuple[dict[str, Any], ...] = (
        {"methods": ("none", "linear", "ntk"), "scales": (SCALE,)},
        {"methods": ("by-parts",), "scales": (SCALE,), "ramps": ramps},
        {"methods": ("ntk",), "dynamic": ("position",)},
        {"methods": ("by-parts",), "dynamic": ("position",), "ramps": RAMPS[1:2]},
    )
    return [Run(model.folder(models), each) for each in scalings]


OF_RAMPS = Study(
    name="ramps",
    models=(Model("lines", 8, 0), Model("lines", 8, 0, 5)),
    prompts={256: 100, 512: 60, 1024: 60, 2048: 40},
    windows=16,
    runs=with_ramps,
)
STUDIES = {study.name: study for study in (FORMULAS, OF_RAMPS, evidence_fits.STUDY)}
OLDER = ("temperatures",)
"""Results that are only read."""


def stored() -> dict[str, Results]:
    """The results of all studies, by name."""
    return {name: read(file_of(name)) for name in (*STUDIES, *OLDER)}


def file_of(name: str) -> Path:
    """The file of a study's results."""
    return EXAMPLES / "evidence" / f"{name}.json"


def tables(results: Mapping[str, Results]) -> Iterator[tuple[Path, str]]:
    """Every document with its tables, and the tables beside the results: the file and its text."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        yield path, with_tables(text, "evidence", lambda name: TABLES[name](results))
    for name, study in STUDIES.items():
        yield study.stored.with_suffix(".csv"), as_csv(results[name])


@styled
def draw_exponents(slopes: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> Figure:
    """Draws the fitted exponents of every layer and head by how far the head sees, beside two formulas.

    Args:
        slopes: see ``evidence_fits.kept``; models that were not fitted by position are left out.
    """
    models = [model for model in evidence_fits.FORMS if POSITION.name in slopes[model.name]]
    figure = Figure(figsize=(3.0 * len(models) + 0.4, 2.9), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for model, axes in zip(models, panels, strict=True):
        _panel(axes, model, slopes[model.name][POSITION.name])
        axes.set_title(model.name)
        axes.set_xlabel("log2(span / trained length)")
    panels[0].set_ylabel(f"exponent, {POSITION.name}")
    widest = max(panels, key=lambda axes: len(axes.get_lines()))
    figure.legend(*widest.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


def _panel(axes: Any, model: Model, layers: Sequence[Sequence[float]]) -> None:
    where = evidence_fits.places(model)
    order = sorted(range(len(where)), key=where.__getitem__)
    for index, (method, colour) in enumerate((("ntk", "0.7"), ("by-parts", "0.4"))):
        t = exponents(method, model.slopes, RAMP)
        style = {"color": colour, "linestyle": ("-", "--")[index], "linewidth": 1.2}
        axes.plot([where[head] for head in order], [t[head] for head in order], label=method, **style)
    for layer, row in enumerate(layers):
        style = {**look(layer + 1), "linestyle": "", "markersize": 4}
        axes.plot(where, row, label=f"fitted, layer {layer}", **style)


def write(results: Mapping[str, Results]) -> None:
    """Writes the tables and the pictures."""
    for path, text in tables(results):
        path.write_text(text, encoding="utf-8")
        print(path)
    formulas = results[FORMULAS.name]
    shown = [each for each in formulas.measurements if each.scaling in DRAWN]
    for name, (model, task) in PICTURES.items():
        path = ROOT / "docs" / "images" / name
        path.write_bytes(render(draw_curves(replace(formulas, measurements=shown), model.name, task)))
        print(path)
    path = ROOT / "docs" / "images" / "evidence-fits.png"
    path.write_bytes(render(draw_exponents(results["fits"].settings["slopes"])))
    print(path)


def main() -> None:
    """Read the command line; train, measure and write."""
    parser = argparse.ArgumentParser(description="Produce the evidence that the documents show.")
    parser.add_argument("--only", choices=STUDIES, help="the study to measure, by default all")
    parser.add_argument("--models", type=Path, default=MODELS_FOLDER, help="models' folder [.evidence]")
    more = "only rewrite the comparisons in the results, tables and pictures"
    parser.add_argument("--tables", action="store_true", help=more)
    arguments = parser.parse_args()
    if not arguments.tables:
        arguments.models.mkdir(parents=True, exist_ok=True)
        for name in [arguments.only] if arguments.only else STUDIES:
            STUDIES[name].run(arguments.models)
    for name in (*STUDIES, *OLDER):
        compare_again(file_of(name))
    write(stored())


if __name__ == "__main__":
    main()
