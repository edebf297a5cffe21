# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Bidirectional ALiBi: every query sees every key, with a bias of -slope * |i - j|.

|i - j| cannot be folded into the dot product, as ntk_alibi.py does for causal ALiBi. ``fused_attention``
computes it in one of these ways:

* On a CPU, the bias is a view on a few numbers, not a tensor [L, L]: ``toeplitz_attention`` in ntk_tiles.py.
* In inference on a CPU, the same without the keys that are too far to matter: ``tiled_attention``. Padded
  rows are computed one by one, without their padded keys.
* Elsewhere, each block of queries gets its own bias, one block after another: ``blockwise_attention``. The
  view does not work if the kernel wants aligned rows (accelerators), copies views (torch.compile) or does not
  support dropout, or if every query has its own slopes. The backward pass computes these biases again instead
  of keeping them.

Where padded keys are not left out, a product of two extra channels masks them. ``eager_attention`` is the
plain formula, which returns attention weights.

Measured on one CPU thread, 12 heads x 64, 8192 tokens, float32: the view takes 0.1 GB (0.2 GB with padding)
and 1.4 times as long as attention without any bias; in tiles, with random queries and keys, 0.4 times as
long. The whole bias takes 3.9 GB and 3.3 times as long.

Shapes below: B rows, H heads, L tokens (queries and keys), D head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .ntk_alibi import PADDED_KEY, PADDED_QUERY, Alibi, fold, sdpa_kernels
from .ntk_config import FOLDED_CHANNELS
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


def plan_symmetric_attention(
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
    slopes = alibi.slopes_at(positions)
    factors = alibi.query_factors(positions)
    if factors is None:
        factors = [None] * len(slopes)
    return [SymmetricPlan(*of_layer, real, eager, spans) for of_layer in zip(slopes, factors, strict=True)]


def real_spans(real: torch.Tensor) -> list[slice] | None:
    """The slots of each row's real tokens [B, L]; None if some row has none, or padding among them."""
    counts = real.sum(-1)
    starts = real.int().argmax(-1)
    slots = torch.arange(real.shape[1])
    in_span = (slots >= starts[:, None]) & (slots < (starts + counts)[:, None])
    if not (in_span == real).all() or not counts.all():
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
            plan: from ``plan_symmetric_attention``.

        Returns:
            The heads' outputs [B, L, H * D], and the attention weights [B, H, L, L] if the plan is eager,
            else None.
        """
        scale = query.shape[-1] ** -0.5
        dropout = self.dropout if self.training else 0.0
        if plan.query_factors is not None:
            query = (query * plan.query_factors[..., None]).to(query.dtype)  # rounded once
        if plan.eager:
            output, weights = eager_attention(query, key, value, plan, scale, dropout)
        else:
            output, weights = fused_attention(query, key, value, plan, scale, dropout), None
        return output.transpose(1, 2).flatten(2), weights


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: SymmetricPlan,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    """The heads' outputs [B, H, L, D], in one of the ways at the head of this file."""
    size = query.shape[-1]
    one_slope_a_head = plan.slopes.shape[-1] == 1
    if plan.spans is not None and one_slope_a_head and dropout == 0.0:
        return row_by_row_attention(query, key, value, plan.slopes, scale, plan.spans)
    if plan.real is not None:
        query, key, value = mask_padding(query, key, value, plan.real, scale)
    # Compiled code would copy the view to a whole tensor; there, blocks save the memory.
    uncompiled_cpu = query.device.type == "cpu" and not torch.compiler.is_compiling()
    if not (uncompiled_cpu and one_slope_a_head and dropout == 0.0):
        block = CPU_BLOCK if uncompiled_cpu else BLOCK
        output = blockwise_attention(query, key, value, plan.slopes, scale, dropout, block)
    elif plan.real is None:
        output = tiled_attention(query, key, value, plan.slopes, scale, slice(0, query.shape[2]))
    else:
        output = toeplitz_attention(query, key, value, plan.slopes, scale)
    return output[..., :size]


def eager_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: SymmetricPlan,
    scale: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The heads' outputs [B, H, L, D] and the attention weights [B, H, L, L]."""
    bias = distance_bias(plan.slopes, torch.arange(query.shape[2], device=query.device), key)
    if plan.real is not None:
        bias = bias.masked_fill(~plan.real[:, None, None, :], torch.finfo(bias.dtype).min)
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale + bias
    weights = F.dropout(scores.softmax(dim=-1), p=dropout).to(value.dtype)
    return torch.matmul(weights, value), weights


def row_by_row_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    scale: float,
    spans: list[slice],
) -> torch.Tensor:
    """The heads' outputs [B, H, L, D], without the padded keys: no channels and no work for padding."""
    output = torch.empty_like(query)
    slopes = slopes.expand(len(query), -1, -1)
    for row, span in enumerate(spans):
        real_keys, real_values = key[row, None, :, span], value[row, None, :, span]
        of_row = tiled_attention(query[row, None], real_keys, real_values, slopes[row, None], scale, span)
        output[row] = of_row[0]
    return output


def mask_padding(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, real: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value [B, H, L, D + 8] that give padded keys scores below any real key's."""
    first = torch.arange(FOLDED_CHANNELS, device=query.device) == 0
    query_channels = (first * (PADDED_QUERY / scale))[None, None, None]
    key_channels = (~real)[:, None, :, None] * (first * PADDED_KEY)
    return fold(query, query_channels), fold(key, key_channels), F.pad(value, (0, FOLDED_CHANNELS))


def blockwise_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    scale: float,
    dropout: float,
    block: int,
) -> torch.Tensor:
    """The heads' outputs [B, H, L, D] for slopes [1 or B, H, 1 or L], ``block`` queries at a time."""

    def attend(
        queries: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slopes: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        bias = distance_bias(slopes, slots, key).to(queries.dtype)
        with sdpa_kernels(queries):
            return F.scaled_dot_product_attention(
                queries, key, value, attn_mask=bias, dropout_p=dropout, scale=scale
            )

    query_blocks = query.split(block, dim=2)
    slot_blocks = torch.arange(query.shape[2], device=query.device).split(block)
    if len(query_blocks) == 1:
        return attend(query, key, value, slopes, slot_blocks[0])
    slope_blocks = (slopes,) * len(query_blocks)
    if slopes.shape[-1] > 1:
        slope_blocks = slopes.split(block, dim=-1)
    needs_gradients = torch.is_grad_enabled() and query.requires_grad
    outputs = []
    for queries, block_slopes, slots in zip(query_blocks, slope_blocks, slot_blocks, strict=True):
        arguments = (queries, key, value, block_slopes, slots)
        if needs_gradients:
            outputs.append(checkpoint(attend, *arguments, use_reentrant=False))
        else:
            outputs.append(attend(*arguments))
    return torch.cat(outputs, dim=2)


def distance_bias(slopes: torch.Tensor, slots: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The bias of the queries at ``slots`` [Q] on the keys [B, H, L, D]: float32 [1 or B, H, Q, L]."""
    keys = torch.arange(key.shape[2], device=key.device)
    distances = (slots[:, None] - keys[None, :]).abs()
    return slopes[..., None] * -distances
