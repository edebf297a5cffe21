"""The evidence as Markdown tables, written between the markers of documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import mean

from evidence_design import (
    HEADS,
    LENGTHS,
    LINEAR,
    MODELS,
    MULTIPLES,
    NONE,
    NTK,
    PUBLISHED,
    SCALINGS,
    SMALL_NTK,
    TASKS,
    TRAINED_LENGTH,
    Model,
    dynamic,
)

from converter.evaluation.results import SIGNIFICANT, Measurement, Results
from converter.evaluation.statistics import compare

BLOCK = re.compile(
    r"(?P<start><!-- evidence (?P<name>[a-z0-9-]+): [^\n]*-->\n).*?(?P<end><!-- end of evidence -->)",
    re.DOTALL,
)
IN_SUMMARY = (NONE, LINEAR, NTK, dynamic("length", 1), dynamic("position", 1))
"""Scalings in the summary table."""
PAIRS = ((8, NTK, NONE), (12, NTK, NONE), (12, NTK, PUBLISHED), (12, SMALL_NTK, PUBLISHED))
"""Number of heads, and two scalings to compare."""


def with_tables(document: str, results: Results) -> str:
    """The document with the tables between its markers replaced.

    Raises:
        KeyError: a marker names no table.
    """
    return BLOCK.sub(lambda block: block["start"] + TABLES[block["name"]](results) + block["end"], document)


def accuracies(results: Results, models: Sequence[Model]) -> str:
    """Right answers in per cent, one number per model; a star marks a significant difference from none."""

    def cell(each: Measurement) -> str:
        by_chance = each.comparison is None or each.comparison.p >= SIGNIFICANT
        return f"{100 * each.value:.1f}" + ("" if by_chance else "*")

    found = _of(results, models)
    widest = (
        f"± {max(50 * (each.high - each.low) for each in found if each.length == length):.1f}"
        for length in LENGTHS
    )
    return _curves("right answers, %", found, cell, ["95 % intervals, at most", *widest])


def perplexities(results: Results, models: Sequence[Model]) -> str:
    """Perplexity without scaling; for each scaling, its change in per cent with a 95 % interval."""

    def cell(each: Measurement) -> str:
        change = each.comparison
        if change is None:
            return f"{each.value:.3f}"
        return f"{100 * change.difference - 100:+.1f} ± {50 * (change.high - change.low):.1f}"

    return _curves("perplexity of none, and change in %", _of(results, models), cell)


def pairs(results: Results) -> str:
    """Pairs of scalings compared on the same prompts, at 4 and 8 times the trained length."""
    rows = []
    for heads, scaling, other in PAIRS:
        for model in _models("lines", heads):
            cells = []
            for length in LENGTHS[2:]:
                pair = compare(
                    "accuracy",
                    _get(results, model, scaling, length).scores,
                    _get(results, model, other, length).scores,
                )
                cells.append(f"+{pair.better} -{pair.worse}, p = {pair.p:.1g}")
            rows.append([f"{scaling}, against {other}", str(heads), str(model.seed), *cells])
    return markdown(["same prompts", "heads", "seed", "4x", "8x"], rows)


def trained(results: Results) -> str:
    """The trained models, and what training them cost."""
    rows = []
    for name, model in results.models.items():
        shape = f"{model['layers']} layers, {model['heads']} heads, {model['parameters']:,} parameters"
        cost = (
            [f"{model['steps']}", f"{model['cpu_seconds']} s"] if "steps" in model else ["see its card", ""]
        )
        rows.append([name, shape, *cost])
    return markdown(["model", "shape", "steps", "CPU time"], rows)


def summary(results: Results) -> str:
    """Means over all models: right answers in per cent, and perplexity or its change in per cent."""
    multiples = (1, 4, 8)
    rows = []
    for scaling in IN_SUMMARY:
        row = [scaling]
        for task in TASKS:
            for multiple in multiples:
                length = multiple * TRAINED_LENGTH
                found = [_get(results, model, scaling, length) for model in MODELS if model.task == task]
                changes = [each.comparison.difference for each in found if each.comparison]
                if task == "text" and changes:
                    row.append(f"{100 * mean(changes) - 100:+.1f} %")
                else:
                    value = mean(each.value for each in found)
                    row.append(f"{value:.3f}" if task == "text" else f"{100 * value:.1f} %")
        rows.append(row)
    head = [f"{name}, {multiple}x" for name in ("right", "perplexity") for multiple in multiples]
    return markdown(["scaling", *head], rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table that ends with a line feed."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _models(task: str, heads: int) -> list[Model]:
    return [model for model in MODELS if (model.task, model.heads) == (task, heads)]


def _of(results: Results, models: Sequence[Model]) -> list[Measurement]:
    names = [model.name for model in models]
    return [each for each in results.measurements if each.model in names]


def _curves(
    title: str, found: Sequence[Measurement], cell: Callable[[Measurement], str], *last: Sequence[str]
) -> str:
    """A table with a row per scaling and a column per length, followed by the rows ``last``."""
    scalings = {each.scaling for each in found}
    rows = [
        [scaling]
        + [
            " / ".join(cell(each) for each in found if (each.scaling, each.length) == (scaling, length))
            for length in LENGTHS
        ]
        for scaling in SCALINGS
        if scaling in scalings
    ]
    return markdown([title, *(f"{multiple}x" for multiple in MULTIPLES)], [*rows, *last])


def _get(results: Results, model: Model, scaling: str, length: int) -> Measurement:
    return next(
        each
        for each in results.measurements
        if (each.model, each.scaling, each.length) == (model.name, scaling, length)
    )


TABLES: dict[str, Callable[[Results], str]] = {
    **{f"lines-{heads}": partial(accuracies, models=_models("lines", heads)) for heads in HEADS},
    **{f"text-{heads}": partial(perplexities, models=_models("text", heads)) for heads in HEADS},
    "tiny-bloom": partial(accuracies, models=MODELS[:1]),
    "pairs": pairs,
    "trained": trained,
    "summary": summary,
}
"""Name in a document's marker ``<!-- evidence NAME: ... -->`` -> the function that makes the table."""
