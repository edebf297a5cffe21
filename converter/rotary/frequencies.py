"""Rotary frequencies and their scaling, in float64 and without an import that takes time.

A rotary model turns pair i of a head's channels by ``position * base ** (-2i / d)``, d the number of
channels that are turned (Su et al., RoFormer, arXiv 2104.09864). With a scale factor a, ``linear``
divides all positions by a (Chen et al., arXiv 2306.15595), and ``ntk`` raises the base to
``base * a ** (d / (d - 2))`` (u/bloc97, June 2023): the first pair's frequency, 1, stays, and the last
one's is divided by exactly a.

transformers' ``rope_type: dynamic`` raises the base, in a forward pass that reaches L tokens, to
``base * (f * L / M - (f - 1)) ** (d / (d - 2))`` with f the config's factor, M its
``max_position_embeddings`` and L at least M (``modeling_rope_utils.py``, the same in 4.57 and 5.23). With
f = 1 the parenthesis is L / M. So this project's a = max(1, rate * L / trained length) is f = 1 and
M = trained length / rate; no other f gives it for any rate but 1.
"""

from __future__ import annotations

Frequencies = tuple[float, ...]
"""One frequency a pair of channels, in radians per token, the highest first."""


def frequencies(base: float, dim: int) -> Frequencies:
    """The frequencies of ``dim`` rotary channels."""
    return tuple(base ** (-2 * pair / dim) for pair in range(dim // 2))


def ntk_base(base: float, dim: int, factor: float) -> float:
    """The base that leaves the highest frequency alone and divides the lowest by ``factor``.

    Raises:
        ValueError: a single pair of channels, which is its highest and its lowest.
    """
    if dim <= 2:
        raise ValueError(f"{dim} rotary channels have one frequency, which a change of base leaves alone")
    return float(base * factor ** (dim / (dim - 2)))


def scaled_frequencies(base: float, dim: int, method: str, factor: float) -> Frequencies:
    """The frequencies scaled by ``method`` with scale factor a = ``factor`` (at least 1, no unit).

    Raises:
        ValueError: a method without a rotary form.
    """
    if method == "ntk":
        return frequencies(ntk_base(base, dim, factor), dim)
    if method == "linear":
        return tuple(frequency / factor for frequency in frequencies(base, dim))
    if method == "none":
        return frequencies(base, dim)
    raise ValueError(f"the method {method!r} has no rotary form")
