"""The bias that heads add between queries and keys, under static, length- and position-dynamic scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray

from converter.config import LONGEST
from converter.errors import UsageError
from converter.pictures.per_head import spans
from converter.pictures.positions import Positions, dynamic_lengths
from converter.pictures.style import HEADING, plain, styled
from converter.scaling.scaling import UNSCALED, Scaling
from converter.scaling.slopes import NATS

POINTS = 256
"""Most queries, and most distances, that a panel has; they are evenly spread."""
DARKEST = -8.0
"""Nats. All lower biases leave less than e^-8 = 0.03 % of the weight and get the same colour."""
COLOURS = "cividis"
MOST_HEADS = 16
SIDE = 2.1
"""Width and height of a panel in inches."""
PARTS = (1 / 16, 1 / 4, 1)
"""The heads whose spans are nearest to these parts of the trained length are drawn by default."""


@dataclass(frozen=True)
class Panel:
    """A row of so many tokens under a scaling."""

    title: str
    scaling: Scaling
    tokens: int


def query_slopes(
    drawn: Positions, scaling: Scaling, head: int, tokens: int, positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The slope of each query of a row, times the model's factor on the bias; float64 [N], as positions."""
    if scaling.dynamic != "position":
        slope = drawn.slopes_at(scaling, tokens)[head]
        return np.full(len(positions), drawn.bias_scale * slope)
    slopes = [drawn.slopes_at(scaling, int(position) + 1)[head] for position in positions]
    return drawn.bias_scale * np.array(slopes)


def bias_rows(
    drawn: Positions,
    scaling: Scaling,
    head: int,
    tokens: int,
    positions: NDArray[np.int64],
    offsets: NDArray[np.int64],
) -> NDArray[np.float64]:
    """The bias of one head in a row of ``tokens`` tokens, in nats: -slope * bias_scale * |key - query|.

    ``positions`` are those of the queries, from 0, int64 [N]; ``offsets`` are key - query, int64 [M]. The
    result is float64 [N, M], with NaN where there is no query or key, or a decoder's query does not see it.
    """
    queries, keys = positions[:, None], positions[:, None] + offsets
    slopes = query_slopes(drawn, scaling, head, tokens, positions)
    seen = (queries < tokens) & (keys >= 0) & (keys < tokens)
    if drawn.decoder:
        seen &= keys <= queries
    return np.where(seen, -slopes[:, None] * np.abs(offsets), np.nan)


@styled
def draw_bias(
    drawn: Positions, scaling: Scaling, heads: Sequence[int] | None = None, nats: float = NATS
) -> Figure:
    """Draws the bias of some heads, one row of panels per head: stock beside scaled, in the same colours.

    A length-dynamic scaling gets a panel for each of several row lengths. By default the heads are those
    whose spans are nearest to ``PARTS`` of the trained length. A line marks where the bias reaches
    -``nats``: how far a head sees.
    """
    title = f"{plain(drawn.name)}\nbias under {plain(drawn.labels[scaling])}"
    return draw_panels(drawn, _panels(drawn, scaling), _heads(drawn, heads), nats, title)


@styled
def draw_panels(
    drawn: Positions, panels: Sequence[Panel], heads: Sequence[int], nats: float, title: str
) -> Figure:
    """Draws a row of panels per head: queries down the panel, and keys across, by their distance."""
    shape = (1.2 + SIDE * len(panels) + 0.9, 0.75 + SIDE * len(heads))
    figure = Figure(shape, layout=ConstrainedLayoutEngine(w_pad=0.1))
    grid = figure.subplots(len(heads), len(panels), squeeze=False, sharex="row", sharey=True)
    for line, head in zip(grid, heads, strict=True):
        image = _draw(line, drawn, panels, head, nats)
    for axes, panel in zip(grid[0], panels, strict=True):
        axes.set_title(panel.title, fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("key - query, tokens")
    figure.suptitle(title, **HEADING)
    bar = figure.colorbar(image, ax=grid, extend="min", shrink=min(1.0, 1.6 / len(heads)), aspect=14)
    bar.set_label(f"bias, nats (line: -{nats:g})")
    return figure


def _draw(
    line: Sequence[Axes], drawn: Positions, panels: Sequence[Panel], head: int, nats: float
) -> AxesImage:
    """Draws the panels of one head, as wide as the widest span and the farthest key that is not dark need."""
    longest = max(panel.tokens for panel in panels)
    count = min(POINTS, longest)
    queries = np.arange(count) * longest // count
    reaches = [
        np.array(spans(query_slopes(drawn, panel.scaling, head, panel.tokens, queries), 1.0, nats))
        for panel in panels
    ]
    wanted = max(map(np.max, reaches)) * max(1.0, -DARKEST / nats)
    first = -longest if wanted >= longest else -min(longest, 2 ** math.ceil(math.log2(max(1.0, wanted))))
    last = 0 if drawn.decoder else -first
    offsets = np.linspace(first, last, min(POINTS, last - first + 1)).astype(np.int64)
    for axes, panel, reach in zip(line, panels, reaches, strict=True):
        image = axes.imshow(
            bias_rows(drawn, panel.scaling, head, panel.tokens, queries, offsets),
            cmap=COLOURS,
            vmin=DARKEST,
            vmax=0.0,
            extent=(first, last, longest, 0),
            aspect="auto",
            interpolation="nearest",
        )
        for edge in (-reach,) if drawn.decoder else (-reach, reach):
            inside = (queries < panel.tokens) & (queries + edge >= 0) & (queries + edge < panel.tokens)
            axes.plot(np.where(inside, edge, np.nan), queries, color="white", linewidth=1.0)
        axes.grid(False)
    line[0].set_xlim(first, last)
    line[0].set_ylim(longest, 0)
    line[0].set_xticks([first, (first + last) // 2, last])
    line[0].set_yticks([0, longest // 2, longest])
    line[0].set_ylabel(f"head {head}\nposition of the query")
    return image


def _panels(drawn: Positions, scaling: Scaling) -> list[Panel]:
    """The panels for stock and for ``scaling``."""
    if not scaling.dynamic:
        # If the trained length is not known, use the span of the flattest head.
        trained = drawn.train_length or max(spans(drawn.stock, drawn.bias_scale, NATS))
        tokens = math.ceil(min(scaling.factor_at(0) * trained, LONGEST))
        return [Panel("stock", UNSCALED, tokens), Panel("scaled", scaling, tokens)]
    lengths = dynamic_lengths(scaling)
    stock = Panel("stock", UNSCALED, lengths[-1])
    if scaling.dynamic == "position":
        return [stock, Panel("slope by query position", scaling, lengths[-1])]
    return [stock, *(Panel(f"a row of {length} tokens", scaling, length) for length in lengths)]


def _heads(drawn: Positions, heads: Sequence[int] | None) -> list[int]:
    count = len(drawn.stock)
    if heads is None:
        reach = spans(drawn.stock, drawn.bias_scale, NATS)
        trained = drawn.train_length or max(reach)
        near = (
            min(range(count), key=lambda head: abs(math.log(reach[head] / (part * trained))))
            for part in PARTS
        )
        return list(dict.fromkeys(near))
    if len(set(heads)) > MOST_HEADS:
        raise UsageError(f"`heads` names {len(set(heads))} heads; give at most {MOST_HEADS}")
    for head in heads:
        if not 0 <= head < count:
            raise UsageError(f"`heads` {head} is out of range; give heads from 0 to {count - 1}")
    return list(dict.fromkeys(heads))
