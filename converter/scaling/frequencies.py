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
"""

from __future__ import annotations

Frequencies = tuple[float, ...]
"""One frequency per pair of channels, in radians per token, the highest first."""
METHODS = ("ntk", "linear", "none")
"""The methods that have a rotary form."""


def frequencies(base: float, dim: int) -> Frequencies:
    """The frequencies of ``dim`` rotary channels."""
    return tuple(base ** (-2 * pair / dim) for pair in range(dim // 2))


def ntk_base(base: float, dim: int, factor: float) -> float:
    """The base that keeps the highest frequency and divides the lowest by ``factor``.

    Raises:
        ValueError: there is only one pair of channels, whose frequency does not depend on the base.
    """
    if dim <= 2:
        raise ValueError(f"{dim} rotary channels have one frequency, which does not depend on the base")
    return float(base * factor ** (dim / (dim - 2)))


def scaled_frequencies(base: float, dim: int, method: str, factor: float) -> Frequencies:
    """The frequencies scaled by ``method`` with scale factor a = ``factor`` (at least 1, no unit).

    Raises:
        ValueError: the method has no rotary form.
    """
    if method == "ntk":
        return frequencies(ntk_base(base, dim, factor), dim)
    if method == "linear":
        return tuple(frequency / factor for frequency in frequencies(base, dim))
    if method == "none":
        return frequencies(base, dim)
    raise ValueError(f"the method {method!r} has no rotary form")
