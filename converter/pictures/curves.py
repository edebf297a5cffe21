"""Curves of measured scores or perplexity: by length, and by the place of the answer or token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from converter.errors import UsageError
from converter.evaluation.results import PERPLEXITY, Measurement, Results, perplexity_text
from converter.evaluation.statistics import compare, exp_of, summarise
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
    lengths = sorted({each.length for each in lines.points})
    longer = [length for length in lengths if trained is None or length > trained] or lengths
    by_position = any(each.positions for each in lines.points)
    depths = [depth for each in lines.points if each.length in longer for depth in each.depths]
    second = by_position or any(depth is not None for depth in depths)
    figure, others = _frame(f"{plain(model)}: {plain(task)}", lines, [trained], second)
    for axes in others:
        if by_position:
            _by_position(axes, lines, trained)
        else:
            _by_depth(axes, lines, longer)
    return figure


@styled
def draw_models(results: Results, task: str) -> Figure:
    """The same by length alone, for every model under every scaling."""
    found = [each for each in results.measurements if each.task == task]
    if not found:
        raise UsageError(f"the results have no {task}")
    trained = dict.fromkeys(results.models.get(each.model, {}).get("train_length") for each in found)
    return _frame(plain(task), _lines(results, found, several=True), list(trained), False)[0]


@dataclass(frozen=True)
class Line:
    """One model under one scaling."""

    label: str
    points: Sequence[Measurement]
    """The shortest first."""


@dataclass(frozen=True)
class Lines:
    """What a picture shows, and how."""

    kept: Sequence[Line]
    """At most ``MOST_LINES``."""
    note: str | None
    """A sentence on the lines that are left out."""
    base: Mapping[int, Measurement]
    """Length -> the first line's measurement, if the others are drawn as ratios to it."""

    @property
    def points(self) -> list[Measurement]:
        """The measurements of all lines."""
        return [each for line in self.kept for each in line.points]


def _lines(results: Results, found: Sequence[Measurement], *, several: bool = False) -> Lines:
    """The lines of these measurements; with ``several`` models, labels name the model too."""
    names = short_names(each.scaling for each in results.measurements)
    grouped: dict[tuple[str, str], list[Measurement]] = {}
    for each in found:
        grouped.setdefault((each.model, each.scaling), []).append(each)
    lines = [
        Line(
            f"{plain(model)}: {plain(names[scaling])}" if several else plain(names[scaling]),
            sorted(points, key=lambda each: each.length),
        )
        for (model, scaling), points in grouped.items()
    ]
    longest = max(each.length for each in found)
    sign = 1 if found[0].metric == PERPLEXITY else -1

    def rank(line: Line) -> tuple[bool, float]:
        last = line.points[-1]
        return last.length < longest, sign * last.value

    best = sorted(lines[1:], key=rank)[: MOST_LINES - 1]
    kept = [line for line in lines if line is lines[0] or line in best]
    note = f"{len(kept)} of {len(lines)} lines: the first, and the best at {longest} tokens."
    return Lines(kept, note if len(kept) < len(lines) else None, _base(kept))


def _base(lines: Sequence[Line]) -> Mapping[int, Measurement]:
    """See ``Lines.base``; empty for scores, for one line, and for lines of different windows."""
    first, *others = lines
    base = {each.length: each for each in first.points}

    def paired(each: Measurement) -> bool:
        its = base.get(each.length)
        return (
            its is not None
            and (each.model == its.model or each.comparison is not None)
            and 0 < len(each.scores) == len(its.scores)
            and [(part.start, part.end) for part in each.positions]
            == [(part.start, part.end) for part in its.positions]
        )

    perplexity = first.points[0].metric == PERPLEXITY
    return (
        base if perplexity and others and all(paired(each) for line in others for each in line.points) else {}
    )


def _frame(
    title: str, lines: Lines, trained: Sequence[int | None], second: bool
) -> tuple[Figure, Sequence[Axes]]:
    """A figure with the lines by length, the trained lengths and the legend; and its other panel, if any."""
    figure = Figure((2 * PANEL if second else PANEL + 1.4, HEIGHT), layout="constrained")
    axes, *others = figure.subplots(1, 1 + second, squeeze=False)[0]
    drawn = []
    for index, line in enumerate(lines.kept):
        places = [each.length * 2 ** (APART * (index - (len(lines.kept) - 1) / 2)) for each in line.points]
        values = np.array([_value(each, lines.base) for each in line.points])
        style.intervals(axes, places, values, index, line.label)
        drawn += list(values[:, 0])
    base = lines.base

    def tick(length: int) -> str:
        return f"{length}\n{perplexity_text(base[length].value)}" if length in base else str(length)

    style.length_axis(axes, sorted({each.length for each in lines.points}), tick)
    axes.set_xlabel(f"tokens, and perplexity of {lines.kept[0].label}" if base else "tokens")
    axes.set_title("by length, with 95 % confidence intervals")
    _value_axis(axes, lines, drawn)
    for length in trained:
        _mark_trained(axes, length)
    figure.suptitle(title, **style.HEADING)
    style.legend(figure, axes, lines.note)
    return figure, others


def _value(each: Measurement, base: Mapping[int, Measurement]) -> Sequence[float]:
    """What is drawn of a measurement: its value with its interval, or the ratio to the first line's."""
    if not base:
        unit = 1 if each.metric == PERPLEXITY else 100
        return _finite([unit * each.value, unit * each.low, unit * each.high])
    found = compare(each.metric, each.scores, base[each.length].scores)
    low = found.low if math.isfinite(found.high) else math.nan
    return _finite([found.difference, low, found.high])


def _by_position(axes: Axes, lines: Lines, trained: int | None) -> None:
    length = max(each.length for each in lines.points if each.positions)
    places, drawn = [float(length)], []
    for index, line in enumerate(lines.kept):
        for each in line.points:
            if each.length != length:
                continue
            middles = [(part.start + part.end) / 2 for part in each.positions]
            losses = [part.loss for part in each.positions]
            if lines.base:
                firsts = lines.base[length].positions
                losses = [loss - first.loss for loss, first in zip(losses, firsts, strict=True)]
            values = _finite([exp_of(loss) for loss in losses])
            axes.plot(middles, values, markersize=4, linewidth=1.2, **style.look(index))
            places += middles
            drawn += list(values)
    log2_axis(axes, "x", places, power_text)
    axes.set_xlabel("position in the window, tokens")
    axes.set_title(f"by position in windows of {length} tokens")
    _value_axis(axes, lines, drawn)
    _mark_trained(axes, trained)


def _by_depth(axes: Axes, lines: Lines, lengths: Sequence[int]) -> None:
    metric = lines.points[0].metric
    for index, line in enumerate(lines.kept):
        parts: list[list[float]] = [[] for _ in range(DEPTHS)]
        for each in line.points:
            if each.length in lengths:
                for score, depth in zip(each.scores, each.depths, strict=True):
                    if depth is not None:
                        parts[min(int(depth * DEPTHS), DEPTHS - 1)].append(score)
        shift = 0.5 + APART * (index - (len(lines.kept) - 1) / 2)
        places = [part + shift for part, scores in enumerate(parts) if scores]
        if places:
            summaries = [summarise(metric, scores) for scores in parts if scores]
            style.intervals(axes, places, 100 * _finite(summaries), index)
    edges = [f"{100 * part // DEPTHS}" for part in range(DEPTHS + 1)]
    axes.set_xticks(range(DEPTHS + 1), edges)
    axes.set_xlabel("place of the answer in the prompt, % (0: start)")
    between = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else f"{lengths[0]}"
    axes.set_title(f"by place of the answer, {between} tokens")
    _value_axis(axes, lines, [])


def _value_axis(axes: Axes, lines: Lines, values: Sequence[float]) -> None:
    metric = lines.points[0].metric
    if metric != PERPLEXITY:
        axes.set_ylabel(f"{metric}, %")
        axes.set_ylim(-3, 103)
        return
    axes.set_ylabel(f"perplexity, times that of {lines.kept[0].label}" if lines.base else "perplexity")
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
