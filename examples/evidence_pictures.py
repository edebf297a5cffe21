"""The picture of the fitted slopes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import evidence_fits
from evidence_design import RAMP, Model
from evidence_fits import POSITION
from matplotlib.figure import Figure

from converter.pictures.style import look, styled
from converter.scaling.slopes import exponents


@styled
def draw_exponents(slopes: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> Figure:
    """Draws the fitted exponents of every layer and head by how far the head sees, beside two formulas.

    Args:
        slopes: see ``evidence_fits.kept``; models that were not fitted by position are left out.
    """
    models = [model for model in evidence_fits.FORMS if POSITION.name in slopes[model.name]]
    figure = Figure(figsize=(3.0 * len(models) + 0.4, 2.9), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for model, axes in zip(models, panels, strict=True):
        _panel(axes, model, slopes[model.name][POSITION.name])
        axes.set_title(model.name)
        axes.set_xlabel("log2(span / trained length)")
    panels[0].set_ylabel(f"exponent, {POSITION.name}")
    widest = max(panels, key=lambda axes: len(axes.get_lines()))
    figure.legend(*widest.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


def _panel(axes: Any, model: Model, layers: Sequence[Sequence[float]]) -> None:
    where = evidence_fits.places(model)
    order = sorted(range(len(where)), key=where.__getitem__)
    for index, (method, colour) in enumerate((("ntk", "0.7"), ("by-parts", "0.4"))):
        t = exponents(method, model.slopes, RAMP)
        style = {"color": colour, "linestyle": ("-", "--")[index], "linewidth": 1.2}
        axes.plot([where[head] for head in order], [t[head] for head in order], label=method, **style)
    for layer, row in enumerate(layers):
        style = {**look(layer + 1), "linestyle": "", "markersize": 4}
        axes.plot(where, row, label=f"fitted, layer {layer}", **style)
