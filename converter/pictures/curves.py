"""Curves of measured scores or perplexity: by length, and by the place of the answer or token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from converter.errors import UsageError
from converter.evaluation.results import PERPLEXITY, Bucket, Measurement, Results
from converter.evaluation.statistics import exp_of, summarise
from converter.pictures import style
from converter.pictures.style import log2_axis, plain, power_text, styled

PANEL, HEIGHT = 4.6, 3.4
"""Inches: the width of a panel, and its height without the legend."""
TRAINED = "trained length"
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

    A second panel shows, if they were measured, perplexity by position in the longest windows, or scores by
    the answer's place in prompts beyond the trained length. Raises ``UsageError`` if nothing was measured.
    """
    found = [each for each in results.measurements if (each.model, each.task) == (model, task)]
    if not found:
        raise UsageError(f"the results have no {task} for {model}")
    trained = results.models.get(model, {}).get("train_length")
    longer = [each for each in found if trained is None or each.length > trained] or found
    by_position = [each for each in found if each.positions]
    by_depth = [each for each in longer if any(depth is not None for depth in each.depths)]
    lines = _lines(found, lambda each: plain(each.scaling))
    figure, others = _frame(f"{plain(model)}: {plain(task)}", lines, [trained], bool(by_position or by_depth))
    order = list(dict.fromkeys(each.scaling for each in found))
    for axes in others:
        if by_position:
            _by_position(axes, by_position, order, trained)
        else:
            _by_depth(axes, by_depth, order)
    return figure


@styled
def draw_models(results: Results, task: str) -> Figure:
    """The same by length alone, for every model under every scaling."""
    found = [each for each in results.measurements if each.task == task]
    if not found:
        raise UsageError(f"the results have no {task}")
    lengths = (results.models.get(each.model, {}).get("train_length") for each in found)
    lines = _lines(found, lambda each: f"{plain(each.model)}: {plain(each.scaling)}")
    return _frame(plain(task), lines, list(dict.fromkeys(lengths)), False)[0]


Lines = Mapping[tuple[str, str], tuple[str, Sequence[Measurement]]]
"""Model and scaling -> label, and measurements, the shortest first."""


def _lines(found: Sequence[Measurement], label: Callable[[Measurement], str]) -> Lines:
    lines: dict[tuple[str, str], tuple[str, list[Measurement]]] = {}
    for each in found:
        lines.setdefault((each.model, each.scaling), (label(each), []))[1].append(each)
    return {key: (name, sorted(line, key=lambda each: each.length)) for key, (name, line) in lines.items()}


def _frame(
    title: str, lines: Lines, trained: Sequence[int | None], second: bool
) -> tuple[Figure, Sequence[Axes]]:
    """A figure with the lines by length, the trained lengths and the legend; and its other panel, if any."""
    known = [length for length in trained if length is not None]
    width = 2 * PANEL if second else PANEL + 1.4
    below = style.legend_height([*(label for label, _ in lines.values()), *[TRAINED] * len(known)], width)
    figure = Figure((width, HEIGHT + 0.3 + below), layout="constrained")
    axes, *others = figure.subplots(1, 1 + second, squeeze=False)[0]
    for index, (label, line) in enumerate(lines.values()):
        places = [each.length * 2 ** (APART * (index - (len(lines) - 1) / 2)) for each in line]
        values = [(each.value, each.low, each.high) for each in line]
        style.intervals(
            axes, places, (1 if line[0].metric == PERPLEXITY else 100) * _finite(values), index, label
        )
    found = [each for _, line in lines.values() for each in line]
    style.length_axis(axes, sorted({each.length for each in found}))
    axes.set_xlabel("tokens")
    axes.set_title("by length, with 95 % confidence intervals")
    _value_axis(axes, found[0], [each.value for each in found])
    for length in known:
        _mark_trained(axes, length)
    figure.suptitle(title, **style.HEADING)
    style.legend(figure, axes)
    return figure, others


def _by_position(axes: Axes, found: Sequence[Measurement], scalings: list[str], trained: int | None) -> None:
    length = max(each.length for each in found)
    longest = [each for each in found if each.length == length]
    for each in longest:
        middles = [_middle(bucket) for bucket in each.positions]
        values = _finite([exp_of(bucket.loss) for bucket in each.positions])
        look = style.look(scalings.index(each.scaling))
        axes.plot(middles, values, markersize=4, linewidth=1.2, **look)
    log2_axis(
        axes, "x", [*(_middle(bucket) for each in longest for bucket in each.positions), length], power_text
    )
    axes.set_xlabel("position in the window, tokens")
    axes.set_title(f"by position in windows of {length} tokens")
    _value_axis(axes, found[0], [exp_of(bucket.loss) for each in longest for bucket in each.positions])
    _mark_trained(axes, trained)


def _by_depth(axes: Axes, found: Sequence[Measurement], scalings: list[str]) -> None:
    lengths = sorted({each.length for each in found})
    for index, scaling in enumerate(scalings):
        parts: list[list[float]] = [[] for _ in range(DEPTHS)]
        for each in found:
            for score, depth in zip(each.scores, each.depths, strict=True):
                if each.scaling == scaling and depth is not None:
                    parts[min(int(depth * DEPTHS), DEPTHS - 1)].append(score)
        places = [
            part + 0.5 + APART * (index - (len(scalings) - 1) / 2) for part in range(DEPTHS) if parts[part]
        ]
        if not places:
            continue
        summaries = [summarise(found[0].metric, scores) for scores in parts if scores]
        style.intervals(axes, places, 100 * _finite(summaries), index)
    edges = [f"{100 * part // DEPTHS}" for part in range(DEPTHS + 1)]
    axes.set_xticks(range(DEPTHS + 1), edges)
    axes.set_xlabel("place of the answer in the prompt, % (0: start)")
    between = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else f"{lengths[0]}"
    axes.set_title(f"by place of the answer, {between} tokens")
    _value_axis(axes, found[0], [])


def _value_axis(axes: Axes, like: Measurement, values: Sequence[float]) -> None:
    if like.metric != PERPLEXITY:
        axes.set_ylabel(f"{like.metric}, %")
        axes.set_ylim(-3, 103)
        return
    axes.set_ylabel("perplexity")
    finite = [value for value in values if 0 < value < math.inf]
    if finite and max(finite) > WIDE * min(finite):
        log2_axis(axes, "y", finite, power_text)


def _mark_trained(axes: Axes, trained: int | None) -> None:
    if trained is not None:
        axes.axvline(trained, zorder=1, label=f"{TRAINED} ({trained})", **style.MARK)


def _middle(bucket: Bucket) -> float:
    return (bucket.start + bucket.end) / 2


def _finite(values: object) -> np.ndarray:
    """The values as float64; infinite ones become NaN, which is not drawn."""
    numbers = np.array(values, dtype=np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)
