"""Rotary frequencies and their scaling, in float64, with the standard library alone.

A rotary model rotates pair i of a head's channels by the angle ``position * base ** (-2i / d)``, where d is
the number of rotated channels (Su et al., RoFormer, arXiv 2104.09864). With a scale factor a, ``linear``
divides all positions by a (Chen et al., arXiv 2306.15595), and ``ntk`` raises the base to
``base * a ** (d / (d - 2))`` (u/bloc97, June 2023): the frequency of the first pair stays 1, and that of
the last pair is divided by exactly a.

transformers' ``rope_type: dynamic`` raises the base while the model runs. In a forward pass that reaches L
tokens, it is ``base * (f * L / M - (f - 1)) ** (d / (d - 2))``, where f is the config's factor, M its
``max_position_embeddings`` and L at least M (``modeling_rope_utils.py``, the same in 4.57 and 5.23). With
f = 1 the parenthesis becomes L / M. This project's a = max(1, rate * L / trained length) therefore needs
f = 1 and M = trained length / rate; no other f gives it.

``by-parts`` is YaRN (Peng et al., arXiv 2309.00071) as its authors' code and transformers' ``rope_type:
yarn`` compute it: frequencies with short wavelengths stay, those with long ones are divided by a, and those
between are mixed by the number of their pair. Queries and keys are multiplied by ``yarn_attention(a)`` each.
"""

from __future__ import annotations

import math

from converter.scaling.slopes import Ramp

Frequencies = tuple[float, ...]
"""One frequency per pair of channels, in radians per token, the highest first."""
ROTARY_METHODS = ("ntk", "by-parts", "linear", "none")
"""The methods that have a rotary form."""


def frequencies(base: float, dim: int) -> Frequencies:
    """The frequencies of ``dim`` rotary channels."""
    return tuple(base ** (-2 * pair / dim) for pair in range(dim // 2))


def ntk_base(base: float, dim: int, factor: float) -> float:
    """The base that keeps the highest frequency and divides the lowest by ``factor``; needs two pairs."""
    if dim <= 2:
        raise ValueError(f"{dim} rotary channels have one frequency, which does not depend on the base")
    return float(base * factor ** (dim / (dim - 2)))


def yarn_frequencies(base: float, dim: int, factor: float, ramp: Ramp) -> Frequencies:
    """The frequencies of YaRN for ``dim`` rotated channels and the base as trained.

    The ramp has the wavelengths, 2 pi / frequency, in tokens, at which scaling by ``factor`` starts and is
    complete. Its ends are rounded outwards to whole pairs.
    """

    def pair_of(wavelength: float) -> float:
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair_of(ramp[0])), 0)
    last = min(math.ceil(pair_of(ramp[1])), dim - 1)
    width = last - first or 0.001
    places = (min(max((pair - first) / width, 0.0), 1.0) for pair in range(dim // 2))
    stock = frequencies(base, dim)
    return tuple(value * (1 - t + t / factor) for value, t in zip(stock, places, strict=True))


def yarn_attention(factor: float) -> float:
    """What YaRN multiplies rotated queries and keys by, for a scale factor of at least 1."""
    return 0.1 * math.log(factor) + 1


def scaled_frequencies(
    base: float, dim: int, method: str, factor: float, ramp: Ramp | None = None
) -> Frequencies:
    """The frequencies scaled by ``method`` with scale factor a = ``factor`` (at least 1, no unit)."""
    if method == "by-parts" and ramp is not None:
        return yarn_frequencies(base, dim, factor, ramp)
    if method == "ntk":
        return frequencies(ntk_base(base, dim, factor), dim)
    if method == "linear":
        return tuple(frequency / factor for frequency in frequencies(base, dim))
    if method == "none":
        return frequencies(base, dim)
    raise ValueError(f"the method {method!r} has no rotary form")
