# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""What the layers of a decoder need for one forward pass: positions, mask and folded channels.

It is computed once per pass, and every layer uses it. What plain generation does not need is in ntk_modes.py.

Shapes below: B rows, H heads, Q new tokens (queries), K keys (cached and new), D head size.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from .ntk_alibi import CHANNELS, Alibi, key_channels, query_channels
from .ntk_cache import CacheState, cache_state
from .ntk_concave import check_float16, concave_key_channels, concave_query_channels
from .ntk_modes import Positions, check_paged, given_positions, packed_keywords, stated


class AttentionPlan(NamedTuple):
    """How one forward pass computes attention; made once and used by every layer."""

    implementation: str
    """The name of the attention function, as in ``attn_implementation``."""
    mask: Any
    """The mask that this function takes; None if its own causal mask is right."""
    keywords: Mapping[str, Any]
    """Other arguments of the attention function."""
    query_channels: tuple[torch.Tensor, ...]
    """The penalty, to append to queries: [B or 1, H, 1 or Q, C], one for all layers or one each."""
    query_factors: tuple[torch.Tensor, ...] | None
    """What to multiply queries by, float32 [B or 1, H, 1 or Q], as many; None without temperatures."""
    key_channels: torch.Tensor
    """The positions, to append to the new keys, or to all if ``fold_cached``: [B or 1, 1, Q or K, C or more].

    There are more if this pass leaves out the curve's, which cached keys have for later ones."""
    fold_cached: bool
    """Whether keys are folded after they leave the cache, because it would round the channels."""
    slots: torch.Tensor
    """int64 [Q]: the places of the new keys in the cache."""
    key_length: int
    """Number of keys that attention reads, from the start of the cache."""
    packed: bool
    """Whether rows hold several documents. There is no cache from which they could be continued."""
    processes: Any
    """The ``DeviceMesh`` of the processes that share the heads; None if all heads are here."""


def plan_attention(
    config: Any,
    alibi: Alibi,
    scaling: float,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any | None = None,
    output_attentions: bool = False,
    processes: Any | None = None,
    **keywords: Any,
) -> AttentionPlan:
    """Decides how this forward pass computes attention and prepares its tensors.

    Args:
        config: names the attention function in ``_attn_implementation``.
        scaling: the factor on q.k.
        hidden_states: [B, Q, hidden]; only its shape, dtype and device are used.
        attention_mask, position_ids, past_key_values, output_attentions: as in ``AlibiDecoder.forward``.
            (Continuous batching passes the mask of its attention function.)
        processes: see ``AttentionPlan``.
        keywords: other arguments of the attention function.

    Raises:
        ValueError: the mask has a wrong shape or does not cover all keys; the positions make no sense; the
            attention function or the scaling cannot work with this mask, cache or dtype.
    """
    name = "eager" if output_attentions else config._attn_implementation
    cache = cache_state(config, hidden_states, past_key_values)
    if keywords.get("cache") is not None:  # continuous batching has a cache and masks of its own
        check_paged(name, alibi, hidden_states, position_ids)
        positions, mask = Positions(position_ids, position_ids), attention_mask
    elif attention_mask is not None and attention_mask.dim() == 4:
        given, mask = stated(name, alibi, hidden_states, attention_mask, position_ids, cache)
        positions = Positions(given, given)
    else:
        real = None if attention_mask is None else real_tokens(attention_mask.to(hidden_states.device), cache)
        positions = count_positions(real, cache)
        if position_ids is not None:
            positions = given_positions(position_ids, positions, hidden_states, cache)
        keywords = packed_keywords(keywords, position_ids, positions, hidden_states.shape[:2])
        mask = causal_mask(name, hidden_states, positions, cache)

    if alibi.power is None:
        dtype = hidden_states.dtype
        of_queries = query_channels(alibi.at(positions.queries, positions.lengths), scaling)
        of_keys = key_channels(positions.keys, positions.real)
    else:
        dtype = attention_dtype(hidden_states)
        longest = cache.keys
        if positions.starts is not None:  # the keywords of FlashAttention have the longest document
            longest = keywords.get("max_length_k", cache.keys)
        if dtype == torch.float16:
            check_float16(alibi, longest, scaling)
        of_queries = concave_query_channels(alibi, positions.queries, scaling, dtype)
        of_keys = concave_key_channels(alibi, positions.keys, positions.real, dtype)
        if position_ids is None and leaves_out_curve(alibi, cache):
            of_queries = of_queries[..., :CHANNELS]
    factors = alibi.query_factors(positions.queries, positions.lengths)
    return AttentionPlan(
        implementation=name,
        mask=mask,
        keywords=keywords,
        query_channels=of_queries.to(dtype).unbind(),
        query_factors=None if factors is None else factors.unbind(),
        key_channels=of_keys.to(dtype),
        fold_cached=cache.quantised,
        slots=cache.slots,
        key_length=cache.keys,
        packed=positions.starts is not None and not torch.compiler.is_compiling(),
        processes=processes,
    )


def leaves_out_curve(alibi: Alibi, cache: CacheState) -> bool:
    """Whether attention leaves out the channels of a concave penalty's curve, for counted positions.

    The curve is 0 where no query sees more tokens than in training. With heads of the same size, kernels then
    give the same bits as without a scaling. A traced pass stands for longer texts, too.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return cache.keys <= alibi.train_length


def attention_dtype(hidden_states: torch.Tensor) -> torch.dtype:
    """The dtype of queries and keys: that of the hidden states, or of torch's automatic casts."""
    device = hidden_states.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden_states.dtype


def real_tokens(attention_mask: torch.Tensor, cache: CacheState) -> torch.Tensor:
    """The mask of all keys, bool [B, K]; padded over a static cache."""
    if attention_mask.dim() != 2:
        shape = list(attention_mask.shape)
        raise ValueError(f"attention_mask must be [rows, tokens], got {shape} (or 4-D, with position_ids)")
    covered = attention_mask.shape[1]
    if (covered < cache.keys and not cache.compiled) or covered > max(cache.keys, cache.capacity or 0):
        raise ValueError(
            f"attention_mask covers {covered} tokens, but there are {cache.keys}: {cache.seen} cached and "
            f"{cache.keys - cache.seen} new; it must cover the cached ones too, and no others"
        )
    return F.pad(attention_mask, (0, max(cache.keys - covered, 0)))[:, : cache.keys].bool()


def count_positions(real: torch.Tensor | None, cache: CacheState) -> Positions:
    """Positions counted from the real tokens [B, K], or from all: padding may be on either side."""
    slots = cache.slots
    every = torch.arange(1, cache.keys + 1, device=slots.device)[None]
    counts = every if real is None else real.cumsum(-1)
    new = counts.index_select(1, slots)
    queries, lengths = (new - 1).clamp(min=0), new[:, -1:]
    if cache.quantised:  # all keys are folded again
        return Positions(queries, (counts - 1).clamp(min=0), real, lengths)
    return Positions(queries, queries, None if real is None else real.index_select(1, slots), lengths)


def causal_mask(name: str, hidden_states: torch.Tensor, positions: Positions, cache: CacheState) -> Any:
    """Which keys each query sees: bool [B or 1, 1, Q, K]; None if the function's own causal mask is right.

    Padding is in the channels of the keys, so all rows have the same mask, unless they hold documents.

    Raises:
        ValueError: FlashAttention, whose mask is part of the kernel, over a static cache while compiling.
    """
    queries = hidden_states.shape[1]
    if "flash" in name:
        if cache.compiled:
            raise ValueError(f"{name} does not work with a static cache in a compiled model; use sdpa")
        return None
    plain = positions.starts is None and not cache.compiled and queries in (1, cache.keys)
    if plain and (queries == 1 or name not in ("eager", "flex_attention")):
        return None
    mask = (torch.arange(cache.keys, device=cache.slots.device) <= cache.slots[:, None])[None, None]
    if positions.starts is not None:
        documents = positions.starts.cumsum(-1)
        mask = mask & (documents[:, :, None] == documents[:, None, :])[:, None]
    if name == "flex_attention":  # which skips the blocks that nothing in a row sees
        rows, sees = len(mask), lambda row, _, query, key: mask[row % rows, 0, query, key]
        return create_block_mask(sees, rows if rows > 1 else None, None, *mask.shape[2:], device=mask.device)
    return mask
