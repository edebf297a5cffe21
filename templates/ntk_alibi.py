"""ALiBi with scaled slopes, computed as part of the attention's dot product.

Softmax ignores whatever is constant along a row, so causal ALiBi, ``s * q.k - m * (i - j)``, gives
the same probabilities as ``s * q.k + m * j``. The second form is itself a dot product: append m / s
to the query and the key's position j to the key, and any fused attention kernel computes ALiBi with
no bias tensor. Half precision cannot hold m or j, so both are split into parts that it holds exactly.

Stock slopes: Press et al., ICLR 2022 (arXiv 2108.12409) and MosaicML's llm-foundry (bias_max).
NTK scaling: github.com/keezen/ntk_alibi, generalised to slopes of any number and order.
Linear scaling: Al-Khateeb et al. 2023 (arXiv 2310.13017).

Shapes below: B rows, H heads, Q new tokens (queries), K keys (cached and new), D head size.
This file is part of a converted repository and needs nothing but torch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# Extra channels of a folded query or key: 2 parts of the slope x 3 digits of the position, 1 for the
# padding mask, 1 unused. A multiple of 8, as fused kernels want.
CHANNELS = 8
# A position is written in base 256: a digit is exact in bfloat16's 8 bits, three reach 2 ** 24. The sum
# is the kernel's float32, so that its rounding grows with slope * position, as it does in stock models.
BASE = 256
# Score of a padded key, below that of any real one. Built as a product of two factors that float16
# can hold for every softmax scale down to 1 / 256.
PADDED_QUERY, PADDED_KEY = 128.0, -256.0
# Up to so many new tokens over a longer cache, a bias costs less than copying the cache to fold it.
FEW_QUERIES = 16


def stock_slopes(num_heads: int, bias_max: float = 8.0) -> list[float]:
    """The slopes that ALiBi gives ``num_heads`` heads, in the order of the heads."""
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-bias_max * i / whole) for i in range(1, whole + 1)]
    odd = range(1, 2 * (num_heads - whole), 2)
    return slopes + [2.0 ** (-bias_max * i / (2 * whole)) for i in odd]


def exponents(method: str, slopes: Sequence[float]) -> list[float]:
    """The t of each head in ``m' = m * a ** -t``, with a the scale factor.

    linear: 1. ntk: 0 for the steepest head, 1 for the flattest, in between by the slope's logarithm
    (1 if all slopes are equal). ntk-published: the original code's (h - 1) / (H - 1), which leaves
    the heads beyond the largest power of two alone.
    """
    heads = len(slopes)
    if method == "linear":
        return [1.0] * heads
    if method == "ntk-published":
        whole = 2 ** math.floor(math.log2(heads))
        return [(h / (heads - 1) if heads > 1 else 1.0) if h < whole else 0.0 for h in range(heads)]
    if method == "ntk":
        top, bottom = math.log(max(slopes)), math.log(min(slopes))
        if top == bottom:
            return [1.0] * heads
        return [(top - math.log(m)) / (top - bottom) for m in slopes]
    raise ValueError(f"alibi_scaling: unknown type {method!r}")


class Alibi:
    """The slopes of one model, scaled as its config's ``alibi_scaling`` says.

    Args:
        slopes: the stock slopes, one a head.
        scaling: None (no scaling); ``{"type", "factor"}`` (static); or ``{"type", "train_seq_len"}``
            with optional ``"dynamic"`` ("length", the default, or "position") and ``"rate"`` (1.0).

    Raises:
        ValueError: for a scaling that cannot be honoured; an unscaled model must not pass for a
            scaled one.
    """

    def __init__(self, slopes: Sequence[float], scaling: Mapping[str, Any] | None = None):
        self.slopes = list(slopes)
        self.dynamic: str | None = None
        if scaling is None:
            return
        known = {"type", "factor", "train_seq_len", "dynamic", "rate"}
        if "type" not in scaling or set(scaling) - known:
            raise ValueError(
                f"alibi_scaling: expected 'type' and keys of {sorted(known)}, got {dict(scaling)}"
            )
        self.exponents = exponents(scaling["type"], self.slopes)
        if "factor" in scaling:
            factor = float(scaling["factor"])
            if "train_seq_len" in scaling or "dynamic" in scaling or not 1 <= factor < math.inf:
                raise ValueError(
                    f"alibi_scaling: a static scaling has a factor of at least 1, got {dict(scaling)}"
                )
            self.slopes = [m * factor**-t for m, t in zip(self.slopes, self.exponents, strict=True)]
            return
        self.dynamic = scaling.get("dynamic", "length")
        self.train_length = float(scaling.get("train_seq_len", 0))
        self.rate = float(scaling.get("rate", 1.0))
        positive = 0 < self.train_length < math.inf and 0 < self.rate < math.inf
        if self.dynamic not in ("length", "position") or not positive:
            raise ValueError(f"alibi_scaling: cannot honour {dict(scaling)}")

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The slopes that queries at the given positions use.

        Args:
            positions: int64 [B or 1, Q], the queries' positions; a row's last one is its length - 1.

        Returns:
            float32 [1, H, 1] (static), [B or 1, H, 1] (length) or [B or 1, H, Q] (position).
        """
        slopes = torch.tensor(self.slopes, device=positions.device, dtype=torch.float32)[None, :, None]
        if self.dynamic is None:
            return slopes
        tokens = positions + 1 if self.dynamic == "position" else positions[:, -1:] + 1
        factor = (self.rate * tokens.float() / self.train_length).clamp(min=1.0)
        power = torch.tensor(self.exponents, device=positions.device, dtype=torch.float32)[None, :, None]
        return slopes * factor[:, None, :] ** -power


class AttentionPlan(NamedTuple):
    """What one forward pass knows about positions; made once, used by every layer.

    Exactly one of the forms is set: channels (a fused causal kernel, or one with ``mask``), or bias.
    """

    slots: torch.Tensor
    """int64 [Q]: where in the cache the new keys go."""
    key_length: int
    """Keys that attention reads, from the cache's start."""
    query_channels: torch.Tensor | None = None
    """[B or 1, H, Q, CHANNELS]: the slopes, to append to the queries."""
    key_channels: torch.Tensor | None = None
    """[B or 1, 1, K, CHANNELS]: the positions, to append to the keys."""
    mask: torch.Tensor | None = None
    """bool [Q, K], True where a query may look; None when the kernel's own causal mask is right."""
    bias: torch.Tensor | None = None
    """[B or 1, H, Q, K]: slopes times negative distances, and the causal and padding masks."""
    eager: bool = False
    """Compute the attention weights, in float32, and return them."""


def plan_attention(
    alibi: Alibi,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Any | None,
    softmax_scale: float,
    eager: bool,
) -> AttentionPlan:
    """Decides how this forward pass applies ALiBi and prepares its tensors.

    Positions and lengths come from the attention mask, not from shapes: padding may be on either
    side, and a static cache is longer than its content.

    Args:
        hidden_states: [B, Q, hidden], for its sizes, dtype and device.
        attention_mask: [B, at least K], 1 for real and 0 for padded tokens, cached ones included;
            None means no padding.
        past_key_values: a transformers ``Cache`` or None.
        softmax_scale: the factor on q.k.
        eager: prepare a float32 bias, for the path that returns attention weights.

    Raises:
        ValueError: for a mask that is not 2-D or does not cover all keys.
    """
    queries, device, dtype = hidden_states.shape[1], hidden_states.device, hidden_states.dtype
    seen: Any = 0 if past_key_values is None else past_key_values.get_seq_length()
    if isinstance(seen, torch.Tensor) and not torch.compiler.is_compiling():
        seen = int(seen)
    slots = torch.arange(queries, device=device) + seen
    # Compiled over a static cache, the number of keys must not vary.
    static = isinstance(seen, torch.Tensor)
    keys = past_key_values.layers[0].max_cache_len if static else seen + queries
    key_slots = torch.arange(keys, device=device)

    if attention_mask is None:
        real, positions, query_positions = None, key_slots[None], slots[None]
    else:
        if attention_mask.dim() != 2:
            shape = list(attention_mask.shape)
            raise ValueError(
                f"attention_mask must be [rows, tokens], got {shape}; positions are read from it"
            )
        short = keys - attention_mask.shape[1]
        if short > 0 and static:
            attention_mask = F.pad(attention_mask, (0, short))
        elif short > 0:
            raise ValueError(
                f"attention_mask covers {attention_mask.shape[1]} tokens, but there are {keys}: "
                f"{seen} cached and {queries} new; it must cover the cached ones too"
            )
        real = attention_mask[:, :keys].to(device=device, dtype=torch.bool)
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        query_positions = positions.index_select(1, slots)

    slopes = alibi.at(query_positions)
    if eager or queries == 1 or (queries <= FEW_QUERIES and queries < keys):
        distance = query_positions[:, :, None] - positions[:, None, :]
        bias = slopes[..., None] * -distance[:, None].float()
        allowed = (key_slots[None, :] <= slots[:, None])[None, None]
        if real is not None:
            allowed = allowed & real[:, None, None, :]
        bias_dtype = torch.float32 if eager else dtype
        bias = bias.to(bias_dtype).masked_fill(~allowed, torch.finfo(bias_dtype).min)
        return AttentionPlan(slots, keys, bias=bias, eager=eager)

    # The product of the two sides' channels is slope * position; the slope stands there twice, as its
    # 8 leading bits and the rest, so that rounding to bfloat16 leaves 16 bits of it.
    weight = slopes * (BASE / softmax_scale)
    leading = weight.to(torch.bfloat16).float()
    rest = weight - leading
    padding = torch.full_like(weight, PADDED_QUERY / softmax_scale)
    sides = [leading, leading, leading, rest, rest, rest, padding, torch.zeros_like(weight)]
    query_channels = torch.stack(sides, dim=-1).expand(-1, -1, queries, -1)

    digits = [positions // BASE**2 * BASE, positions // BASE % BASE, positions % BASE / BASE]
    padded = torch.zeros_like(positions) if real is None else (~real) * PADDED_KEY
    sides = [digit.float() for digit in digits * 2] + [padded.float(), torch.zeros_like(padded).float()]
    key_channels = torch.stack(sides, dim=-1)[:, None]

    # A kernel's own causal mask aligns the first query with the first key: right without a past.
    square = not static and queries == keys
    mask = None if square else key_slots[None, :] <= slots[:, None]
    return AttentionPlan(slots, keys, query_channels.to(dtype), key_channels.to(dtype), mask)


class AlibiAttention(nn.Module):
    """The attention that every causal family shares; a family adds its projections.

    Args:
        num_heads: H, the query heads.
        softmax_scale: the factor on q.k.
        dropout: probability of dropping an attention weight while training.
        layer_idx: index of the layer, its place in the cache.
    """

    def __init__(self, num_heads: int, softmax_scale: float, dropout: float, layer_idx: int):
        super().__init__()
        self.num_heads = num_heads
        self.softmax_scale = softmax_scale
        self.dropout = dropout
        self.layer_idx = layer_idx

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: AttentionPlan,
        past_key_values: Any | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Causal ALiBi attention of the new tokens over all tokens.

        Args:
            query: [B, H, Q, D].
            key, value: [B, H or fewer (grouped), Q, D], of the new tokens.
            plan: from ``plan_attention``.
            past_key_values: cache to update and read, or None.

        Returns:
            The heads' outputs [B, Q, H * D], and the weights [B, H, Q, K] if the plan is eager, or None.
        """
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx, {"cache_position": plan.slots})
            key, value = key[:, :, : plan.key_length], value[:, :, : plan.key_length]
        dropout = self.dropout if self.training else 0.0
        size = query.shape[-1]
        weights = None

        if plan.eager:
            key, value = self.share_heads(key), self.share_heads(value)
            scores = torch.matmul(query, key.transpose(-1, -2)).float() * self.softmax_scale + plan.bias
            weights = F.dropout(scores.softmax(dim=-1), p=dropout).to(value.dtype)
            output = torch.matmul(weights, value)
        elif plan.bias is not None:
            output = F.scaled_dot_product_attention(
                query,
                self.share_heads(key),
                self.share_heads(value),
                attn_mask=plan.bias.to(query.dtype),
                dropout_p=dropout,
                scale=self.softmax_scale,
            )
        else:
            # A fused kernel needs one head size for all three, so the value is padded too.
            output = F.scaled_dot_product_attention(
                fold(query, plan.query_channels),
                self.share_heads(fold(key, plan.key_channels)),
                self.share_heads(F.pad(value, (0, CHANNELS))),
                attn_mask=plan.mask,
                is_causal=plan.mask is None,
                dropout_p=dropout,
                scale=self.softmax_scale,
            )[..., :size]
        return output.transpose(1, 2).flatten(2), weights

    def share_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Repeats key or value heads [B, G, K, D] so that every query head has its own."""
        groups = states.shape[1]
        if groups == self.num_heads:
            return states
        return states.repeat_interleave(self.num_heads // groups, dim=1)


def fold(states: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Appends channels [B or 1, heads or 1, T, CHANNELS] to states [B, heads, T, D]."""
    return torch.cat([states, channels.to(states.dtype).expand(*states.shape[:-1], CHANNELS)], dim=-1)
