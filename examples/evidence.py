"""Show what scaling does to small models: train them, measure them, write the tables and pictures.

    python examples/evidence.py             # train and measure what is missing; an hour or two on one core
    python examples/evidence.py --tables    # write only tables and pictures, from the stored results

Models and their full results are kept in .evidence/; anything deleted there is made again. The part of the
results that tables and pictures need is in examples/evidence/results.json, which `ntk-convert plot` can read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from evidence_design import (
    EXAMPLES,
    LINEAR,
    MODELS,
    NONE,
    PROMPTS,
    RUNS,
    RUNS_OF_12_HEADS,
    TRAINED_LENGTH,
    WINDOWS,
    Model,
)
from evidence_measure import MODELS_FOLDER, ROOT, Run, kept, measure, to_text, train
from evidence_tables import with_tables

from converter.evaluation.results import PERPLEXITY, Measurement, Results
from converter.evaluation.statistics import compare
from converter.pictures.curves import draw_curves
from converter.pictures.style import render

RESULTS = EXAMPLES / "evidence" / "results.json"
DOCUMENTS = (
    EXAMPLES / "evidence" / "README.md",
    EXAMPLES / "tiny-bloom" / "README.md",
    ROOT / "README.md",
    ROOT / "README.zh.md",
)
PICTURES = {"evidence-lines.png": ("lines-8-0", "prompts"), "evidence-text.png": ("text-8-0", PERPLEXITY)}
"""File in docs/images -> the model and the task that it shows."""


def runs(model: Model, models: Path) -> Sequence[Run]:
    """The scalings that a model gets."""
    scalings = RUNS + (RUNS_OF_12_HEADS if model.heads == 12 else ())
    return [(model.folder(models), each) for each in scalings]


def joined(found: Mapping[Model, Results], models: Path) -> Results:
    """Joins the results of all models, compares each scaling with none, and drops what is not shown."""
    measurements: list[Measurement] = []
    described: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any] = {}
    drawn = {model for model, _ in PICTURES.values()}
    for model, results in found.items():
        record = model.folder(models) / "training.json"  # tiny-bloom was trained before this file existed
        training = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        described[model.name] = {**results.models[model.name], **training}
        settings |= results.settings
        # Rounded before the comparison, so that the file's scores give the same comparisons.
        rounded = [
            replace(each, scores=tuple(round(score, 6) for score in each.scores))
            for each in results.measurements
        ]
        unscaled = {each.length: each.scores for each in rounded if each.scaling == NONE}
        for each in rounded:
            pair = compare(each.metric, each.scores, unscaled[each.length])
            shown = model.name in drawn and each.length > TRAINED_LENGTH
            each = replace(each, comparison=None if each.scaling == NONE else pair, tokens_per_second=0.0)
            measurements.append(each if shown else replace(each, depths=(), positions=()))
    settings["items"] = {"lines": PROMPTS, "text": WINDOWS}
    return Results(measurements, described, settings, sum(results.seconds for results in found.values()))


def write(results: Results) -> None:
    """Writes the tables into the documents, and the pictures."""
    for path in DOCUMENTS:
        path.write_text(with_tables(path.read_text(encoding="utf-8"), results), encoding="utf-8")
        print(path)
    for name, (model, task) in PICTURES.items():
        path = ROOT / "docs" / "images" / name
        # Linear is left out of perplexity: it is so much higher that the others would look alike.
        shown = [each for each in results.measurements if (each.task, each.scaling) != (PERPLEXITY, LINEAR)]
        path.write_bytes(render(draw_curves(replace(results, measurements=shown), model, task)))
        print(path)


def main() -> None:
    """Read the command line; train, measure and write."""
    parser = argparse.ArgumentParser(description="Produce the evidence that the documents show.")
    parser.add_argument("--models", type=Path, default=MODELS_FOLDER, help="models' folder [.evidence]")
    parser.add_argument("--tables", action="store_true", help="only rewrite tables and pictures")
    arguments = parser.parse_args()

    if not arguments.tables:
        arguments.models.mkdir(parents=True, exist_ok=True)
        found = {}
        for model in MODELS:
            print(model.name, flush=True)
            train(model, arguments.models)
            found[model] = kept(
                arguments.models / f"{model.name}.json",
                partial(measure, model, arguments.models, runs(model, arguments.models), PROMPTS, WINDOWS),
            )
        RESULTS.write_text(to_text(joined(found, arguments.models)), encoding="utf-8")
    write(Results.from_json(json.loads(RESULTS.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
