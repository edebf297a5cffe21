"""Curves of measured scores or perplexity: by length, and by the place of the answer or token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from converter.errors import UsageError
from converter.evaluation.results import PERPLEXITY, Measurement, Results, exp_of, perplexity_text
from converter.evaluation.statistics import compare_scores as compare
from converter.evaluation.statistics import summarise
from converter.pictures import style
from converter.pictures.style import MOST_LINES, log2_axis, plain, power_text, styled
from converter.scaling.scaling import short_names

PANEL, HEIGHT = 4.6, 3.7
"""Inches: the width of a panel, and its height, without the legend."""
DEPTHS = 5
"""Parts of the prompt by which answers are grouped."""
APART = 0.03
"""Distance between the points of neighbouring series, so their intervals do not overlap; in octaves of
length, or in parts of the prompt."""
WIDE = 4.0
"""If the largest perplexity exceeds the smallest by this factor, the axis is logarithmic."""


@styled
def draw_curves(results: Results, model: str, task: str) -> Figure:
    """Draws a task by length for every scaling, with 95 % confidence intervals and the trained length.

    Perplexities of several scalings are drawn as ratios to those of the first one on the same windows. A
    second panel shows, if they were measured, perplexity by position in the longest windows, or scores by
    the answer's place in prompts beyond the trained length. Raises ``UsageError`` if nothing was measured.
    """
    found = [each for each in results.measurements if (each.model, each.task) == (model, task)]
    if not found:
        raise UsageError(f"the results have no {task} for {model}")
    trained = results.models.get(model, {}).get("train_length")
    lines = _lines(results, found)
    kept = [each for _, line in lines.kept for each in line]
    longer = [each for each in kept if trained is None or each.length > trained] or kept
    by_position = any(each.positions for each in kept)
    by_depth = any(depth is not None for each in longer for depth in each.depths)
    figure, others = _frame(f"{plain(model)}: {plain(task)}", lines, [trained], by_position or by_depth)
    for axes in others:
        if by_position:
            _by_position(axes, lines, trained)
        else:
            _by_depth(axes, lines, sorted({each.length for each in longer}))
    return figure


@styled
def draw_models(results: Results, task: str) -> Figure:
    """The same by length alone, for every model under every scaling."""
    found = [each for each in results.measurements if each.task == task]
    if not found:
        raise UsageError(f"the results have no {task}")
    trained = dict.fromkeys(results.models.get(each.model, {}).get("train_length") for each in found)
    return _frame(plain(task), _lines(results, found, several=True), list(trained), False)[0]


Line = Sequence[Measurement]
"""One model under one scaling, the shortest length first."""


@dataclass(frozen=True)
class Lines:
    """What a picture shows."""

    kept: Sequence[tuple[str, Line]]
    """Labels and at most ``MOST_LINES`` lines."""
    note: str | None
    """A sentence on the lines that are left out."""
    base: Mapping[int, float]
    """Length -> the first line's perplexity, if values are ratios to it; otherwise empty."""


def _lines(results: Results, found: Sequence[Measurement], *, several: bool = False) -> Lines:
    """The lines of these measurements; with ``several`` models, labels name the model too."""
    names = short_names(each.scaling for each in results.measurements)
    # In the order of measuring, in which the first is the one that others are compared with.
    order = list(dict.fromkeys((each.model, each.scaling) for each in found))
    lines: dict[tuple[str, str], list[Measurement]] = {key: [] for key in order}
    for each in sorted(found, key=lambda each: each.length):
        lines[each.model, each.scaling].append(each)
    longest = max(each.length for each in found)

    def rank(key: tuple[str, str]) -> tuple[bool, float]:
        last = lines[key][-1]
        return last.length < longest, last.value if last.metric == PERPLEXITY else -last.value

    best = [order[0], *sorted(order[1:], key=rank)[: MOST_LINES - 1]]
    kept = [key for key in order if key in best]
    labels = [(f"{plain(model)}: " if several else "") + plain(names[scaling]) for model, scaling in kept]
    shown = [lines[key] for key in kept]
    ratios, base = _ratios(shown), {each.length: each.value for each in shown[0]}
    note = f"{len(kept)} of {len(order)} lines: the first, and the best at {longest} tokens."
    return Lines(
        list(zip(labels, ratios or shown, strict=True)),
        note if len(kept) < len(order) else None,
        base if ratios else {},
    )


def _ratios(lines: Sequence[Line]) -> list[Line] | None:
    """Perplexities as ratios to those of the first line; None for other lines, and for other windows."""
    first, *others = lines
    base = {each.length: each for each in first}

    def ratio(each: Measurement) -> Measurement:
        its = base[each.length]
        found = compare(PERPLEXITY, each.scores, its.scores)
        parts = zip(each.positions, its.positions, strict=True)
        positions = tuple(replace(part, loss=part.loss - its_part.loss) for part, its_part in parts)
        low = found.low if math.isfinite(found.high) else math.nan
        return replace(each, value=found.difference, low=low, high=found.high, positions=positions)

    same = all(
        each.length in base
        and (each.model == first[0].model or each.comparison is not None)
        and 0 < len(each.scores) == len(base[each.length].scores)
        and len(each.positions) == len(base[each.length].positions)
        for each in itertools.chain(*others)
    )
    if first[0].metric != PERPLEXITY or not others or not same:
        return None
    return [[ratio(each) for each in line] for line in lines]


def _frame(
    title: str, lines: Lines, trained: Sequence[int | None], second: bool
) -> tuple[Figure, Sequence[Axes]]:
    """A figure with the lines by length, the trained lengths and the legend; and its other panel, if any."""
    figure = Figure((2 * PANEL if second else PANEL + 1.4, HEIGHT), layout="constrained")
    axes, *others = figure.subplots(1, 1 + second, squeeze=False)[0]
    for index, (label, line) in enumerate(lines.kept):
        places = [each.length * 2 ** (APART * (index - (len(lines.kept) - 1) / 2)) for each in line]
        values = [(each.value, each.low, each.high) for each in line]
        unit = 1 if line[0].metric == PERPLEXITY else 100
        style.intervals(axes, places, unit * _finite(values), index, label)
    found = [each for _, line in lines.kept for each in line]

    def tick(length: int) -> str:
        return f"{length}\n{perplexity_text(lines.base[length])}" if lines.base else str(length)

    style.length_axis(axes, sorted({each.length for each in found}), tick)
    axes.set_xlabel(f"tokens, and perplexity of {lines.kept[0][0]}" if lines.base else "tokens")
    axes.set_title("by length, with 95 % confidence intervals")
    _value_axis(axes, lines, [each.value for each in found])
    for length in trained:
        _mark_trained(axes, length)
    figure.suptitle(title, **style.HEADING)
    style.legend(figure, axes, lines.note)
    return figure, others


def _by_position(axes: Axes, lines: Lines, trained: int | None) -> None:
    length = max(each.length for _, line in lines.kept for each in line if each.positions)
    places = [float(length)]
    drawn: list[float] = []
    for index, (_, line) in enumerate(lines.kept):
        for each in line:
            if each.length == length:
                middles = [(part.start + part.end) / 2 for part in each.positions]
                values = [exp_of(part.loss) for part in each.positions]
                axes.plot(middles, _finite(values), markersize=4, linewidth=1.2, **style.look(index))
                places += middles
                drawn += values
    log2_axis(axes, "x", places, power_text)
    axes.set_xlabel("position in the window, tokens")
    axes.set_title(f"by position in windows of {length} tokens")
    _value_axis(axes, lines, drawn)
    _mark_trained(axes, trained)


def _by_depth(axes: Axes, lines: Lines, lengths: Sequence[int]) -> None:
    for index, (_, line) in enumerate(lines.kept):
        parts: list[list[float]] = [[] for _ in range(DEPTHS)]
        for each in line:
            for score, depth in zip(each.scores, each.depths, strict=False):
                if each.length in lengths and depth is not None:
                    parts[min(int(depth * DEPTHS), DEPTHS - 1)].append(score)
        shift = 0.5 + APART * (index - (len(lines.kept) - 1) / 2)
        places = [part + shift for part, scores in enumerate(parts) if scores]
        if places:
            summaries = [summarise(line[0].metric, scores) for scores in parts if scores]
            style.intervals(axes, places, 100 * _finite(summaries), index)
    edges = [f"{100 * part // DEPTHS}" for part in range(DEPTHS + 1)]
    axes.set_xticks(range(DEPTHS + 1), edges)
    axes.set_xlabel("place of the answer in the prompt, % (0: start)")
    between = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else f"{lengths[0]}"
    axes.set_title(f"by place of the answer, {between} tokens")
    _value_axis(axes, lines, [])


def _value_axis(axes: Axes, lines: Lines, values: Sequence[float]) -> None:
    label, line = lines.kept[0]
    if line[0].metric != PERPLEXITY:
        axes.set_ylabel(f"{line[0].metric}, %")
        axes.set_ylim(-3, 103)
        return
    axes.set_ylabel(f"perplexity, times that of {label}" if lines.base else "perplexity")
    finite = [value for value in values if 0 < value < math.inf]
    if finite and max(finite) > WIDE * min(finite):
        log2_axis(axes, "y", finite, power_text)


def _mark_trained(axes: Axes, trained: int | None) -> None:
    if trained is not None:
        axes.axvline(trained, zorder=1, label=f"trained length ({trained})", **style.MARK)


def _finite(values: object) -> np.ndarray:
    """The values as float64; infinite ones become NaN, which is not drawn."""
    numbers = np.array(values, dtype=np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)
