"""The picture in a converted repository's card. Every conversion draws it, so it is fast and small."""

from __future__ import annotations

from matplotlib.figure import Figure

from converter.pictures import style
from converter.pictures.per_head import slopes_panel, span_panel, wavelengths_panel
from converter.pictures.positions import Positions
from converter.pictures.style import styled
from converter.scaling.slopes import NATS

WIDTH, HEIGHT = 8.4, 3.1
"""Inches; the height does not include the legend."""
DPI = 100
LEFT, RIGHT, BELOW, ABOVE = 0.75, 0.75, 0.5, 0.35
"""Margins in inches. They are fixed because computing them would mean drawing twice."""


@styled
def card_figure(model: Positions) -> Figure:
    """Slopes and attention span side by side; for a rotary model, its wavelengths."""
    labels = [variant.label for variant in model.variants]
    legend = style.legend_height(labels, WIDTH) + 0.1
    height = HEIGHT + legend
    figure = Figure((WIDTH, height))
    figure.subplots_adjust(
        left=LEFT / WIDTH,
        right=1 - RIGHT / WIDTH,
        bottom=(BELOW + legend) / height,
        top=1 - ABOVE / height,
        wspace=0.25,
    )
    if model.rotary:
        axes = figure.add_subplot()
        wavelengths_panel(axes, model)
        axes.set_title("Wavelength of each pair of channels")
    else:
        axes, right = figure.subplots(1, 2)
        slopes_panel(axes, model)
        axes.set_title("Slope of each head")
        span_panel(right, model, NATS)
        right.set_title(f"Attention span: bias of -{NATS:g} nats")
    style.legend(figure, axes, loc="lower center")
    return figure


def card_picture(model: Positions) -> bytes:
    """``card_figure`` as a PNG file; the same model gives the same bytes."""
    return style.render(card_figure(model), dpi=DPI)
