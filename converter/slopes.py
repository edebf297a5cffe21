"""ALiBi slopes and their scaling, in NumPy float64.

This is the converter's own statement of the formula. ``templates/ntk_alibi.py`` states it a
second time, in torch, because a converted repository must not depend on this package; the two
are pinned equal by a test, and verification measures the second against the first.

Sources: stock slopes, Press et al., "Train Short, Test Long" (ICLR 2022, arXiv 2108.12409) and
MosaicML's llm-foundry for ``alibi_bias_max``; linear interpolation, Al-Khateeb et al. 2023
(arXiv 2310.13017); NTK scaling, github.com/keezen/ntk_alibi, generalised here to any slopes.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Slopes = NDArray[np.float64]


def stock_slopes(num_heads: int, bias_max: float = 8.0) -> Slopes:
    """The slopes that ALiBi gives ``num_heads`` heads.

    With n a power of two, head i (from 1) gets ``2 ** (-bias_max * i / n)``. Any other number of
    heads takes the slopes of n = the power of two below, then the odd members of the set for 2n.
    llm-foundry (MPT) states it the other way round, for any ``bias_max``: the set for 2n, its
    even members first, then the odd ones, cut to ``num_heads``. That is the same vector.

    Returns:
        float64 array of shape [num_heads], in the order of the heads.

    Raises:
        ValueError: fewer than one head.
    """
    if num_heads < 1:
        raise ValueError(f"the number of heads must be at least 1, got {num_heads}")
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-bias_max * np.arange(1, whole + 1) / whole)
    odd = np.arange(1, 2 * (num_heads - whole), 2)
    return np.concatenate([slopes, 2.0 ** (-bias_max * odd / (2 * whole))])


def exponents(method: str, slopes: Slopes) -> Slopes:
    """How strongly each head is scaled: the t in ``m' = m * a ** -t``.

    ``linear`` scales every head alike (t = 1). ``ntk`` leaves the steepest head alone (t = 0),
    divides the flattest by a (t = 1) and places the others between them by the logarithm of
    their slope; with a single distinct slope t = 1. ``ntk-published`` is the original code's
    form: t = (h - 1) / (H - 1) for the first 2 ** floor(log2 H) heads and 0 for the others.

    Returns:
        float64 array of the slopes' shape, every entry in [0, 1].

    Raises:
        ValueError: an unknown method.
    """
    heads = len(slopes)
    if method == "none":
        return np.zeros(heads)
    if method == "linear":
        return np.ones(heads)
    if method == "ntk-published":
        whole = 2 ** math.floor(math.log2(heads))
        index = np.arange(heads, dtype=np.float64)
        published = index / (heads - 1) if heads > 1 else np.ones(1)
        return np.where(index < whole, published, 0.0)
    if method == "ntk":
        logs = np.log(slopes)
        span = logs.max() - logs.min()
        return (logs.max() - logs) / span if span > 0 else np.ones(heads)
    raise ValueError(f"unknown scaling method {method!r}")


def scaled_slopes(slopes: Slopes, method: str, factor: float) -> Slopes:
    """``slopes`` scaled by ``method`` with scale factor a = ``factor`` (at least 1, no unit)."""
    return slopes * factor ** -exponents(method, slopes)
