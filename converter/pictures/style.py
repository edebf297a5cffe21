"""The look of all pictures (colours, markers, axes, legends), and a figure's bytes."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from PIL import Image

DPI, PALETTE = 150, 256
MARGIN = 0.15
"""Inches around a picture."""
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
}
"""matplotlib's defaults and our changes, so that the user's matplotlibrc has no effect."""
styled = matplotlib.rc_context(SETTINGS)
"""Decorator for every function that makes or renders a figure."""

# Okabe and Ito's colours, which colour-blind people can distinguish, without yellow, which is faint on white.
# Markers and line styles distinguish series printed in grey. The lists' lengths differ, so that the
# combinations repeat late.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARK: dict[str, Any] = {"color": "0.45", "linewidth": 0.9}
"""Style of a line that marks a length."""
HEADING: dict[str, Any] = {"fontsize": 11, "x": 0.01, "horizontalalignment": "left"}
"""Style of a figure's title."""

WIDEST_LABEL = 70
"""Most characters of a text from a file."""
MOST_LINES = 8
"""More lines in one picture cannot be told apart."""
MOST_TICKS = 9
LARGEST = 2.0**64
"""Axes end at this value and its inverse: sensible scalings need no more, but configs may hold anything."""


def look(index: int) -> dict[str, Any]:
    """Colour, marker and line style of a series: 0 is the stock model's."""
    if index == 0:
        return {"color": "0.25", "marker": "o", "linestyle": "-"}
    return {
        "color": COLOURS[(index - 1) % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
    }


def intervals(axes: Axes, places: Any, values: Any, index: int, label: str | None = None) -> None:
    """Draws a series of values [points, 3] with the ends of their intervals."""
    middle = values[:, 0]
    axes.errorbar(
        places,
        middle,
        yerr=abs(values.T[1:] - middle),
        label=label,
        markersize=4,
        linewidth=1.2,
        elinewidth=0.8,
        capsize=2,
        **look(index),
    )


def plain(text: str) -> str:
    """A text from a file in a form that is safe in a picture.

    A dollar sign would start a formula in matplotlib, the font lacks many characters, and a legend omits
    labels that begin with an underscore.
    """
    clean = re.sub(r"[^\w./,:;()+% -]", "_", text, flags=re.ASCII).strip().lstrip("_") or "unnamed"
    return clean if len(clean) <= WIDEST_LABEL else f"{clean[: WIDEST_LABEL - 3]}..."


def log2_axis(
    axes: Axes, which: Literal["x", "y"], values: Sequence[float], text: Callable[[int], str]
) -> None:
    """Makes an axis logarithmic, with ticks at the powers of two around ``values`` (all above 0)."""
    shown = [min(max(value, 1 / LARGEST), LARGEST) for value in values]
    low, high = math.floor(math.log2(min(shown))), math.ceil(math.log2(max(shown)))
    powers = range(low, high + 1, max(1, math.ceil((high - low) / (MOST_TICKS - 1))))
    _log_axis(axes, which, {2.0**power: text(power) for power in powers}, (2.0**low, 2.0**high), 2**0.25)


def length_axis(axes: Axes, lengths: Sequence[int], text: Callable[[int], str]) -> None:
    """Makes the x axis logarithmic, with ticks at the lengths, which must be sorted."""
    shown = lengths[:: math.ceil(len(lengths) / MOST_TICKS)]
    _log_axis(axes, "x", {length: text(length) for length in shown}, (lengths[0], lengths[-1]), 2**0.4)


def _log_axis(
    axes: Axes, which: str, ticks: Mapping[float, str], ends: tuple[float, float], margin: float
) -> None:
    # The limits first: otherwise matplotlib computes its own, from values of any size.
    axes.set(**{f"{which}lim": (ends[0] / margin, ends[1] * margin)})
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=2)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(list(ticks), labels=list(ticks.values()))
    axis.set_minor_locator(NullLocator())


def power_text(power: int) -> str:
    """2 ** power as a number or a fraction, such as "8" or "1/8"; or as "2^-30" if that would be long."""
    if abs(power) > 20:
        return f"2^{power}"
    return str(2**power) if power >= 0 else f"1/{2**-power}"


def legend(figure: Figure, axes: Axes, note: str | None = None) -> None:
    """Draws one legend for the series in ``axes``, below the figure and below ``note``."""
    handles, labels = axes.get_legend_handles_labels()
    letters = max(map(len, labels)) + 7
    columns = max(1, min(len(labels), 4, int(figure.get_figwidth() * 14 / letters)))
    figure.legend(handles, labels, ncols=columns, title=note, loc="upper center", bbox_to_anchor=(0.5, 0))


@styled
def render(figure: Figure, dpi: int = DPI) -> bytes:
    """The figure as a PNG; it holds no time or version, so the same figure gives the same bytes.

    It is as large as its content, so nothing is cut off. Its background is white, with a margin, so that it
    can be read on dark pages. A palette, which has room for all colours of these pictures, makes it a quarter
    of the size.
    """
    stream = io.BytesIO()
    whole: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": MARGIN}
    figure.savefig(stream, format="png", dpi=dpi, pil_kwargs={"compress_level": 0}, **whole)
    small = io.BytesIO()
    Image.open(stream).convert("RGB").quantize(PALETTE).save(small, format="png", dpi=(dpi, dpi))
    return small.getvalue()
