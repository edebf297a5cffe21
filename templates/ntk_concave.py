# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""The concave penalty: near keys cost what they cost in training, and far ones less.

A query that sees n tokens, itself among them, pays for a key at distance d

    m d                                       if n <= L, as trained
    A d + B (1 - (1 - d / n) ** K)            if n > L

    T = max(L, n / K)      B = m (n - T) / (K - 1)      A = max(0, m - K B / n)

where m is the head's slope, L the trained length and K the power. The penalty starts with slope m, and the
farthest key costs m T: what the end of the trained length costs there, up to n = K L.

For the key at position j, 1 - d / n is (j + 1) / n. Softmax ignores what is constant along a row. So the
curve is one more term of the dot product, a number of the query times a number of the key, and is folded
like the slope (see ntk_alibi.py):

    B ((j + 1) / n) ** K  =  c u,      c = B (L / n) ** K,      u = ((j + 1) / L) ** K

L divides the keys, and not n, because keys stay in a cache while n grows.

Self-Extend (arXiv 2401.01325) and Leaky ReRoPE treat the far keys of rotary models in this way.

Shapes below: B rows, H heads, T tokens.
"""

import torch

from .ntk_alibi import Alibi, key_channels, query_channels

# Channels of the curve, after those of the slope: 6 products of parts of c and u, 2 unused.
CURVE_CHANNELS = 8
# No dtype holds c and u exactly, so both are split into parts, and the products of large parts are summed:
# each part of c in the first line, with the part of u below it. A part has bfloat16's 8 bits.
QUERY_PARTS = (0, 0, 0, 1, 1, 2)
KEY_PARTS = (0, 1, 2, 0, 1, 0)
# A part in float16 has 11 bits, so two will do, but its range is small. So near keys, with u up to
# 2 ** NEAR, and far keys have channels of their own, which are zero in the others. Each has its own scale:
# near u are multiplied by 2 ** -NEAR_SCALE, far ones by 2 ** -FAR_SCALE, and c by the inverse.
HALF_QUERY_PARTS, HALF_KEY_PARTS = (0, 0, 1, 2, 2, 3), (0, 1, 0, 2, 3, 2)
NEAR, NEAR_SCALE, FAR_SCALE = 18, 3, 15
# The logarithm to base 2 of the largest u, and so of 1 / c. Beyond, parts leave the range of their dtype.
LARGEST, LARGEST_HALF = 96, 30
# The largest slope * L / scaling for which c stays within float16's range, for every power.
STEEPEST_HALF = 9.5e5


def concave_query_channels(
    alibi: Alibi,
    positions: torch.Tensor,
    scaling: float,
    dtype: torch.dtype,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """The channels to append to the queries, for the slope and for the curve.

    Args:
        positions: int64 [B or 1, T], the queries' positions.
        scaling: the factor on q.k.
        dtype: that of the queries in attention.
        values: from ``Alibi.on``, for models that keep them on their device.

    Returns:
        float32 [1, B or 1, H, T, CHANNELS + CURVE_CHANNELS], which ``dtype`` can hold.
    """
    slopes = (alibi.on(positions.device) if values is None else values)[0]
    tokens = (positions + 1).float()[:, None]
    lines, curves = coefficients(slopes, tokens, alibi.train_length, alibi.power)
    # Up to the trained length the curve is 0, and the power of a larger ratio would leave float32's range.
    ratio = (alibi.train_length / tokens).clamp(max=1)
    weight = curves * to_power(ratio, alibi.power) / scaling
    if dtype == torch.float16:
        is_far = tokens > near_length(alibi)
        near = split(weight * 2.0**NEAR_SCALE, 2, dtype)
        far = split(torch.where(is_far, weight * 2.0**FAR_SCALE, 0.0), 2, dtype)
        curve = in_channels([*near, *far], HALF_QUERY_PARTS)
    else:
        curve = in_channels(split(weight, 3, torch.bfloat16), QUERY_PARTS)
    return torch.cat([query_channels(lines, scaling), curve], dim=-1)


def concave_key_channels(
    alibi: Alibi, positions: torch.Tensor, real: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The channels to append to the keys, for the slope and for the curve.

    Args:
        positions: int64 [B or 1, T].
        real: bool [B or 1, T], False for padded tokens; None without padding.
        dtype: that of the keys in attention.

    Returns:
        float32 [B or 1, 1, T, CHANNELS + CURVE_CHANNELS], which ``dtype`` can hold.
    """
    # Apple's GPUs have no float64. In float32, the penalty is off by up to 0.001 nats at L = 8192.
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    values = to_power((positions.to(wide) + 1) / alibi.train_length, alibi.power)
    if real is not None:
        values = values * real
    if dtype == torch.float16:
        is_far = positions + 1 > near_length(alibi)
        near = split(torch.where(is_far, 0.0, values * 2.0**-NEAR_SCALE), 2, dtype)
        far = split(torch.where(is_far, values * 2.0**-FAR_SCALE, 0.0), 2, dtype)
        curve = in_channels([*near, *far], HALF_KEY_PARTS)
    else:
        curve = in_channels(split(values, 3, torch.bfloat16), KEY_PARTS)
    return torch.cat([key_channels(positions, real), curve[:, None]], dim=-1)


def coefficients(
    slopes: torch.Tensor, tokens: torch.Tensor, train_length: float, power: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of the penalty, float32 [..., B or 1, H, T].

    Up to the trained length, they are exactly the slopes and 0.

    Args:
        slopes: float32 [..., H, 1].
        tokens: float32 [B or 1, 1, T], the n of each query.
    """
    end = torch.maximum(tokens.clamp(max=train_length), tokens / power)
    curves = slopes * ((tokens - end) / (power - 1))
    lines = (slopes - power * curves / tokens).clamp(min=0)
    return lines, curves


def to_power(ratio: torch.Tensor, power: int) -> torch.Tensor:
    """``ratio ** power`` for a power of two, by squaring: more exact than ``pow`` in float32."""
    for _ in range(power.bit_length() - 1):
        ratio = ratio * ratio
    return ratio


def near_length(alibi: Alibi) -> float:
    """The number of tokens up to which keys are near in float16."""
    return alibi.train_length * 2 ** (NEAR / alibi.power)


def split(values: torch.Tensor, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """As many float32 tensors that add up to the values; ``dtype`` holds all but the last one exactly."""
    found = []
    for _ in range(count - 1):
        found.append(values.to(dtype).to(values.dtype))
        values = values - found[-1]
    return [part.float() for part in (*found, values)]


def in_channels(found: list[torch.Tensor], order: tuple[int, ...]) -> torch.Tensor:
    """These parts in this order, and zeros: [..., CURVE_CHANNELS]."""
    unused = [torch.zeros_like(found[0])] * (CURVE_CHANNELS - len(order))
    return torch.stack([*(found[index] for index in order), *unused], dim=-1)


def check_concave(alibi: Alibi, keys: int, scaling: float, dtype: torch.dtype) -> None:
    """Raises ValueError for more keys, or steeper slopes, than the channels hold in this dtype."""
    half = dtype == torch.float16
    most = int(alibi.train_length * 2 ** ((LARGEST_HALF if half else LARGEST) / alibi.power))
    steep = half and max(alibi.slopes[0]) * alibi.train_length / scaling > STEEPEST_HALF
    if keys > most or steep:
        reach = "no text" if steep else f"texts of up to {most} tokens, not {keys}"
        remedy = "; load the model in bfloat16" if half else ""
        raise ValueError(f"{dtype} holds the concave penalty of this model for {reach}{remedy}")
