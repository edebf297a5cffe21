"""ALiBi slopes and their scaling, in float64, with the standard library alone.

``templates/ntk_alibi.py`` repeats these formulas, because a converted repository must not depend on
this package. A test keeps the two equal, and verification measures the slopes of the converted model
against those computed here.

Sources: stock slopes, Press et al., "Train Short, Test Long" (ICLR 2022, arXiv 2108.12409) and
MosaicML's llm-foundry for ``alibi_bias_max``; linear interpolation, Al-Khateeb et al. 2023
(arXiv 2310.13017); NTK scaling, github.com/keezen/ntk_alibi, generalised here to any slopes. ``by-parts``
is this project's counterpart of "NTK by parts" for rotary frequencies (u/bloc97, July 2023).
"""

from __future__ import annotations

import math

Slopes = tuple[float, ...]
"""One slope per head, in the order of the heads."""
Ramp = tuple[float, float]
"""Two spans in tokens, the shorter first: ``by-parts`` keeps heads up to the first and scales those from the
second on."""
Exponents = tuple[tuple[float, ...], ...]
"""Of ``fitted``: one t per head, in one row for all layers or in one row per layer. Temperatures are too."""
NATS = 5.0
"""A head's span ends where its bias is -5 nats: a key there has e^-5 = 0.7 % of its weight without a bias."""

SEEN = 3e-4
"""Nats: of a bias that float32's attention weights show to 1e-3; they are rounded by about 1e-7."""
ROW = {"decoder": 1 << 15, "encoder": 768}
"""Most keys in the row that verification looks at, which bounds its memory: of a decoder's cache, in all
layers together, or of an encoder's attention weights, which grow with the square."""


def longest_row(kind: str, layers: int) -> int:
    """The most keys in a row in which verification measures the slopes of ``layers`` layers."""
    return ROW[kind] // layers if kind == "decoder" else math.isqrt(ROW[kind] ** 2 // layers)


def span_of(row: int) -> int:
    """The distance in keys over which slopes are measured in a row: almost half of it, as encoders have."""
    return row // 2 - 1


def stock_slopes(num_heads: int, bias_max: float = 8.0) -> Slopes:
    """The slopes that ALiBi gives ``num_heads`` heads.

    With n a power of two, head i (from 1) gets ``2 ** (-bias_max * i / n)``. Any other number of
    heads takes the slopes of n = the power of two below, then the odd members of the set for 2n.
    """
    if num_heads < 1:
        raise ValueError(f"the number of heads must be at least 1, got {num_heads}")
    whole = 2 ** math.floor(math.log2(num_heads))
    even = (2.0 ** (-bias_max * i / whole) for i in range(1, whole + 1))
    odd = (2.0 ** (-bias_max * i / (2 * whole)) for i in range(1, 2 * (num_heads - whole), 2))
    return (*even, *odd)


def exponents(method: str, slopes: Slopes, ramp: Ramp | None = None) -> tuple[float, ...]:
    """How strongly each head is scaled: the t, from 0 to 1, in ``m' = m * a ** -t``.

    ``linear`` scales every head alike (t = 1). ``ntk`` keeps the steepest slope (t = 0), divides the
    flattest by a (t = 1) and places the others between them by the logarithm of their slope; if all
    slopes are equal, t = 1. ``ntk-published`` is the form in the original code: t = (h - 1) / (H - 1)
    for the first 2 ** floor(log2 H) heads, h counted from 1, and t = 0 for the others. ``by-parts`` places
    a head by its span, ``NATS / slope`` tokens, on the ramp: t = 0 up to its start, 1 from its end on, and
    between them by the logarithm of the span.

    ``slopes`` are the stock ones; for ``by-parts``, the bias per token in nats.
    """
    heads = len(slopes)
    if method == "none":
        return (0.0,) * heads
    if method == "linear":
        return (1.0,) * heads
    if method == "ntk-published":
        if heads == 1:
            return (1.0,)
        whole = 2 ** math.floor(math.log2(heads))
        return tuple(head / (heads - 1) if head < whole else 0.0 for head in range(heads))
    if method == "ntk":
        steepest, flattest = math.log(max(slopes)), math.log(min(slopes))
        if steepest == flattest:
            return (1.0,) * heads
        return tuple((steepest - math.log(slope)) / (steepest - flattest) for slope in slopes)
    if method == "by-parts" and ramp is not None:
        start, end = map(math.log, ramp)
        places = ((math.log(NATS / slope) - start) / (end - start) for slope in slopes)
        return tuple(min(max(place, 0.0), 1.0) for place in places)
    raise ValueError(f"unknown scaling method {method!r}, or no ramp for it")


def with_exponents(slopes: Slopes, strengths: tuple[float, ...], factor: float) -> Slopes:
    """``m * a ** -t`` for each slope m and its t, with scale factor a = ``factor`` (at least 1, no unit)."""
    return tuple(slope * factor**-t for slope, t in zip(slopes, strengths, strict=True))
