# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""The concave penalty: near keys cost nearly what they cost in training, and far ones less.

A query that sees n tokens, itself among them, pays for a key at distance d

    slope * d                                      if n <= L, as trained
    line * d + curve * (1 - (1 - d / n) ** K)      if n > L

    end = max(L, n / K)
    curve = slope * (n - end) / (K - 1)
    line = max(0, slope - K * curve / n)

where L is the trained length and K the power. The penalty starts with the slope as trained, and at d = n it
is slope * end. Up to n = K L that is slope * L, what a key at distance L costs in training. From there on the
line is 0, and the end grows with n.

For the key at position j, 1 - d / n is (j + 1) / n. Softmax ignores the curve's constant part. What is left
to add to the score is a number of the query times a number of the key, one more term of the dot product. It
is folded like the slope (see ntk_alibi.py):

    curve * ((j + 1) / n) ** K  =  c * u        c = curve * (L / n) ** K        u = ((j + 1) / L) ** K

Keys are divided by L, which never changes. Divided by n, cached keys would change with every token.

That near keys are kept and far ones compressed is the idea of Self-Extend (arXiv 2401.01325) and Leaky
ReRoPE, for rotary models. This curve is another one than theirs.

Shapes below: B rows, H heads, T tokens.
"""

import torch

from .ntk_alibi import Alibi, key_channels, query_channels
from .ntk_config import CURVE_CHANNELS

# No dtype holds c and u exactly, so both are split into parts: c u = (c0 + c1 + c2) (u0 + u1 + u2). A part
# has the 8 bits of bfloat16. Of the 9 products, the 6 largest are summed: a channel of the queries has the
# part of c in the first line, and that of the keys the part of u below it. The curve's last 2 channels are
# unused.
QUERY_PARTS = (0, 0, 0, 1, 1, 2)
KEY_PARTS = (0, 1, 2, 0, 1, 0)
# A part in float16 has 11 bits, so two will do. But its range is small, so near keys and far keys have
# channels of their own. A key is zero in the others' channels, and so is a query that sees no far key in
# theirs.
#
#           u                      keys hold      queries hold    channels
#   near    up to 2 ** 18          u / 2 ** 3     c * 2 ** 3      0 to 2
#   far     2 ** 18 to 2 ** 30     u / 2 ** 15    c * 2 ** 15     3 to 5
#
# With the power 8, far keys begin at 4.8 times the trained length, and end at 13.4 times.
NEAR_BITS, LARGEST_BITS = 18, 30
NEAR_SCALE, FAR_SCALE = 2.0**3, 2.0**15
HALF_QUERY_PARTS, HALF_KEY_PARTS = (0, 0, 1, 2, 2, 3), (0, 1, 0, 2, 3, 2)  # parts 0, 1 near; 2, 3 far
# The largest slope * L / scaling for which c stays within float16's range.
STEEPEST_HALF = 9.7e5
# GPUs without float64: Apple's, and some of Intel's. With float32, keys within 30 nats are off by up to 0.002
# nats at a trained length of 8192 and 16 times that length, and by 0.001 with float64.
NO_FLOAT64 = ("mps", "xpu")


def concave_query_channels(
    alibi: Alibi,
    positions: torch.Tensor,
    scaling: float,
    dtype: torch.dtype,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """The channels to append to the queries, for the slope and for the curve.

    Args:
        positions: int64 [B or 1, T], the queries' positions. Those of padded tokens may be -1.
        scaling: the factor on q.k.
        dtype: that of the queries in attention.
        values: from ``Alibi.on``, for models that keep them on their device.

    Returns:
        float32 [1, B or 1, H, T, FOLDED_CHANNELS + CURVE_CHANNELS], which ``dtype`` can hold.
    """
    if values is None:
        values = alibi.on(positions.device)
    slopes = values[0]
    tokens = (positions + 1).clamp(min=1).float()[:, None]
    lines, curves = coefficients(slopes, tokens, alibi.train_length, alibi.power)
    # Up to the trained length the curve is 0, and the power of a larger ratio would leave float32's range.
    ratio = (alibi.train_length / tokens).clamp(max=1)
    # An error here is the same for all keys of a query, so float32 will do.
    weight = curves * to_power(ratio, alibi.power) / scaling
    if dtype == torch.float16:
        sees_far_keys = tokens > near_length(alibi)
        near = split(weight * NEAR_SCALE, 2, dtype)
        far = split(torch.where(sees_far_keys, weight * FAR_SCALE, 0.0), 2, dtype)
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
        float32 [B or 1, 1, T, FOLDED_CHANNELS + CURVE_CHANNELS], which ``dtype`` can hold.
    """
    # An error here is another one for every key, and is multiplied by c.
    wide = torch.float32 if positions.device.type in NO_FLOAT64 else torch.float64
    values = to_power((positions.to(wide) + 1) / alibi.train_length, alibi.power)
    if real is not None:
        values = values * real
    if dtype == torch.float16:
        is_far = positions + 1 > near_length(alibi)
        near = split(torch.where(is_far, 0.0, values / NEAR_SCALE), 2, dtype)
        far = split(torch.where(is_far, values / FAR_SCALE, 0.0), 2, dtype)
        curve = in_channels([*near, *far], HALF_KEY_PARTS)
    else:
        curve = in_channels(split(values, 3, torch.bfloat16), KEY_PARTS)
    return torch.cat([key_channels(positions, real), curve[:, None]], dim=-1)


def coefficients(
    slopes: torch.Tensor, tokens: torch.Tensor, train_length: float, power: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``line`` and ``curve`` of each query, float32 [..., B or 1, H, T].

    Up to the trained length, they are exactly the slopes and 0.

    Args:
        slopes: float32 [..., H, 1].
        tokens: float32 [B or 1, 1, T], the n of each query, at least 1.
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
    return alibi.train_length * 2 ** (NEAR_BITS / alibi.power)


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


def check_float16(alibi: Alibi, tokens: int, scaling: float) -> None:
    """Raises ValueError for more tokens in a text, or in a cache, than float16 holds the penalty for."""
    if tokens <= alibi.train_length:
        return
    if max(alibi.slopes[0]) * alibi.train_length / scaling > STEEPEST_HALF:
        raise ValueError(
            f"float16 holds the concave penalty of this model for its trained length only, "
            f"{alibi.train_length:.0f} tokens, and not for {tokens}; load the model in bfloat16"
        )
    longest = int(alibi.train_length * 2 ** (LARGEST_BITS / alibi.power))
    if tokens > longest:
        raise ValueError(
            f"float16 holds the concave penalty of this model for {longest} tokens, and not for {tokens}; "
            "load the model in bfloat16"
        )
