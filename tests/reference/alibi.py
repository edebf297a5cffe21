"""ALiBi and its scaled forms: slopes, the factor of each query, attention with the bias.

Sources: Press, Smith, Lewis, "Train Short, Test Long" (ICLR 2022, arXiv 2108.12409) for ALiBi and
its slopes; MosaicML's llm-foundry for slopes from ``alibi_bias_max``; Al-Khateeb et al. 2023
(arXiv 2310.13017) for linear interpolation; the README of github.com/keezen/ntk_alibi for the NTK
scaling and the length-dynamic factor. The NTK form for any number of heads, scaling by parts and the
position-dynamic factor are this project's, and so is the concave penalty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def press_slopes(num_heads: int) -> Array:
    """The slopes of the ALiBi paper, [num_heads], as BLOOM and Falcon have them.

    For a power of two, 2^(-8h/H) for h = 1..H. For another H, the slopes of the power of two n
    below it, then every other slope (1st, 3rd, 5th, ...) of the set for 2n heads, until H are there.
    """
    below = 1
    while below * 2 <= num_heads:
        below *= 2
    slopes = [2.0 ** (-8.0 * h / below) for h in range(1, below + 1)]
    for h in range(1, 2 * (num_heads - below), 2):
        slopes.append(2.0 ** (-8.0 * h / (2 * below)))
    return np.array(slopes)


def mpt_slopes(num_heads: int, bias_max: float = 8.0) -> Array:
    """The slopes of llm-foundry, [num_heads], as MPT has them: the steepness is a setting.

    2^(-bias_max * k / P) for k = 1..P, with P the power of two at or above H. Where P is more than
    H, the even k come first, then the odd ones, and the list is cut after H.
    """
    above = 1
    while above < num_heads:
        above *= 2
    every = [2.0 ** (-bias_max * k / above) for k in range(1, above + 1)]
    if above == num_heads:
        return np.array(every)
    return np.array((every[1::2] + every[0::2])[:num_heads])


def scaled_slopes(
    slopes: Array, method: str, factor: float, ramp: Sequence[float] = (), fitted: Sequence[float] = ()
) -> Array:
    """``slopes`` [num_heads] for contexts ``factor`` = a times as long as the trained ones.

    none           m
    linear         m / a
    ntk            m * a^-t with t = (ln m_max - ln m) / (ln m_max - ln m_min), or 1 for a single slope
    ntk-published  m * a^(-(h-1)/(H-1)) for the first n heads, n the power of two at or below H;
                   m for the heads after them
    by-parts       m * a^-t with s = 5 / m tokens; t = 0 for s <= ramp[0], 1 for s >= ramp[1], and between
                   them ln(s / ramp[0]) / ln(ramp[1] / ramp[0])
    fitted         m * a^-t with the t of each head in ``fitted``
    """
    heads = len(slopes)
    if method == "none":
        return np.array(slopes)
    if method == "linear":
        return slopes / factor
    if method == "ntk":
        steepest, flattest = max(slopes), min(slopes)
        if steepest == flattest:
            return slopes / factor
        t: Array = np.log(steepest / slopes) / np.log(steepest / flattest)
        by_slope: Array = slopes / factor**t
        return by_slope
    if method == "ntk-published":
        if heads == 1:
            return slopes / factor
        by_index: Array = slopes.copy()
        for h in range(1, 2 ** int(math.log2(heads)) + 1):
            by_index[h - 1] = slopes[h - 1] / factor ** ((h - 1) / (heads - 1))
        return by_index
    if method == "by-parts":
        start, end = ramp
        by_span: Array = slopes.copy()
        for h, span in enumerate(5.0 / slopes):
            if span >= end:
                by_span[h] /= factor
            elif span > start:
                by_span[h] /= factor ** (math.log(span / start) / math.log(end / start))
        return by_span
    if method == "fitted":
        one_each: Array = slopes / factor ** np.asarray(fitted, dtype=np.float64)
        return one_each
    raise ValueError(f"no such scaling: {method!r}")


def positions_of(mask: NDArray[np.int64]) -> NDArray[np.int64]:
    """Position of every token of a row, [L]: real tokens (1 in ``mask`` [L]) count from 0."""
    positions: NDArray[np.int64] = np.cumsum(mask) - 1
    return positions


def query_factors(scaling: Mapping[str, Any], mask: NDArray[np.int64]) -> Array:
    """The factor a that each query of a row uses, [L].

    ``scaling`` is config.json's ``alibi_scaling``: ``factor`` for a fixed a; otherwise ``dynamic``,
    ``rate`` (a0) and ``train_seq_len`` (N, in tokens). By length, every query of the row has
    max(1, a0 * L / N) with L the number of real tokens; by position, the query at position p has
    max(1, a0 * (p + 1) / N). Entries of padded queries mean nothing.
    """
    if "factor" in scaling:
        return np.full(len(mask), float(scaling["factor"]))
    rate, trained = float(scaling["rate"]), float(scaling["train_seq_len"])
    if scaling["dynamic"] == "length":
        seen = np.full(len(mask), float(np.sum(mask)))
    elif scaling["dynamic"] == "position":
        seen = positions_of(mask) + 1.0
    else:
        raise ValueError(f"no such dynamic scaling: {scaling['dynamic']!r}")
    return np.maximum(rate * seen / trained, 1.0)


def query_slopes(
    config: Mapping[str, Any], stock: Array, mask: NDArray[np.int64], layer: int, bias_scale: float = 1.0
) -> Array:
    """The slope of every head of a layer, counted from 0, for every query of a row, [num_heads, L].

    ``stock`` [num_heads] are the slopes the checkpoint was trained with; without ``alibi_scaling``
    in ``config`` every query has these. ``bias_scale`` is that of ``penalties``.
    """
    scaling = config.get("alibi_scaling")
    if scaling is None:
        return np.repeat(stock[:, None], len(mask), axis=1)
    factors = query_factors(scaling, mask)
    ramp, rows = scaling.get("ramp", ()), scaling.get("exponents", [()])
    fitted = rows[layer] if len(rows) > 1 else rows[0]
    different, which = np.unique(factors, return_inverse=True)
    each = [
        scaled_slopes(stock * bias_scale, scaling["type"], a, ramp, fitted) / bias_scale for a in different
    ]
    return np.stack(each, axis=1)[:, which]


def concave_penalties(m: float, n: int, trained: int, power: int, distance: Array) -> Array:
    """The penalty of keys at these distances, for a query that sees n tokens and a head of slope m.

    n <= L: m d
    else:   A d + B (1 - (1 - d / n)^K), T = max(L, n / K), B = m (n - T) / (K - 1), A = max(0, m - K B / n)
    """
    if n <= trained:
        return m * distance
    end = max(trained, n / power)
    curve = m * (n - end) / (power - 1)
    line = max(0.0, m - power * curve / n)
    found: Array = line * distance + curve * (1 - (1 - distance / n) ** power)
    return found


def penalties(
    config: Mapping[str, Any],
    stock: Array,
    mask: NDArray[np.int64],
    layer: int,
    distance: Array,
    bias_scale: float = 1.0,
) -> Array:
    """What the heads of a layer take from each score of a row, in nats, [num_heads, L, L].

    Args:
        config, stock, mask, layer: as in ``query_slopes``.
        distance: of each query and key, [L, L]; at least 0.
        bias_scale: the factor on a slope times a distance.
    """
    scaling = config.get("alibi_scaling")
    if scaling is None or scaling["type"] != "concave":
        slopes = query_slopes(config, stock, mask, layer, bias_scale)
        return bias_scale * slopes[:, :, None] * distance
    found = np.zeros((len(stock), *distance.shape))
    for query, position in enumerate(positions_of(mask)):
        n = max(int(position) + 1, 1)
        within = np.minimum(distance[query], n)  # farther keys are not seen
        for head, m in enumerate(stock * bias_scale):
            found[head, query] = concave_penalties(
                float(m), n, scaling["train_seq_len"], scaling["power"], within
            )
    return found


def temperatures(scaling: Mapping[str, Any], heads: int, layer: int) -> Array:
    """The u of each head of a layer, counted from 0, [num_heads]; 0 without temperatures."""
    if "temperatures" not in scaling:
        return np.zeros(heads)
    rows = scaling["temperatures"]
    return np.array(rows[layer] if len(rows) > 1 else rows[0])


def tempered(config: Mapping[str, Any], q: Array, mask: NDArray[np.int64], layer: int) -> Array:
    """Queries ``q`` [num_heads, L, head_dim] times a^u, with the u of each head, see ``temperatures``.

    a is the factor of each query, see ``query_factors``.
    """
    scaling = config.get("alibi_scaling")
    if scaling is None or "temperatures" not in scaling:
        return q
    u = temperatures(scaling, len(q), layer)
    by_query: Array = query_factors(scaling, mask)[None, :, None] ** u[:, None, None]
    return q * by_query


def attention(
    q: Array,
    k: Array,
    v: Array,
    penalty: Callable[[Array], Array],
    mask: NDArray[np.int64],
    score_scale: float,
) -> tuple[Array, Array]:
    """Causal attention of one row with the ALiBi bias.

        score(i, j) = score_scale * q_i.k_j - penalty(p_i - p_j)    j <= i, j real

    Args:
        q, k, v: [num_heads, L, head_dim].
        penalty: see ``penalties``.
        mask: [L], 1 for a real token and 0 for padding on either side.

    Returns:
        The heads' outputs side by side, [L, num_heads * head_dim], and the probabilities
        [num_heads, query, key].
    """
    heads, length, head_dim = q.shape
    positions = positions_of(mask)
    distance = positions[:, None] - positions[None, :]
    seen = np.tril(np.ones((length, length), dtype=bool)) & (mask == 1)[None, :]
    seen |= np.eye(length, dtype=bool)  # a padded query may have nothing else to look at

    taken = penalty(np.maximum(distance, 0).astype(np.float64))
    output = np.zeros((length, heads * head_dim))
    probabilities = np.zeros((heads, length, length))
    for h in range(heads):
        scores = np.where(seen, score_scale * (q[h] @ k[h].T) - taken[h], -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities[h] = weights / weights.sum(axis=1, keepdims=True)
        output[:, h * head_dim : (h + 1) * head_dim] = probabilities[h] @ v[h]
    return output, probabilities


def symmetric_attention(
    q: Array,
    k: Array,
    v: Array,
    penalty: Callable[[Array], Array],
    mask: NDArray[np.int64],
    score_scale: float,
) -> tuple[Array, Array]:
    """Attention of one row that sees both sides, with the ALiBi bias of encoders.

        score(i, j) = score_scale * q_i.k_j - penalty(|i - j|)    j real

    The distance is between the slots i and j of the row, padding included. Arguments and results are
    those of ``attention``.
    """
    heads, length, head_dim = q.shape
    slots = np.arange(length)
    taken = penalty(np.abs(slots[:, None] - slots[None, :]).astype(np.float64))
    output = np.zeros((length, heads * head_dim))
    probabilities = np.zeros((heads, length, length))
    for h in range(heads):
        scores = score_scale * (q[h] @ k[h].T) - taken[h]
        scores = np.where((mask == 1)[None, :], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities[h] = weights / weights.sum(axis=1, keepdims=True)
        output[:, h * head_dim : (h + 1) * head_dim] = probabilities[h] @ v[h]
    return output, probabilities
