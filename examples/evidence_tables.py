"""The evidence as Markdown tables, written between the markers of documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import mean

import numpy as np
from evidence_design import (
    BY_PARTS,
    FITTED,
    KINDS,
    LENGTHS,
    LINEAR,
    LOW_RAMP,
    MODELS,
    MULTIPLES,
    NONE,
    NTK,
    PUBLISHED,
    SCALINGS,
    SMALL_NTK,
    STATIC_BY_PARTS,
    TRAINED_LENGTH,
    Model,
    by_parts,
    dynamic,
)

from converter.evaluation.results import PERPLEXITY, SIGNIFICANT, Measurement, Results
from converter.evaluation.statistics import compare

BLOCK = re.compile(
    r"(?P<start><!-- evidence (?P<name>[a-z0-9-]+): [^\n]*-->\n).*?(?P<end><!-- end of evidence -->)",
    re.DOTALL,
)
IN_SUMMARY = (NONE, LINEAR, NTK, dynamic("length", 1), dynamic("position", 1), BY_PARTS)
"""Scalings in the summary table."""
STUDY_PAIRS = (
    (BY_PARTS, dynamic("position", 1)),
    (STATIC_BY_PARTS, NTK),
    (BY_PARTS, by_parts(LOW_RAMP)),
    (FITTED, BY_PARTS),
    ("fitted, position, with temperatures", FITTED),
    ("fitted, static, with temperatures", "fitted, static"),
    ("fitted, static", "fitted, static, fitted at 1x only"),
    ("fitted, static", "fitted, static, shared by the layers"),
    ("rule of the other models, by layer", BY_PARTS),
    ("rule of the other models, for all layers", BY_PARTS),
)
"""Two scalings to compare in every model that has both, of the ten models and of the study of fits."""
PAIRS = ((8, NTK, NONE), (12, NTK, NONE), (12, NTK, PUBLISHED), (12, SMALL_NTK, PUBLISHED))
"""Number of heads, and two scalings to compare."""


def with_tables(document: str, results: Mapping[str, Results]) -> str:
    """The document with the tables between its markers replaced.

    Args:
        document: a document in Markdown.
        results: the results of each study.

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


def by_model(results: Results) -> str:
    """Right answers in per cent, or perplexity; a star marks a significant difference from none."""
    multiples = sorted({each.length // TRAINED_LENGTH for each in results.measurements})
    rows = []
    for name in results.models:
        found = [each for each in results.measurements if each.model == name]
        unscaled = {each.length: each for each in found if each.scaling == NONE}
        for scaling in dict.fromkeys(each.scaling for each in found):
            cells = dict.fromkeys(multiples, "")
            for each in found:
                if each.scaling == scaling:
                    pair = compare(each.metric, each.scores, unscaled[each.length].scores)
                    star = "*" if scaling != NONE and pair.p < SIGNIFICANT else ""
                    value = f"{each.value:.3f}" if each.metric == PERPLEXITY else f"{100 * each.value:.0f}"
                    cells[each.length // TRAINED_LENGTH] = value + star
            rows.append([name, scaling, *cells.values()])
    return markdown(["model", "scaling", *(f"{multiple}x" for multiple in multiples)], rows)


def by_form(results: Results, task: str) -> str:
    """Right answers in per cent, or perplexity, of the models of a task, side by side; stars as above."""
    names = [name for name in results.models if name.startswith(task)]
    found = {(each.model, each.scaling, each.length): each for each in results.measurements}
    nothing = {
        (name, f"fitted, {form}")
        for name, forms in results.settings["nothing"].items()
        for form in forms
        if name in names
    }
    lengths = sorted({length for name, _, length in found if name in names})
    ours = [scaling for name, scaling, _ in found if name in names]
    scalings = dict.fromkeys([*ours, *(scaling for _, scaling in sorted(nothing))])

    def cell(name: str, scaling: str, length: int) -> str:
        each = found.get((name, scaling, length))
        if each is None:
            return "no gain" if (name, scaling) in nothing else "-"
        pair = compare(each.metric, each.scores, found[name, NONE, length].scores)
        star = "*" if scaling != NONE and pair.p < SIGNIFICANT else ""
        return (f"{each.value:.3f}" if each.metric == PERPLEXITY else f"{100 * each.value:.0f}") + star

    rows = [
        [scaling, *(" / ".join(cell(name, scaling, length) for name in names) for length in lengths)]
        for scaling in scalings
    ]
    return markdown([" / ".join(names), *(f"{length // TRAINED_LENGTH}x" for length in lengths)], rows)


def study_pairs(results: Results) -> str:
    """Pairs of scalings compared on the same prompts or windows, in all models of a task that have both.

    A prompt's or window's score is the mean of its scores in the models.
    """
    rows = []
    for scaling, other in STUDY_PAIRS:
        for metric in ("accuracy", PERPLEXITY):
            found = [each for each in results.measurements if each.metric == metric]
            both = [
                {(each.model, each.length): each.scores for each in found if each.scaling == wanted}
                for wanted in (scaling, other)
            ]
            names = [name for name in results.models if all((name, LENGTHS[-1]) in each for each in both)]
            if not names:
                continue
            cells = [
                _compared(metric, *([each[name, length] for name in names] for each in both))
                for length in LENGTHS[1:]
            ]
            models = names[0] if len(names) == 1 else f"{len(names)} of {names[0].split('-')[0]}"
            rows.append([f"{scaling}, against {other}", models, *cells])
    return markdown(["compared", "models", *(f"{multiple}x" for multiple in MULTIPLES[1:])], rows)


def _compared(metric: str, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> str:
    """How two scalings differ, given the scores of each model."""
    found = compare(metric, *(np.mean(scores, axis=0).tolist() for scores in (ours, theirs)))
    change = (
        f"{100 * found.difference - 100:+.2f} %"
        if metric == PERPLEXITY
        else f"+{found.better} -{found.worse}"
    )
    return f"{change}, p = {found.p:.1g}"


def summary(results: Results) -> str:
    """Means over all models: right answers in per cent, and perplexity or its change in per cent."""
    multiples = (1, 4, 8)
    rows = []
    for scaling in IN_SUMMARY:
        row = [scaling]
        for task in ("lines", "text"):
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
    return [model for model in MODELS if (model.task, model.heads, model.bias_max) == (task, heads, None)]


def _of(results: Results, models: Sequence[Model]) -> list[Measurement]:
    names = [model.name for model in models]
    return [each for each in results.measurements if each.model in names]


def _curves(
    title: str, found: Sequence[Measurement], cell: Callable[[Measurement], str], *last: Sequence[str]
) -> str:
    """A table with a row per scaling and a column per length, followed by the rows ``last``."""
    scalings = {each.scaling for each in found}
    names = dict.fromkeys(each.model for each in found)
    cells = {(each.model, each.scaling, each.length): cell(each) for each in found}
    rows = [
        [scaling]
        + [" / ".join(cells.get((name, scaling, length), "-") for name in names) for length in LENGTHS]
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


def _from(study: str, table: Callable[[Results], str]) -> Callable[[Mapping[str, Results]], str]:
    """A table of one study, made from the results of all."""
    return lambda found: table(found[study])


TABLES: dict[str, Callable[[Mapping[str, Results]], str]] = {
    **{
        kind.name: _from(
            "results", partial(accuracies if kind.task == "lines" else perplexities, models=kind.models)
        )
        for kind in KINDS
    },
    "tiny-bloom": _from("results", partial(accuracies, models=MODELS[:1])),
    "pairs": _from("results", pairs),
    "by-parts-pairs": _from("results", study_pairs),
    "trained": _from("results", trained),
    "ramps": _from("ramps", by_model),
    "fits-lines": _from("fits", partial(by_form, task="lines")),
    "fits-text": _from("fits", partial(by_form, task="text")),
    "fits-trained": _from("fits", trained),
    "fits-pairs": _from("fits", study_pairs),
    "summary": _from("results", summary),
}
"""Name in a document's marker ``<!-- evidence NAME: ... -->`` -> the function that makes the table."""
