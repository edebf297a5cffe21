"""What was measured, by length: scores or perplexity, with where in the context the answer or token stood."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from converter.errors import UsageError
from converter.evaluation.results import PERPLEXITY, Bucket, Measurement, Results
from converter.evaluation.statistics import summarise
from converter.pictures import style
from converter.pictures.style import length_axis, log2_axis, plain, power_text, styled

PANEL, HEIGHT = 4.6, 3.4
"""Inches: a panel's width, and the height without the legend."""
TRAINED = "trained length"
DEPTHS = 5
"""Parts of the context that answers are sorted into."""
APART = 0.03
"""Between the points of neighbouring series, so that their intervals do not cover each other: octaves of
length, or parts of the context."""
WIDE = 4.0
"""From this ratio of the largest to the smallest on, perplexities have a logarithmic axis."""


@styled
def draw_curves(results: Results, model: str, task: str) -> Figure:
    """A task by length for every scaling, with 95 % confidence intervals and the trained length.

    Beside it, where that was measured: perplexity by position in the longest windows, or scores by the
    answer's place in the prompts beyond the trained length.

    Raises:
        UsageError: there is nothing of that model and task in the results.
    """
    found = [each for each in results.measurements if (each.model, each.task) == (model, task)]
    if not found:
        raise UsageError(f"the results hold no {task} of {model}")
    trained = results.models.get(model, {}).get("train_length")
    longer = [each for each in found if trained is None or each.length > trained] or found
    by_position = [each for each in found if each.positions]
    by_depth = [each for each in longer if any(depth is not None for depth in each.depths)]
    panels = 1 + bool(by_position or by_depth)
    width = PANEL * panels + (0 if panels > 1 else 1.4)
    scalings = list(dict.fromkeys(each.scaling for each in found))
    below = style.legend_height([*map(plain, scalings), TRAINED], width)
    figure = Figure((width, HEIGHT + 0.3 + below), layout="constrained")
    first, *others = figure.subplots(1, panels, squeeze=False)[0]
    _by_length(first, found, scalings, trained)
    for axes in others:
        if by_position:
            _by_position(axes, by_position, scalings, trained)
        else:
            _by_depth(axes, by_depth, scalings)
    figure.suptitle(f"{plain(model)}: {plain(task)}", **style.HEADING)
    style.legend(figure, first)
    return figure


def _by_length(axes: Axes, found: Sequence[Measurement], scalings: list[str], trained: int | None) -> None:
    for index, scaling in enumerate(scalings):
        line = sorted((each for each in found if each.scaling == scaling), key=lambda each: each.length)
        unit = _unit(line[0])
        values = _finite([unit * each.value for each in line])
        ends = _finite([[unit * each.low for each in line], [unit * each.high for each in line]])
        places = [each.length * 2 ** (APART * (index - (len(scalings) - 1) / 2)) for each in line]
        axes.errorbar(
            places,
            values,
            yerr=np.abs(ends - values),
            label=plain(scaling),
            markersize=4,
            linewidth=1.2,
            elinewidth=0.8,
            capsize=2,
            **style.look(index),
        )
    length_axis(axes, sorted({each.length for each in found}))
    axes.set_xlabel("tokens")
    axes.set_title("by length, with 95 % confidence intervals")
    _value_axis(axes, found[0], [each.value for each in found])
    _mark_trained(axes, trained)


def _by_position(axes: Axes, found: Sequence[Measurement], scalings: list[str], trained: int | None) -> None:
    length = max(each.length for each in found)
    longest = [each for each in found if each.length == length]
    for each in longest:
        middles = [_middle(bucket) for bucket in each.positions]
        values = _finite([_exp(bucket.loss) for bucket in each.positions])
        look = style.look(scalings.index(each.scaling))
        axes.plot(middles, values, markersize=4, linewidth=1.2, **look)
    log2_axis(
        axes, "x", [*(_middle(bucket) for each in longest for bucket in each.positions), length], power_text
    )
    axes.set_xlabel("position in the window, tokens")
    axes.set_title(f"by position in windows of {length} tokens")
    _value_axis(axes, found[0], [_exp(bucket.loss) for each in longest for bucket in each.positions])
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
        values, low, high = 100 * _finite(summaries).T
        axes.errorbar(
            places,
            values,
            yerr=np.abs([low - values, high - values]),
            markersize=4,
            linewidth=1.2,
            elinewidth=0.8,
            capsize=2,
            **style.look(index),
        )
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


def _unit(measurement: Measurement) -> float:
    return 1.0 if measurement.metric == PERPLEXITY else 100.0


def _middle(bucket: Bucket) -> float:
    return (bucket.start + bucket.end) / 2


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _finite(values: object) -> np.ndarray:
    """float64, with NaN, which is not drawn, for what is without end."""
    numbers = np.array(values, dtype=np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)
