# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Bidirectional ALiBi: every query sees every key, with a bias of -slope * |i - j|.

|i - j| cannot be folded into the dot product, as ntk_alibi.py does for causal ALiBi. ntk_tiles.py has a way
to compute it without a tensor [L, L] on the CPU, in training too. Padding is a product of two extra channels.

Measured on one CPU thread, 12 heads x 64, 8192 tokens, float32: that takes 0.1 GB (0.2 GB with padding) and
1.4 times as long as attention without any bias; in tiles, with random queries and keys, 0.4 times as long.
The whole bias takes 3.9 GB and 3.3 times as long.

It does not work if the kernel wants aligned rows (accelerators), copies views (torch.compile) or does not
support dropout, or if every query has its own slopes. Then each block of queries gets its own bias, one block
after another. The backward pass computes these biases again instead of keeping them.

Shapes below: B rows, H heads, L tokens (queries and keys), D head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .ntk_alibi import CHANNELS, PADDED_KEY, PADDED_QUERY, Alibi, fold, sdpa_kernels
from .ntk_tiles import infers_on_cpu, tiled_attention, toeplitz_attention

# Queries per block. Small blocks fit a CPU's caches; an accelerator needs large ones to be busy.
CPU_BLOCK, BLOCK = 128, 1024


class SymmetricPlan(NamedTuple):
    """How the layers of one forward pass apply ALiBi."""

    slopes: torch.Tensor
    """float32 [1 or B, H, 1 or L]; the last size is L if every query has its own slopes."""
    query_factors: torch.Tensor | None
    """What to multiply queries by, in the shape of the slopes; None without temperatures."""
    real: torch.Tensor | None
    """bool [B, L], False for padded tokens; None without padding."""
    eager: bool = False
    """Compute the attention weights, in float32, and return them."""
    spans: list[slice] | None = None
    """The slots of each row's real tokens, if they may be attended to row by row."""


def plan_attention(
    alibi: Alibi, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, eager: bool
) -> list[SymmetricPlan]:
    """Prepares this forward pass: one plan for all layers, or one per layer if their slopes differ.

    Distances are measured between places in the row, padded ones included. Only a dynamic scaling counts
    the real tokens.

    Args:
        hidden_states: [B, L, hidden]; only its shape and device are used.
        attention_mask: [B, L], 1 for real and 0 for padded tokens; None means no padding.
        eager: prepare the path that returns attention weights.

    Raises:
        ValueError: the mask has another shape.
    """
    rows, length = hidden_states.shape[:2]
    real = None
    positions = torch.arange(length, device=hidden_states.device)[None]
    if attention_mask is not None:
        if attention_mask.shape != (rows, length):
            shape = list(attention_mask.shape)
            raise ValueError(f"attention_mask must be [rows, tokens], here [{rows}, {length}], got {shape}")
        real = attention_mask.to(device=hidden_states.device, dtype=torch.bool)
        positions = (real.cumsum(-1) - 1).clamp(min=0)
    spans = None
    if real is not None and not eager and infers_on_cpu(hidden_states):
        spans = real_spans(real)
    slopes, factors = alibi.at(positions), alibi.query_factors(positions)
    each = [None] * len(slopes) if factors is None else factors
    return [SymmetricPlan(*pair, real, eager, spans) for pair in zip(slopes, each, strict=True)]


def real_spans(real: torch.Tensor) -> list[slice] | None:
    """The slots of each row's real tokens [B, L]; None if some row has none, or padding among them."""
    counts = real.sum(-1)
    starts = real.int().argmax(-1)
    slots = torch.arange(real.shape[1])
    together = (slots >= starts[:, None]) & (slots < (starts + counts)[:, None])
    if not (together == real).all() or not counts.all():
        return None
    pairs = zip(starts.tolist(), counts.tolist(), strict=True)
    return [slice(start, start + count) for start, count in pairs]


class SymmetricAttention(nn.Module):
    """Bidirectional attention with ALiBi; each family adds its projections.

    Args:
        num_heads: H.
        dropout: probability of dropping an attention weight while training.
    """

    def __init__(self, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout

    def split_heads(self, states: torch.Tensor) -> torch.Tensor:
        """[B, L, H * D] to [B, H, L, D]."""
        return states.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: SymmetricPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """ALiBi attention of all tokens over all real tokens.

        Args:
            query, key, value: [B, H, L, D].
            plan: from ``plan_attention``.

        Returns:
            The heads' outputs [B, L, H * D], and the attention weights [B, H, L, L] if the plan is eager,
            else None.
        """
        size, scale = query.shape[-1], query.shape[-1] ** -0.5
        if plan.query_factors is not None:
            query = (query * plan.query_factors[..., None]).to(query.dtype)  # rounded once
        dropout = self.dropout if self.training else 0.0
        weights = None
        if plan.eager:
            bias = distance_bias(plan.slopes, torch.arange(query.shape[2], device=query.device), key)
            if plan.real is not None:
                bias = bias.masked_fill(~plan.real[:, None, None, :], torch.finfo(bias.dtype).min)
            scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale + bias
            weights = F.dropout(scores.softmax(dim=-1), p=dropout).to(value.dtype)
            output = torch.matmul(weights, value)
        elif plan.spans is not None and dropout == 0.0 and plan.slopes.shape[-1] == 1:
            # Row by row without the padded keys: no channels for padding, and no work for it.
            output = torch.empty_like(query)
            slopes = plan.slopes.expand(len(query), -1, -1)
            for row, span in enumerate(plan.spans):
                q, k, v = query[row, None], key[row, None, :, span], value[row, None, :, span]
                output[row] = tiled_attention(q, k, v, slopes[row, None], scale, span)[0]
        else:
            if plan.real is not None:
                query, key, value = without_padding(query, key, value, plan.real, scale)
            # Compiled code would copy the view to a whole tensor; there, blocks save the memory.
            eager_cpu = query.device.type == "cpu" and not torch.compiler.is_compiling()
            views = eager_cpu and plan.slopes.shape[-1] == 1 and dropout == 0.0
            if views and plan.real is None:
                output = tiled_attention(query, key, value, plan.slopes, scale, slice(0, query.shape[2]))
            elif views:
                output = toeplitz_attention(query, key, value, plan.slopes, scale)
            else:
                rows = CPU_BLOCK if eager_cpu else BLOCK
                output = blockwise_attention(query, key, value, plan.slopes, scale, dropout, rows)
            output = output[..., :size]
        return output.transpose(1, 2).flatten(2), weights


def without_padding(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, real: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value [B, H, L, D + CHANNELS] that give padded keys scores below any real key's."""
    first = torch.arange(CHANNELS, device=query.device) == 0
    query_channels = (first * (PADDED_QUERY / scale))[None, None, None]
    key_channels = (~real)[:, None, :, None] * (first * PADDED_KEY)
    return fold(query, query_channels), fold(key, key_channels), F.pad(value, (0, CHANNELS))


def blockwise_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    scale: float,
    dropout: float,
    rows: int,
) -> torch.Tensor:
    """The heads' outputs [B, H, L, D] for slopes [1 or B, H, 1 or L], ``rows`` queries at a time."""

    def attend(
        block: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        block_slopes: torch.Tensor,
        block_slots: torch.Tensor,
    ) -> torch.Tensor:
        bias = distance_bias(block_slopes, block_slots, key).to(block.dtype)
        with sdpa_kernels(block):
            return F.scaled_dot_product_attention(
                block, key, value, attn_mask=bias, dropout_p=dropout, scale=scale
            )

    queries = query.split(rows, dim=2)
    slots = torch.arange(query.shape[2], device=query.device).split(rows)
    own = slopes.split(rows, dim=-1) if slopes.shape[-1] > 1 else (slopes,) * len(queries)
    if len(queries) == 1:
        return attend(query, key, value, slopes, slots[0])
    blocks = zip(queries, own, slots, strict=True)
    if torch.is_grad_enabled() and query.requires_grad:
        return torch.cat(
            [checkpoint(attend, q, key, value, m, at, use_reentrant=False) for q, m, at in blocks], dim=2
        )
    return torch.cat([attend(q, key, value, m, at) for q, m, at in blocks], dim=2)


def distance_bias(slopes: torch.Tensor, slots: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The bias of the queries at ``slots`` [Q] on the keys [B, H, L, D]: float32 [1 or B, H, Q, L]."""
    keys = torch.arange(key.shape[2], device=key.device)
    distances = (slots[:, None] - keys[None, :]).abs()
    return slopes[..., None] * -distances
