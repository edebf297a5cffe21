"""Draws the explanation's pictures into docs/images: `python docs/pictures.py`. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from converter.families import baichuan, bloom
from converter.pictures.bias import Panel, draw_panels
from converter.pictures.per_head import draw_slopes, draw_span
from converter.pictures.positions import Positions
from converter.pictures.style import render
from converter.scaling.scaling import UNSCALED, Scaling
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
    Panel("stock", UNSCALED, 8192),
    Panel("static, a = 4", STATIC, 8192),
    Panel("length-dynamic, 4096 tokens", LENGTH, 4096),
    Panel("length-dynamic, 8192 tokens", LENGTH, 8192),
    Panel("position-dynamic", POSITION, 8192),
)
TITLE = f"{BLOOM_ID}: bias of two heads, stock, and ntk in its three forms"
FIGURES = {
    "slopes-16-heads": draw_slopes(BLOOM),
    "span-16-heads": draw_span(BLOOM),
    "slopes-40-heads": draw_slopes(BAICHUAN),
    "span-40-heads": draw_span(BAICHUAN),
    "bias-static-length-position": draw_panels(BLOOM, PANELS, [11, 15], NATS, TITLE),
}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, figure in FIGURES.items():
        (IMAGES / f"{name}.png").write_bytes(render(figure))


if __name__ == "__main__":
    main()
