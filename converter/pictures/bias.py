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
from converter.pictures.positions import Positions, dynamic_lengths, shown
from converter.pictures.style import HEADING, plain, styled
from converter.scaling.scaling import UNSCALED, Dynamic, Scaling
from converter.scaling.slopes import NATS

POINTS = 256
"""Queries and keys of a matrix that are drawn, evenly spread."""
DARKEST = -8.0
"""Nats. All lower biases leave less than e^-8 = 0.03 % of the weight and get the same colour."""
COLOURS = "cividis"
MOST_HEADS = 16
SIDE = 2.1
"""Width and height of a panel in inches."""


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
    if not (isinstance(scaling, Dynamic) and scaling.dynamic == "position"):
        slope = drawn.slopes_at(scaling, tokens)[head]
        return np.full(len(positions), drawn.bias_scale * slope)
    slopes = [drawn.slopes_at(scaling, int(position) + 1)[head] for position in positions]
    return drawn.bias_scale * np.array(slopes)


def bias_matrix(
    drawn: Positions, scaling: Scaling, head: int, tokens: int, positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The bias of one head in a row of ``tokens`` tokens, in nats: -slope * bias_scale * |query - key|.

    ``positions`` are those of both queries and keys, from 0; int64 [N]. The result is float64 [N queries, N
    keys], with NaN beyond the row, and where a decoder's query does not see the key.
    """
    queries, keys = positions[:, None], positions[None, :]
    slopes = query_slopes(drawn, scaling, head, tokens, positions)
    seen = (queries < tokens) & (keys < tokens)
    if drawn.decoder:
        seen &= keys <= queries
    return np.where(seen, -slopes[:, None] * np.abs(queries - keys), np.nan)


@styled
def draw_bias(
    drawn: Positions, scaling: Scaling, heads: Sequence[int] | None = None, nats: float = NATS
) -> Figure:
    """Draws the bias of some heads, one row of panels per head: stock beside scaled, in the same colours.

    A length-dynamic scaling gets a panel for each of several row lengths. By default the heads are the
    steepest, the middle and the flattest. A line marks where the bias reaches -``nats``: how far a head sees.
    """
    chosen = _heads(drawn, heads)
    panels = _panels(drawn, scaling)
    return draw_panels(drawn, panels, chosen, nats, f"{plain(drawn.name)}: bias under {shown(scaling)}")


@styled
def draw_panels(
    drawn: Positions, panels: Sequence[Panel], heads: Sequence[int], nats: float, title: str
) -> Figure:
    """Draws a row of panels per head; every panel spans the tokens of the longest one."""
    shape = (1.2 + SIDE * len(panels) + 0.9, 0.75 + SIDE * len(heads))
    figure = Figure(shape, layout=ConstrainedLayoutEngine(compress=True, w_pad=0.12))
    grid = figure.subplots(len(heads), len(panels), squeeze=False, sharex=True, sharey=True)
    longest = max(panel.tokens for panel in panels)
    for line, head in zip(grid, heads, strict=True):
        for axes, panel in zip(line, panels, strict=True):
            image = _draw(axes, drawn, panel, head, longest, nats)
        line[0].set_ylabel(f"head {head}\nquery")
    for axes, panel in zip(grid[0], panels, strict=True):
        axes.set_title(panel.title, fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("key")
    figure.suptitle(title, **HEADING)
    bar = figure.colorbar(image, ax=grid, extend="min", shrink=min(1.0, 1.6 / len(heads)), aspect=14)
    bar.set_label(f"bias, nats (line: -{nats:g})")
    return figure


def _draw(axes: Axes, drawn: Positions, panel: Panel, head: int, extent: int, nats: float) -> AxesImage:
    count = min(POINTS, extent)
    positions = np.arange(count) * extent // count
    matrix = bias_matrix(drawn, panel.scaling, head, panel.tokens, positions)
    image = axes.imshow(
        matrix, cmap=COLOURS, vmin=DARKEST, vmax=0.0, extent=(0, extent, extent, 0), interpolation="nearest"
    )
    queries = positions[positions < panel.tokens]
    reach = spans(query_slopes(drawn, panel.scaling, head, panel.tokens, queries), 1.0, nats)
    for side in (-1,) if drawn.decoder else (-1, 1):
        edge = queries + side * np.array(reach)
        edge[(edge < 0) | (edge > panel.tokens)] = np.nan
        axes.plot(edge, queries, color="white", linewidth=1.0)
    axes.grid(False)
    axes.set_xlim(0, extent)
    axes.set_ylim(extent, 0)
    ticks = [0, extent // 2, extent]
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    return image


def _panels(drawn: Positions, scaling: Scaling) -> list[Panel]:
    """The panels for stock and for ``scaling``."""
    if not isinstance(scaling, Dynamic):
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
        steepness = sorted(range(count), key=lambda head: -drawn.stock[head])
        return list(dict.fromkeys(steepness[place] for place in (0, count // 2, count - 1)))
    if len(set(heads)) > MOST_HEADS:
        raise UsageError(f"`heads` names {len(set(heads))} heads; give at most {MOST_HEADS}")
    for head in heads:
        if not 0 <= head < count:
            raise UsageError(f"`heads` {head} is out of range; give heads from 0 to {count - 1}")
    return list(dict.fromkeys(heads))
