"""Draws the explanation's pictures into docs/images: `python docs/pictures.py`. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from converter.families import baichuan, bloom
from converter.pictures.per_head import draw_slopes, draw_span
from converter.pictures.positions import Positions
from converter.pictures.style import HEADING, MARK, look, render, styled
from converter.scaling.scaling import CONCAVE, POWER, UNSCALED, Scaling
from converter.scaling.slopes import NATS, stock_slopes

IMAGES = Path(__file__).parent / "images"

BLOOM_ID, BAICHUAN_ID = "bigscience/bloom-1b7", "baichuan-inc/Baichuan-13B-Base"
TRAINED = bloom.FAMILY.train_lengths[BLOOM_ID]
BLOOM = Positions(
    BLOOM_ID,
    stock_slopes(16),
    [Scaling("linear", 2.0), Scaling("ntk", 2.0)],
    train_length=TRAINED,
)
BAICHUAN = Positions(
    BAICHUAN_ID,
    stock_slopes(40),
    [Scaling("ntk", 4.0), Scaling("ntk-published", 4.0)],
    train_length=baichuan.FAMILY.train_lengths[BAICHUAN_ID],
)
STATIC = Scaling("ntk", 4.0)
LENGTH = Scaling("ntk", dynamic="length", train_length=TRAINED)
POSITION = Scaling("ntk", dynamic="position", train_length=TRAINED)
PANELS = (
    ("stock", UNSCALED, 8192),
    ("static, a = 4", STATIC, 8192),
    ("length-dynamic, 4096 tokens", LENGTH, 4096),
    ("length-dynamic, 8192 tokens", LENGTH, 8192),
    ("position-dynamic", POSITION, 8192),
)
"""Title, scaling, tokens of the row."""
FARTHEST = {11: 2048, 15: 8192}
"""Head -> the largest distance that is drawn."""
POINTS, DARKEST = 256, -8.0
TITLE = f"{BLOOM_ID}: bias of two heads, stock, and ntk in its three forms"


@styled
def draw_bias() -> Figure:
    """Draws the bias -slope * distance of two heads: queries down the panel, and keys across by distance.

    A white line marks how far the head sees.
    """
    figure = Figure((12.6, 5.0), layout="constrained")
    grid = figure.subplots(len(FARTHEST), len(PANELS), sharex="row", sharey=True)
    for line, (head, farthest) in zip(grid, FARTHEST.items(), strict=True):
        for axes, (_, scaling, tokens) in zip(line, PANELS, strict=True):
            queries = np.arange(POINTS)[:, None] * 8192 // POINTS
            distances = np.linspace(farthest, 0, POINTS).astype(int)[None]
            rows = queries[:, 0] + 1 if scaling is POSITION else [tokens] * POINTS
            slopes = np.array([[BLOOM.slopes_at(scaling, int(row))[head]] for row in rows])
            seen = (queries < tokens) & (distances <= queries)
            image = axes.imshow(
                np.where(seen, -slopes * distances, np.nan),
                cmap="cividis",
                vmin=DARKEST,
                vmax=0.0,
                extent=(-farthest, 0, 8192, 0),
                aspect="auto",
                interpolation="nearest",
            )
            inside = (queries < tokens) & (NATS / slopes <= queries)
            axes.plot(np.where(inside, -NATS / slopes, np.nan), queries, color="white", linewidth=1.0)
            axes.grid(False)
            axes.set(xlim=(-farthest, 0), ylim=(8192, 0), xticks=[-farthest, -farthest // 2, 0])
            axes.set_yticks([0, 4096, 8192])
        line[0].set_ylabel(f"head {head}\nposition of the query")
    for top, bottom, (title, _, _) in zip(*grid, PANELS, strict=True):
        top.set_title(title, fontsize=9)
        bottom.set_xlabel("key - query, tokens")
    figure.suptitle(TITLE, **HEADING)
    figure.colorbar(image, ax=grid, extend="min", aspect=14).set_label(f"bias, nats (line: -{NATS:g})")
    return figure


TOKENS = 8 * TRAINED
BY_PARTS = Scaling("by-parts", dynamic="position", train_length=TRAINED, ramp=(TRAINED / 8, TRAINED / 2))
COMPARED = {
    "stock": UNSCALED,
    "by-parts by position": BY_PARTS,
    "concave": Scaling(CONCAVE, dynamic="position", train_length=TRAINED, power=POWER),
}
"""Label -> scaling."""


@styled
def draw_penalty() -> Figure:
    """Draws what the flattest head takes from the score of a key, for the last query of 8 trained lengths.

    The right panel has the near keys.
    """
    figure = Figure((8.8, 3.5), layout="constrained")
    for axes, farthest in zip(figure.subplots(1, 2), (TOKENS, TRAINED), strict=True):
        distances = np.linspace(0, farthest - 1, POINTS)
        for number, (label, scaling) in enumerate(COMPARED.items()):
            penalty = scaling.penalties(BLOOM.stock, TOKENS)[-1]
            style = look(number) | {"marker": ""}
            axes.plot(distances, [penalty.at(each) for each in distances], label=label, **style)
        highest = BLOOM.stock[-1] * TRAINED
        axes.axhline(highest, **MARK, linestyle=":")
        axes.set(xlim=(0, farthest), ylim=(0, 1.3 * highest))
        axes.set_xticks([0, farthest // 4, farthest // 2, 3 * farthest // 4, farthest])
        axes.set_xlabel("distance of the key, tokens")
    whole, near = figure.axes
    whole.set_ylabel("penalty, nats")
    whole.set_title(f"all {TOKENS:,} tokens (dotted: the most in training)")
    near.set_title(f"the nearest {TRAINED:,}")
    figure.legend(*near.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"{BLOOM_ID}, head 15: penalty for the last query of {TOKENS:,} tokens", **HEADING)
    return figure


FIGURES = {
    "slopes-16-heads": draw_slopes(BLOOM),
    "span-16-heads": draw_span(BLOOM),
    "slopes-40-heads": draw_slopes(BAICHUAN),
    "span-40-heads": draw_span(BAICHUAN),
    "bias-static-length-position": draw_bias(),
    "concave": draw_penalty(),
}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, figure in FIGURES.items():
        (IMAGES / f"{name}.png").write_bytes(render(figure))


if __name__ == "__main__":
    main()
