"""Show what penalties that are no straight line do to small encoders.

    python examples/evidence_curves.py             # train and measure what is missing
    python examples/evidence_curves.py --tables    # rewrite the table, from stored scores

An encoder's penalty by |i - j| and the text's length cannot be folded into a dot product, so no converted
model has one. Here it is a table of biases, one for each head and length, in the attention that returns
weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from evidence_design import EXAMPLES, Model
from evidence_encoders import DOCUMENT, LENGTHS, SCRIPT, WINDOWS, pairs_of
from evidence_measure import MODELS_FOLDER, against_none, kept, read, to_text, together, train
from evidence_tables import cell, markdown, with_tables
from text_task import read_corpus
from train_encoders import TRAINED_LENGTH

from converter.evaluation.benchmark import Benchmark
from converter.evaluation.comparison import Scores, measurement
from converter.evaluation.evaluated_model import EvaluatedModel, open_evaluated_model
from converter.evaluation.results import Measurement, Results
from converter.evaluation.runner import choose
from converter.scaling.penalty import concave
from converter.scaling.scaling import UNSCALED, Scaling

RESULTS = EXAMPLES / "evidence" / "curves.json"
MODELS = (Model("pairs", 8, 0), Model("masked", 8, 0))
POWERS = (8, 16)

Curve = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Slopes [heads, 1, 1], distances [tokens, tokens] and tokens of the text -> penalty, float32."""


def two_lines(slopes: torch.Tensor, distances: torch.Tensor, tokens: int) -> torch.Tensor:
    """As trained up to half the trained length; from there on, the end of the text costs what that cost."""
    knee = TRAINED_LENGTH / 2
    rise = (TRAINED_LENGTH - knee) / (max(tokens, TRAINED_LENGTH) - knee)
    return slopes * (distances.clamp(max=knee) + rise * (distances - knee).clamp(min=0))


def power(exponent: int, slopes: torch.Tensor, distances: torch.Tensor, tokens: int) -> torch.Tensor:
    """The concave penalty of decoders, with the text's length for the tokens that a query sees."""
    heads = tuple(slopes.flatten().tolist())
    rows = []
    for each in concave(heads, tokens, TRAINED_LENGTH, exponent):
        curve = each.curve * (1 - (1 - distances / each.tokens).pow(each.power)) if each.curve else 0.0
        rows.append(each.line * distances + curve)
    return torch.stack(rows)


RAMP = (TRAINED_LENGTH / 8, TRAINED_LENGTH / 2)
SCALINGS: Mapping[str, Scaling] = {
    "ntk, length-dynamic": Scaling("ntk", dynamic="length", train_length=TRAINED_LENGTH),
    "by-parts, length-dynamic": Scaling("by-parts", dynamic="length", train_length=TRAINED_LENGTH, ramp=RAMP),
}
CURVES: Mapping[str, Curve] = {
    "two lines": two_lines,
    **{f"power {each}": partial(power, each) for each in POWERS},
}
NONE = str(UNSCALED)


@contextmanager
def curved(subject: EvaluatedModel, curve: Curve) -> Iterator[None]:
    """Gives an encoder without a scaling this penalty."""
    model = subject.scaled(UNSCALED)
    attention = model.base_model.encoder.layer[0].attention.self
    module = sys.modules[attention.attend.__module__]

    kept: dict[int, torch.Tensor] = {}  # the table of the last length, as all layers have the same slopes

    def bias(slopes: torch.Tensor, slots: torch.Tensor, tokens: int) -> torch.Tensor:
        if tokens not in kept:
            kept.clear()
            distances = (slots[:, None] - torch.arange(tokens)[None, :]).abs().float()
            kept[tokens] = -curve(slopes.flatten()[:, None, None], distances, tokens)[None]
        return kept[tokens]

    usual = model.config._attn_implementation
    with mock.patch.object(module, "distance_bias", bias):
        model.config._attn_implementation = "eager"  # the attention that adds a whole table
        yield
        model.config._attn_implementation = usual


def benchmarks(model: Model, models: Path, subject: EvaluatedModel) -> list[Benchmark]:
    """What a model is asked; all texts of a batch have the same length, so none is padded."""
    if model.task == "pairs":
        tasks = [(length, pairs_of(models, length)) for length in LENGTHS]
        return [Benchmark.prepare(subject, [task], [], [length], 64, 0) for length, task in tasks]
    text = models / "held-out.txt"
    text.write_text(read_corpus().held_out, encoding="utf-8", newline="\n")
    return [Benchmark.prepare(subject, [], [text], LENGTHS, WINDOWS, 0)]


def measure(model: Model, models: Path) -> Results:
    """Measures a trained model under all scalings and curves."""
    folder = train(model, models, SCRIPT)
    with open_evaluated_model(folder, choose("cpu", "fp32", None), train_length=TRAINED_LENGTH) as subject:
        asked = benchmarks(model, models, subject)

        def scores(scaling: Scaling = UNSCALED) -> Scores:
            return {place: each for one in asked for place, each in one.measure(subject, scaling).items()}

        unscaled = scores()
        found = rows(model, NONE, unscaled, unscaled)
        for name, scaling in SCALINGS.items():
            found += rows(model, name, scores(scaling), unscaled)
        for name, curve in CURVES.items():
            with curved(subject, curve):
                found += rows(model, name, scores(), unscaled)
        about = subject.describe(UNSCALED)
    return Results(found, {model.name: about}, {}, 0.0)


def rows(model: Model, name: str, found: Scores, unscaled: Scores) -> list[Measurement]:
    """The scores under one name, without what no table shows."""
    measured = [
        measurement(model.name, name, task, length, each, unscaled[task, length])
        for (task, length), each in found.items()
    ]
    return [replace(each, depths=(), positions=()) for each in measured]


def table(results: Results) -> str:
    """A row for each penalty: nDCG@10 of pairs / perplexity of masked bytes; a star marks a difference."""
    found = {(each.model, each.scaling, each.length): each for each in results.measurements}
    lines = []
    for name in dict.fromkeys(each.scaling for each in results.measurements):
        cells = [
            " / ".join(
                cell(found[model.name, name, length], found[model.name, NONE, length]) for model in MODELS
            )
            for length in LENGTHS
        ]
        lines.append([name, *cells])
    head = " / ".join(model.name for model in MODELS)
    multiples = (f"{length // TRAINED_LENGTH}x" for length in LENGTHS)
    return markdown([f"nDCG@10, % / perplexity: {head}", *multiples], lines)


def page(results: Results) -> str:
    """The document with the table."""
    return with_tables(DOCUMENT.read_text(encoding="utf-8"), "curves", lambda _: table(results))


def main() -> None:
    """Read the command line; train, measure and write."""
    parser = argparse.ArgumentParser(description="Produce the evidence about curved penalties of encoders.")
    parser.add_argument("--models", type=Path, default=MODELS_FOLDER, help="models' folder [.evidence]")
    parser.add_argument("--tables", action="store_true", help="only rewrite the table")
    arguments = parser.parse_args()
    if not arguments.tables:
        torch.set_num_threads(1)
        arguments.models.mkdir(parents=True, exist_ok=True)
        found = [
            kept(arguments.models / f"curves-{model.name}.json", partial(measure, model, arguments.models))
            for model in MODELS
        ]
        whole = together(found)
        compared = [each for one in found for each in against_none(one.measurements)]
        RESULTS.write_text(to_text(replace(whole, measurements=compared)), encoding="utf-8")
    DOCUMENT.write_text(page(read(RESULTS)), encoding="utf-8")
    print(DOCUMENT)


if __name__ == "__main__":
    main()
