# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Bidirectional ALiBi: every query sees every key of its text, with a bias of -slope * |i - j|.

|i - j| cannot be folded into the dot product, as ntk_alibi.py does for causal ALiBi. These functions of
``attn_implementation`` compute it:

* ``sdpa`` and ``eager``: rows of one text each, with padding. Outside training, ``sdpa`` leaves the padding
  out where it is at the ends of rows.
* ``flash_attention_2`` and ``flex_attention``: the texts one after another, without padding. So does ``sdpa``
  where a row holds several texts.

Where each of them is: ntk_symmetric_sdpa.py, ``eager_attention`` below, and ntk_texts.py.

Shapes below: B rows, H heads, L tokens (queries and keys), D head size. Without padding, B is 1 and L is the
number of tokens in all texts.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .ntk_alibi import Alibi, is_traced
from .ntk_symmetric_sdpa import distance_bias, sdpa_attention
from .ntk_texts import (
    LARGEST_SHARE,
    Texts,
    find_texts,
    flash_attention,
    flex_attention,
    in_padded_rows,
    text_by_text,
    text_mask,
)


class SymmetricPlan(NamedTuple):
    """How the layers of one forward pass apply ALiBi."""

    implementation: str
    """The name of the attention function, as in ``attn_implementation``."""
    slopes: torch.Tensor
    """float32 [1 or B, H, 1 or L]; the last size is L if every query has its own slopes. Without padding,
    [1 or texts, H, 1] or [1, H, L]."""
    query_factors: torch.Tensor | None
    """What to multiply queries by, float32 [1 or B, H, 1 or L]; None without temperatures."""
    real: torch.Tensor | None
    """bool [B, L], False for padded tokens; None if there are none, or they were left out."""
    texts: Texts | None
    """Where the texts are, if they are without padding; None for rows."""
    text_mask: Any
    """What ``flex_attention`` takes to keep the texts apart."""
    biases: dict[int, torch.Tensor] | None
    """Biases of blocks, which layers with the same slopes share; None if they do not."""


def plan_symmetric_attention(
    alibi: Alibi,
    implementation: str,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens: torch.Tensor | None = None,
    training: bool = False,
) -> list[SymmetricPlan]:
    """Prepares this forward pass: one plan for all layers, or one per layer if their slopes differ.

    Distances are measured between places in the row, padded ones included. Only a dynamic scaling counts
    the real tokens.

    Args:
        implementation: the name of the attention function.
        hidden_states: [B, L, hidden]; only its shape and device are used.
        attention_mask: [B, L], 1 for real and 0 for padded tokens; None means no padding.
        position_ids: int64 [B or 1, L]. Where they start again at 0, another text starts.
        cu_seq_lens: [texts + 1], where texts start and the last one ends, as the positions say, too.
        training: whether the model is in training mode.

    Raises:
        ValueError: the mask or the positions have another shape; the positions jump, disagree with
            ``cu_seq_lens``, or are given in a graph, which cannot look at them; the attention function does
            not work with these rows, this scaling or in a graph.
    """
    real = real_tokens(attention_mask, hidden_states)
    starts = None
    if position_ids is not None:
        starts = text_starts(checked_positions(position_ids, hidden_states), real)
    elif cu_seq_lens is not None:
        raise ValueError("cu_seq_lens_q needs position_ids, which start again at 0 with every text")
    is_packed = starts is not None or cu_seq_lens is not None
    texts = texts_without_padding(implementation, hidden_states, real, starts, is_packed, training)
    if cu_seq_lens is not None and texts.bounds.tolist() != cu_seq_lens.tolist():
        raise ValueError("cu_seq_lens_q and position_ids disagree about where texts start")

    mask = None
    if texts is None:
        positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        if real is not None:
            positions = (real.cumsum(-1) - 1).clamp(min=0)
        slopes, factors = alibi.slopes_at(positions), alibi.query_factors(positions)
    else:
        real = None  # no padded token is left
        slopes, factors = text_slopes(alibi, texts)
        if implementation == "flex_attention":
            mask = text_mask(texts)
    if "flash" in implementation and slopes.shape[-1] > 1:
        raise ValueError(
            f"{implementation} cannot give each query slopes of its own; use sdpa, or convert the model with "
            "--dynamic length"
        )
    if factors is None:
        factors = [None] * len(slopes)
    biases: dict[int, torch.Tensor] | None = None
    if len(slopes) == 1:
        biases = {}
    return [
        SymmetricPlan(implementation, *of_layer, real, texts, mask, biases)
        for of_layer in zip(slopes, factors, strict=True)
    ]


def real_tokens(attention_mask: torch.Tensor | None, hidden_states: torch.Tensor) -> torch.Tensor | None:
    """The padding mask as bool [B, L]; None without one."""
    if attention_mask is None:
        return None
    rows, length = hidden_states.shape[:2]
    if attention_mask.shape != (rows, length):
        shape = list(attention_mask.shape)
        raise ValueError(f"attention_mask must be [rows, tokens], here [{rows}, {length}], got {shape}")
    return attention_mask.to(device=hidden_states.device, dtype=torch.bool)


def checked_positions(position_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """The caller's positions, int64 [B, L]; a ValueError for another shape, or in a graph."""
    if is_traced():
        raise ValueError(
            "a compiled or traced encoder takes no position_ids, since it cannot look whether a row holds "
            "several texts; leave them out"
        )
    rows, length = hidden_states.shape[:2]
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, rows) or position_ids.shape[1] != length:
        raise ValueError(f"position_ids must be [{rows}, {length}], got {list(position_ids.shape)}")
    return position_ids.to(hidden_states.device).expand(rows, -1)


def text_starts(position_ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor | None:
    """bool [B, L]: where a second text of a row, or a later one, starts; None if each row is one text.

    Args:
        position_ids: int64 [B, L].
        real: bool [B, L], False for padded tokens; None without padding.

    Raises:
        ValueError: positions neither rise by one from token to token nor start again at 0. They may rise by
            more where padding is in between.
    """
    if real is None:
        real = torch.ones_like(position_ids, dtype=torch.bool)
    slots = torch.arange(real.shape[1], device=real.device)
    # The slot of the last real token before each token; -1 if there is none.
    before = torch.where(real, slots, -1).cummax(-1).values
    before = F.pad(before[:, :-1], (1, 0), value=-1)
    rise = position_ids - position_ids.gather(1, before.clamp(min=0))
    is_next = (rise == 1) | ((rise > 1) & (before < slots - 1))
    jumps = real & (before >= 0) & ~is_next
    if not jumps.any():
        return None
    if (jumps & (position_ids != 0)).any():
        raise ValueError(
            "position_ids must rise by one from token to token, or start again at 0 with another text"
        )
    return jumps


def texts_without_padding(
    implementation: str,
    hidden_states: torch.Tensor,
    real: torch.Tensor | None,
    starts: torch.Tensor | None,
    is_packed: bool,
    training: bool,
) -> Texts | None:
    """The texts, if this pass computes them without padding; None if it computes rows.

    ``sdpa`` leaves padding out where it can: not in training, where dropout would differ between a pass with
    gradients and one without; not in a graph, which is for any rows; and not for rows with padding before or
    between their tokens. Packed rows, and the other functions, have no other way.

    Args:
        real: bool [B, L], False for padded tokens; None without padding.
        starts: from ``text_starts``.
        is_packed: whether the caller says where texts start, which may be several in a row.
        training: whether the model is in training mode.

    Raises:
        ValueError: the attention function cannot compute these rows.
    """
    if implementation == "eager":
        if is_packed:
            raise ValueError(
                "attention weights and eager attention are for one text in a row; use sdpa for several"
            )
        return None
    if implementation == "sdpa" and not is_packed:
        if real is None or training or is_traced() or torch.is_grad_enabled():
            return None
        return find_texts(real, None)

    if is_traced():
        raise ValueError(f"{implementation} does not work in a compiled or traced model; use sdpa")
    if real is None:
        real = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
    texts = find_texts(real, starts)
    if texts is None:
        raise ValueError(
            f"{implementation} takes rows with padding at their ends only here; pad on the right, or use "
            "sdpa and one text in a row"
        )
    return texts


def text_slopes(alibi: Alibi, texts: Texts) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The slopes of texts without padding, and what to multiply queries by, in one row or one per layer.

    Returns:
        Slopes, float32 [rows, 1 or texts, H, 1], or [rows, 1, H, N] if every query has its own; and factors,
        float32 [rows, 1, H, 1 or N], or None without temperatures.
    """
    positions, lengths = texts.positions[None], texts.lengths[texts.numbers][None]
    if alibi.dynamic == "position":
        slopes = alibi.slopes_at(positions)
    else:
        slopes = alibi.slopes_at(texts.lengths[:, None] - 1)
    return slopes, alibi.query_factors(positions, lengths)


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
        """ALiBi attention of all tokens over all real tokens of their text.

        Args:
            query, key, value: [B, H, L, D].
            plan: from ``plan_symmetric_attention``.

        Returns:
            The heads' outputs [B, L, H * D], and the attention weights [B, H, L, L] if the attention function
            is ``eager``, else None.
        """
        scale = query.shape[-1] ** -0.5
        dropout = self.dropout if self.training else 0.0
        if plan.query_factors is not None:
            query = (query * plan.query_factors[..., None]).to(query.dtype)  # rounded once
        weights = None
        if plan.implementation == "eager":
            output, weights = eager_attention(query, key, value, plan, scale, dropout)
        elif plan.texts is not None:
            output = attend_without_padding(query, key, value, plan, scale, dropout)
        else:
            output = sdpa_attention(query, key, value, plan.slopes, scale, dropout, plan.real, plan.biases)
        return output.transpose(1, 2).flatten(2), weights


def attend_without_padding(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: SymmetricPlan,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    """The heads' outputs [1, H, L, D] of texts without padding.

    Raises:
        ValueError: dropout with ``flex_attention``, which has none.
    """
    states = (query, key, value, plan.slopes, scale)
    if plan.implementation == "flex_attention":
        if dropout > 0:
            raise ValueError("flex_attention has no dropout; use sdpa, or set the config's dropout to 0")
        return flex_attention(*states, plan.texts, plan.text_mask)
    if plan.implementation != "sdpa":
        return flash_attention(plan.implementation, *states, dropout, plan.texts)
    texts = plan.texts
    places = len(texts.spans) * texts.longest
    if query.device.type == "cpu" or places > LARGEST_SHARE * query.shape[2]:
        return text_by_text(*states, dropout, texts)
    return in_padded_rows(*states, dropout, texts, plan.biases)


def eager_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: SymmetricPlan,
    scale: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The heads' outputs [B, H, L, D] and the attention weights [B, H, L, L].

    Scores are summed in float32, as in fused kernels.
    """
    length = query.shape[2]
    bias = distance_bias(plan.slopes, torch.arange(length, device=query.device), length)
    if plan.real is not None:
        bias = bias.masked_fill(~plan.real[:, None, None, :], torch.finfo(bias.dtype).min)
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scale + bias
    weights = F.dropout(scores.softmax(dim=-1), p=dropout).to(value.dtype)
    return torch.matmul(weights, value), weights
