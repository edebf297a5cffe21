"""Draws slopes and attention spans of every head, the penalty of one, and wavelengths of every rotary pair.

Every conversion draws the picture of its card, so that one is fast and small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from converter.pictures import style
from converter.pictures.positions import Positions, Variant
from converter.pictures.style import MOST_LINES, log2_axis, plain, power_text, styled
from converter.scaling.slopes import NATS

POINTS = 200
"""Of a line of penalties."""
SHAPE, CARD = (7.5, 3.8), (8.8, 3.1)
"""Width and height of a picture, and of a card's, in inches without the legend."""


def spans(variant: Variant) -> list[float]:
    """The distance in tokens at which each head's bias reaches -``NATS``; NaN for a head that never does."""
    return [math.nan if penalty.span is None else penalty.span for penalty in variant.penalties]


@styled
def draw_slopes(drawn: Positions) -> Figure:
    """Draws the slope of every head on a logarithmic axis, in the order of the heads.

    A concave penalty has none, and is left out. If the number of heads is not a power of two, the slopes
    start again at the first extra head.
    """
    return _figure(drawn, slopes_panel, "Slope of each head")


@styled
def draw_span(drawn: Positions) -> Figure:
    """Draws the attention span of every head: the distance in tokens at which its bias reaches -``NATS``.

    A head whose concave penalty does not reach it within the text has no mark.
    """
    return _figure(drawn, span_panel, f"Attention span: distance at which the bias is -{NATS:g} nats")


@styled
def draw_penalty(drawn: Positions) -> Figure:
    """Draws the penalty of one head by distance: the one whose stock span is nearest the trained length."""
    return _figure(drawn, penalty_panel, f"Penalty of head {shown_head(drawn)} by distance")


@styled
def draw_wavelengths(drawn: Positions) -> Figure:
    """Draws the tokens that each pair of rotary channels takes to turn once: 2 pi / frequency."""
    return _figure(drawn, wavelengths_panel, "Wavelength of each pair of rotary channels")


@styled
def card_figure(drawn: Positions) -> Figure:
    """Slopes and attention span side by side; for a rotary model, its wavelengths.

    A concave penalty has no slopes; one head's penalty by distance takes their place.
    """
    figure = Figure(CARD)
    figure.subplots_adjust(wspace=0.35, bottom=0.15)
    if drawn.rotary:
        axes = figure.add_subplot()
        wavelengths_panel(axes, drawn)
        axes.set_title("Wavelength of each pair of channels")
    else:
        axes, right = figure.subplots(1, 2)
        if any(scaling.power is not None for scaling in drawn.scalings):
            penalty_panel(axes, drawn)
            axes.set_title(f"Penalty of head {shown_head(drawn)}")
        else:
            slopes_panel(axes, drawn)
            axes.set_title("Slope of each head")
        span_panel(right, drawn)
        right.set_title(f"Attention span: bias of -{NATS:g} nats")
    style.legend(figure, axes, _note(drawn))
    return figure


def card_picture(drawn: Positions) -> bytes:
    """``card_figure`` as a PNG file; the same model gives the same bytes."""
    return style.render(card_figure(drawn), dpi=100)


def _figure(drawn: Positions, panel: Callable[[Axes, Positions], None], title: str) -> Figure:
    figure = Figure(SHAPE, layout="constrained")
    axes = figure.add_subplot()
    panel(axes, drawn)
    figure.suptitle(plain(drawn.name), **style.HEADING)
    axes.set_title(title)
    style.legend(figure, axes, _note(drawn))
    return figure


def slopes_panel(axes: Axes, drawn: Positions) -> None:
    """``draw_slopes`` into existing axes."""
    scale = "" if drawn.bias_scale == 1 else f" (bias per token: {drawn.bias_scale:.3g} times this)"
    up = f"slope{scale or ', nats per token'}"
    _draw(axes, drawn, lambda variant: variant.values, "head", up, mark=False)


def span_panel(axes: Axes, drawn: Positions) -> None:
    """``draw_span`` into existing axes."""
    _draw(axes, drawn, spans, "head", "span, tokens")


def penalty_panel(axes: Axes, drawn: Positions) -> None:
    """``draw_penalty`` into existing axes."""
    head = shown_head(drawn)
    for index, variant in enumerate(drawn.variants[:MOST_LINES]):
        penalty = variant.penalties[head]
        longest = variant.tokens or drawn.train_length or spans(variant)[head]
        distances = [longest * point / POINTS for point in range(POINTS + 1)]
        look = style.look(index) | {"marker": ""}
        axes.plot(distances, [penalty.at(each) for each in distances], label=variant.label, **look)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("distance, tokens")
    axes.set_ylabel("penalty, nats")


def shown_head(drawn: Positions) -> int:
    """The head whose stock span is nearest the trained length; the flattest if that length is not known."""
    found = [NATS / penalty.line for penalty in drawn.variants[0].penalties]
    wanted = drawn.train_length or max(found)
    return min(range(len(found)), key=lambda head: abs(math.log(found[head] / wanted)))


def wavelengths_panel(axes: Axes, drawn: Positions) -> None:
    """``draw_wavelengths`` into existing axes."""
    across, up = "pair of channels", "wavelength, tokens"
    _draw(axes, drawn, lambda variant: [2 * math.pi / each for each in variant.values or ()], across, up)


def _note(drawn: Positions) -> str | None:
    """What a picture says if it does not have room for all variants."""
    count = len(drawn.variants)
    if count <= MOST_LINES:
        return None
    return f"The first {MOST_LINES} of {count} lines; name fewer scalings to see the others."


def _draw(
    axes: Axes,
    drawn: Positions,
    height: Callable[[Variant], Sequence[float] | None],
    across: str,
    up: str,
    *,
    mark: bool = True,
) -> None:
    """Draws one series per variant, with markers only, since there is nothing between two heads.

    A variant without heights is left out.
    """
    drawn_variants = drawn.variants[:MOST_LINES]
    series = [height(variant) for variant in drawn_variants]
    # Stock markers are filled and the others hollow: both are visible where a scaling changes nothing.
    heads = len(drawn.stock)
    size = 7.0 if heads <= 20 else 5.0 if heads <= 48 else 3.5
    for index, (variant, values) in enumerate(zip(drawn_variants, series, strict=True)):
        if values is None:  # a scaling has the same colour in all pictures of a model
            continue
        look = style.look(index) | {"linestyle": "none"}
        fill = {"markersize": size * 0.6} if index == 0 else {"markersize": size, "markerfacecolor": "none"}
        axes.plot(range(heads), values, label=variant.label, **look, **fill)
    step = next(step for step in (1, 2, 4, 8, 16, 64, 256, 512) if heads <= 12 * step)
    axes.xaxis.set_major_locator(FixedLocator(range(0, heads, step)))
    axes.set_xlim(-0.6, heads - 0.4)
    lengths = _mark_lengths(axes, drawn) if mark else []
    shown = [value for values in series for value in values or () if not math.isnan(value)]
    log2_axis(axes, "y", [*shown, *lengths], power_text)
    axes.set_xlabel(across)
    axes.set_ylabel(up)


def _mark_lengths(axes: Axes, drawn: Positions) -> list[float]:
    """Draws lines at the trained length and the longest one shown; returns those that are known."""
    marks = (("trained", drawn.train_length, "-", "top"), ("up to", drawn.longest_shown, "--", "bottom"))
    for name, length, dash, side in marks:
        if length is None:
            continue
        axes.axhline(length, zorder=1, linestyle=dash, **style.MARK)
        axes.annotate(
            f"{name}\n{length:.0f}",
            (1, length),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            verticalalignment=side,
            color=style.MARK["color"],
            fontsize=8,
        )
    return [length for _, length, _, _ in marks if length is not None]
