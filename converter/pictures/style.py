"""How all pictures look: colours, markers, axes, legends; and a figure's bytes."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image

Format = Literal["png", "svg"]
FORMATS: tuple[Format, ...] = ("png", "svg")

DPI, PALETTE = 150, 256
SETTINGS: dict[Any, Any] = {
    **{key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")},
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.color": "0.9",
    "legend.frameon": False,
    "svg.hashsalt": "ntk-convert",
}
"""matplotlib's own settings and ours, whatever the user's file says."""
styled = matplotlib.rc_context(SETTINGS)
"""Decorator of whatever makes or renders a figure."""

# Okabe and Ito's colours, which colour-blind people tell apart, without the yellow that white paper swallows.
# Markers and line styles tell them apart in grey; the lengths of the lists have no common divisor.
STOCK_COLOUR = "0.25"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARK: dict[str, Any] = {"color": "0.45", "linewidth": 0.9}
"""Of a line at a length."""
HEADING: dict[str, Any] = {"fontsize": 11, "x": 0.01, "horizontalalignment": "left"}
"""Of a figure's title, which names what is shown."""

LONGEST = 70
"""Letters of a text from a file."""
MOST_TICKS = 9
LARGEST = 2.0**64
"""An axis ends there, and at one over it: no sensible scaling needs more, and a config may hold anything."""


def look(index: int) -> dict[str, Any]:
    """Colour, marker and line style of a series: 0 is the stock model's."""
    if index == 0:
        return {"color": STOCK_COLOUR, "marker": "o", "linestyle": "-"}
    return {
        "color": COLOURS[(index - 1) % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
    }


def plain(text: str) -> str:
    """A text from a file as it may stand in a picture.

    A dollar sign would start matplotlib's formulas, the font has no glyph for many letters, and a
    legend leaves out what begins with an underscore.
    """
    clean = re.sub(r"[^\w./,:;()+% -]", "_", text, flags=re.ASCII).strip().lstrip("_") or "unnamed"
    return clean if len(clean) <= LONGEST else f"{clean[: LONGEST - 3]}..."


def log2_axis(
    axes: Axes, which: Literal["x", "y"], values: Sequence[float], text: Callable[[int], str]
) -> None:
    """A logarithmic axis whose ticks are the powers of two around ``values`` (all above 0).

    Args:
        text: the exponent of a tick -> its label.
    """
    shown = [min(max(value, 1 / LARGEST), LARGEST) for value in values]
    low, high = math.floor(math.log2(min(shown))), math.ceil(math.log2(max(shown)))
    step = max(1, math.ceil((high - low) / (MOST_TICKS - 1)))
    margin = 2**0.25
    (axes.set_xlim if which == "x" else axes.set_ylim)(2.0**low / margin, 2.0**high * margin)
    _log_scale(axes, which)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator([2.0**power for power in range(low, high + 1, step)]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(round(math.log2(value)))))


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """A logarithmic x axis whose ticks are the lengths themselves, which are sorted."""
    axes.set_xlim(lengths[0] / 2**0.4, lengths[-1] * 2**0.4)
    _log_scale(axes, "x")
    every = math.ceil(len(lengths) / MOST_TICKS)
    axes.xaxis.set_major_locator(FixedLocator(list(lengths)[::every]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))


def _log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """To be called once the limits are set: matplotlib would look for its own, among values of any size."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=2)
    (axes.xaxis if which == "x" else axes.yaxis).set_minor_locator(NullLocator())


def power_text(power: int) -> str:
    """2 ** power, as people write it."""
    return str(2**power) if power >= 0 else f"1/{2**-power}"


def legend(figure: Figure, axes: Axes, **place: Any) -> None:
    """One legend for a figure, of the series in ``axes``; below it, unless ``place`` says otherwise."""
    handles, labels = axes.get_legend_handles_labels()
    columns = legend_columns(labels, figure.get_figwidth())
    figure.legend(handles, labels, ncols=columns, **{"loc": "outside lower center", **place})


def legend_columns(labels: Sequence[str], width: float) -> int:
    """The columns that a legend of ``width`` inches has room for."""
    letters = max(map(len, labels)) + 7
    return max(1, min(len(labels), 4, int(width * 14 / letters)))


def legend_height(labels: Sequence[str], width: float) -> float:
    """Inches that such a legend takes."""
    return 0.2 * math.ceil(len(labels) / legend_columns(labels, width))


@styled
def render(figure: Figure, form: Format = "png", dpi: int = DPI) -> bytes:
    """The figure's file: the same bytes for the same figure, without time or version in them.

    A PNG has a palette, which all colours of these pictures fit into, and is a fourth of the size for it.
    """
    stream = io.BytesIO()
    if form == "svg":
        figure.savefig(stream, format="svg", metadata={"Creator": None, "Date": None})
        return stream.getvalue()
    figure.savefig(stream, format="png", dpi=dpi, pil_kwargs={"compress_level": 0})
    small = io.BytesIO()
    Image.open(stream).convert("RGB").quantize(PALETTE).save(small, format="png", dpi=(dpi, dpi))
    return small.getvalue()
