"""The evidence as tables: Markdown between the markers of documents, and CSV of each model and scaling."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    TEMPERED,
    TRAINED_LENGTH,
    Model,
    by_parts,
    dynamic,
)

from converter.evaluation.results import PERPLEXITY, Comparison, Measurement, Results
from converter.evaluation.statistics import compare_scores as compare
from converter.scaling.scaling import short_names
from converter.scaling.slopes import NATS

IN_SUMMARY = (NONE, BY_PARTS, LINEAR, NTK, dynamic("length", 1), dynamic("position", 1))
"""Scalings in the summary table."""
OF_ALL = tuple(scaling for scaling in SCALINGS if scaling not in (SMALL_NTK, PUBLISHED))
"""Scalings that every model gets."""
LATE = Model("text", 8, 0)
"""The model whose loss by position is kept."""
PAIRS = (
    (BY_PARTS, dynamic("position", 1)),
    (STATIC_BY_PARTS, NTK),
    (BY_PARTS, by_parts(LOW_RAMP)),
    (NTK, PUBLISHED),
    (SMALL_NTK, PUBLISHED),
    (FITTED, BY_PARTS),
    ("fitted, position, with temperatures", FITTED),
    ("fitted, static, with temperatures", "fitted, static"),
    ("fitted, static", "fitted, static, fitted at 1x only"),
    ("fitted, static", "fitted, static, shared by the layers"),
    ("rule of the other models, by layer", BY_PARTS),
    ("rule of the other models, for all layers", BY_PARTS),
    *((tempered, BY_PARTS) for tempered in TEMPERED.values()),
)
"""Two scalings to compare in every model that has both."""


def with_tables(document: str, kind: str, table: Callable[[str], str]) -> str:
    """The document with what stands between its markers ``<!-- KIND NAME: ... -->`` replaced by tables."""
    block = rf"(<!-- {kind} ([a-z0-9-]+): [^\n]*-->\n).*?(<!-- end of {kind} -->)"
    return re.sub(block, lambda found: found[1] + table(found[2]) + found[3], document, flags=re.DOTALL)


def trained(results: Results) -> str:
    """The kinds of trained models."""
    rows = []
    for kind in KINDS:
        model, about = kind[0], results.models[kind[0].name]
        shape = f"{about['layers']} layers, {model.heads} heads, {about['parameters']:,} parameters"
        sees = f"{NATS / min(model.slopes) / TRAINED_LENGTH:.1f} times the trained length"
        rows.append([model.kind, str(len(kind)), shape, sees])
    return markdown(["models", "seeds", "shape", "the flattest head sees"], rows)


def as_csv(results: Results) -> str:
    """Right answers in per cent, or perplexity, of each model and scaling by multiple of the trained length.

    A star marks a significant difference from none.
    """
    text = io.StringIO()
    multiples = _multiples(results.measurements)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "scaling", *(f"{multiple}x" for multiple in multiples)])
    writer.writerows([name, *row] for name in results.models for row in _rows(results, name))
    return text.getvalue()


def of_one(results: Results, model: Model) -> str:
    """The same for one model, as Markdown."""
    head = [f"{multiple}x" for multiple in _multiples(results.measurements)]
    rows = [*_rows(results, model.name)]
    named = short(name for name, *_ in rows)
    return markdown(["right answers, %", *head], [[named[name], *cells] for name, *cells in rows])


def _rows(results: Results, name: str) -> Iterator[list[str]]:
    """For each scaling of a model: its name, and a cell for each length."""
    lengths = [multiple * TRAINED_LENGTH for multiple in _multiples(results.measurements)]
    found = {(each.scaling, each.length): each for each in results.measurements if each.model == name}
    order = [*SCALINGS, *dict.fromkeys(scaling for scaling, _ in found)]
    for scaling in dict.fromkeys(each for each in order if (each, TRAINED_LENGTH) in found):
        cells = [found.get((scaling, length)) for length in lengths]
        yield [scaling, *(cell(each, found[NONE, each.length]) if each else "" for each in cells)]
    for form in results.settings.get("nothing", {}).get(name, ()):
        yield [f"fitted, {form}", *["no gain"] * len(lengths)]


def cell(each: Measurement, unscaled: Measurement) -> str:
    pair = each.comparison or compare(each.metric, each.scores, unscaled.scores)
    star = "*" if each.scaling != NONE and pair.significant else ""
    return (f"{each.value:.3f}" if each.metric == PERPLEXITY else f"{100 * each.value:.1f}") + star


def spread(results: Results, task: str) -> str:
    """The least and the greatest value of the models of a task that have a scaling.

    It is right answers in per cent, or the change of the perplexity in per cent.
    """
    found = [each for each in results.measurements if each.model.startswith(task)]
    unscaled = {(each.model, each.length): each.value for each in found if each.scaling == NONE}

    def text(each: Measurement) -> str:
        if each.metric == PERPLEXITY:
            return f"{100 * each.value / unscaled[each.model, each.length] - 100:+.1f}"
        return f"{100 * each.value:.0f}"

    rows = []
    named = short(each.scaling for each in found)
    for scaling in dict.fromkeys(each.scaling for each in found):
        ours = [each for each in found if each.scaling == scaling]
        cells = []
        for multiple in _multiples(found):
            values = {text(each) for each in ours if each.length == multiple * TRAINED_LENGTH}
            cells.append(" to ".join(dict.fromkeys((min(values, key=float), max(values, key=float)))))
        rows.append([named[scaling], str(len({each.model for each in ours})), *cells])
    return markdown(["scaling", "models", *(f"{multiple}x" for multiple in _multiples(found))], rows)


def short(scalings: Iterable[str]) -> dict[str, str]:
    """Full name -> the short one in a table, which always tells a ramp that is not the default one."""
    return short_names([*scalings, BY_PARTS, STATIC_BY_PARTS])


def _multiples(found: Iterable[Measurement]) -> list[int]:
    return sorted({each.length // TRAINED_LENGTH for each in found})


def pairs(results: Results) -> str:
    """Pairs of scalings compared on the same prompts or windows, in all models of a task that have both.

    A prompt's or window's score is the mean of its scores in the models.
    """
    rows = []
    measured = {each.scaling for each in results.measurements}
    named = short(name for pair in PAIRS if measured.issuperset(pair) for name in pair)
    for scaling, other in PAIRS:
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
                compared(metric, *([each[name, length] for name in names] for each in both))
                for length in LENGTHS[1:]
            ]
            models = names[0] if len(names) == 1 else f"{len(names)} of {names[0].split('-')[0]}"
            rows.append([f"{named[scaling]}, against {named[other]}", models, *cells])
    return markdown(["compared", "models", *(f"{multiple}x" for multiple in MULTIPLES[1:])], rows)


def compared(metric: str, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> str:
    """How two scalings differ, given the scores of each model."""
    found = difference(metric, ours, theirs)
    if metric == PERPLEXITY:
        change = f"{100 * found.difference - 100:+.2f} %"
    elif len(ours) == 1:  # a prompt is right or wrong
        change = f"+{found.better} -{found.worse}"
    else:
        change = f"{100 * found.difference:+.1f} points"
    return f"{change}, p = {found.p:.1g}"


def difference(metric: str, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Comparison:
    """How two scalings differ in the mean scores of several models, given the scores of each model."""
    return compare(metric, *(np.mean(scores, axis=0).tolist() for scores in (ours, theirs)))


def temperatures(results: Results) -> str:
    """For each kind and length, means over the measured models: none, and by-parts with each temperature.

    A star marks a significant difference from by-parts without a temperature, found as in ``pairs``.
    """
    rows = []
    for kind in KINDS:
        names = [model.name for model in kind if model.name in results.models]
        for length in LENGTHS if names else ():
            none, plain, *tempered = (
                [_get(results, name, scaling, length) for name in names]
                for scaling in (NONE, BY_PARTS, *TEMPERED.values())
            )
            row = [f"{length // TRAINED_LENGTH}x", _mean(none), _mean(plain)]
            for found in tempered:
                scores = ([each.scores for each in one] for one in (found, plain))
                row.append(_mean(found) + "*" * difference(found[0].metric, *scores).significant)
            rows.append([kind[0].kind, str(len(names)), *row])
    return markdown(["models", "seeds", "length", "none", "C = 0", *TEMPERED], rows)


def late(results: Results) -> str:
    """The perplexity of the one model whose loss by position is kept: of windows and their last quarters."""
    rows, lengths = [], [multiple * TRAINED_LENGTH for multiple in MULTIPLES[1:]]
    named = short(OF_ALL)
    for scaling in OF_ALL:
        found = [_get(results, LATE.name, scaling, length) for length in lengths]
        cells = [(_mean([each]), late_change(results, scaling, each.length)) for each in found]
        rows.append([named[scaling], *(cell for pair in cells for cell in pair)])
    head = [f"{multiple}x{part}" for multiple in MULTIPLES[1:] for part in ("", ", last quarter")]
    return markdown([f"perplexity of {LATE.name}", *head], rows)


def late_change(results: Results, scaling: str, length: int) -> str:
    """The perplexity in the last quarter of that model's windows, or its change from none in per cent."""
    ours, unscaled = (_get(results, LATE.name, each, length).late for each in (scaling, NONE))
    assert ours is not None
    assert unscaled is not None
    return f"{unscaled:.3f}" if scaling == NONE else f"{100 * ours / unscaled - 100:+.1f} %"


def summary(results: Results) -> str:
    """The means at some lengths and, of one model, the last quarter of the longest windows."""
    longest = LENGTHS[-1]
    head, line, *lines = means(results, IN_SUMMARY, (1, 4, 8)).splitlines()
    cells = [late_change(results, scaling, longest) for scaling in IN_SUMMARY]
    more = [f"{LATE.name}, last quarter of {longest // TRAINED_LENGTH}x", "---", *cells]
    return "".join(f"{row} {cell} |\n" for row, cell in zip([head, line, *lines], more, strict=True))


def means(results: Results, scalings: Sequence[str], multiples: Sequence[int]) -> str:
    """Means over all models: right answers in per cent, and perplexity or its change in per cent."""
    rows = []
    named = short(scalings)
    for scaling in scalings:
        row = [named[scaling]]
        for task in ("lines", "text"):
            for multiple in multiples:
                length = multiple * TRAINED_LENGTH
                names = [model.name for model in MODELS if model.task == task]
                row.append(_mean([_get(results, name, scaling, length) for name in names]))
        rows.append(row)
    head = [f"{name}, {multiple}x" for name in ("right", "perplexity") for multiple in multiples]
    return markdown(["scaling", *head], rows)


def _mean(found: Sequence[Measurement]) -> str:
    """Of one scaling in several models: right answers, or perplexity or its mean change from none."""
    changes = [each.comparison.difference for each in found if each.comparison]
    if found[0].metric != PERPLEXITY:
        return f"{100 * mean(each.value for each in found):.1f} %"
    return f"{100 * mean(changes) - 100:+.1f} %" if changes else f"{mean(each.value for each in found):.3f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table that ends with a line feed."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _get(results: Results, model: str, scaling: str, length: int) -> Measurement:
    return next(
        each
        for each in results.measurements
        if (each.model, each.scaling, each.length) == (model, scaling, length)
    )


def _from(study: str, table: Callable[[Results], str]) -> Callable[[Mapping[str, Results]], str]:
    """A table of one study, made from the results of all."""
    return lambda found: table(found[study])


TABLES: dict[str, Callable[[Mapping[str, Results]], str]] = {
    "trained": _from("results", trained),
    "summary": _from("results", summary),
    "late": _from("results", late),
    "means": _from("results", partial(means, scalings=OF_ALL, multiples=MULTIPLES)),
    "pairs": _from("results", pairs),
    "tiny-bloom": _from("results", partial(of_one, model=MODELS[0])),
    "temperatures": _from("temperatures", temperatures),
    "temperatures-pairs": _from("temperatures", pairs),
    "ramps": _from("ramps", partial(spread, task="lines")),
    "fits-lines": _from("fits", partial(spread, task="lines")),
    "fits-text": _from("fits", partial(spread, task="text")),
    "fits-pairs": _from("fits", pairs),
}
"""Name in a document's marker ``<!-- evidence NAME: ... -->`` -> the function that makes the table."""
