# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""What the layers of a decoder need for one forward pass: positions, mask and folded channels.

``plan_attention`` computes it once per pass, and every layer uses it. What plain generation does not need is
in ntk_modes.py.

Shapes below: B rows, H heads, Q new tokens (queries), K keys (cached and new), C folded channels.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from .ntk_alibi import Alibi, key_channels, query_channels
from .ntk_cache import CacheState, cache_state
from .ntk_concave import check_float16, concave_key_channels, concave_query_channels
from .ntk_config import FOLDED_CHANNELS
from .ntk_modes import Positions, given_positions, packed_keywords, with_4d_mask, with_paged_cache


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
    """The positions, to append to the new keys, or to all if ``fold_cached``: [B or 1, 1, Q or K, C].

    If this pass leaves out the curve of a concave penalty, only ``query_channels`` lack it: the keys go into
    the cache, and later passes need it."""
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
    cache_has_zeros: bool = False
    """Folded keys are wider than values, which need as many zeros. Whether the cache has them already."""


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
    is_paged = keywords.get("cache") is not None
    if not is_paged and not is_4d(attention_mask):
        real = None
        if attention_mask is not None:
            real = real_tokens(attention_mask.to(hidden_states.device), cache)
        positions = count_positions(real, cache)
        if position_ids is not None:
            positions = given_positions(position_ids, positions, hidden_states, cache)
        keywords = packed_keywords(keywords, position_ids, positions, hidden_states.shape[:2])
        mask = causal_mask(name, hidden_states, positions, cache)
    elif is_paged:
        positions, mask = with_paged_cache(name, alibi, hidden_states, attention_mask, position_ids)
    else:
        positions, mask = with_4d_mask(name, alibi, hidden_states, attention_mask, position_ids, cache)

    if alibi.power is None:
        dtype = hidden_states.dtype
        if alibi.dynamic is None:
            of_queries = alibi.static_query_channels(hidden_states.device, dtype, scaling)
        else:
            of_queries = query_channels(alibi.slopes_at(positions.queries, positions.lengths), scaling)
        of_keys = key_channels(positions.keys, positions.real)
    else:
        dtype = attention_dtype(hidden_states)
        if dtype == torch.float16:
            check_float16(alibi, longest_document(positions, keywords, cache), scaling)
        of_queries = concave_query_channels(alibi, positions.queries, scaling, dtype)
        of_keys = concave_key_channels(alibi, positions.keys, positions.real, dtype)
        # Given positions may be beyond the trained length; counted ones are known.
        if position_ids is None and leaves_out_curve(alibi, cache):
            of_queries = of_queries[..., :FOLDED_CHANNELS]
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
        # A graph is for any rows, so it cannot tell.
        packed=positions.starts is not None and not torch.compiler.is_compiling(),
        processes=processes,
    )


def is_4d(attention_mask: torch.Tensor | None) -> bool:
    """Whether this is no padding mask, but says what each token sees."""
    return attention_mask is not None and attention_mask.dim() == 4


def longest_document(positions: Positions, keywords: Mapping[str, Any], cache: CacheState) -> int:
    """The number of tokens in the longest document, which FlashAttention's keywords have for packed rows."""
    if positions.starts is None:
        return cache.keys
    return keywords.get("max_length_k", cache.keys)


def leaves_out_curve(alibi: Alibi, cache: CacheState) -> bool:
    """Whether attention leaves out the channels of a concave penalty's curve, if positions are counted.

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
    """The padding mask of all keys, bool [B, K].

    A mask may end before the keys of a static cache in a graph, which are all that it can hold, and after the
    keys of a static cache elsewhere, which are those so far.
    """
    if attention_mask.dim() != 2:
        shape = list(attention_mask.shape)
        raise ValueError(f"attention_mask must be [rows, tokens], got {shape} (or 4-D, with position_ids)")
    covered = attention_mask.shape[1]
    too_short = covered < cache.keys and not cache.static_in_graph
    if too_short or covered > max(cache.keys, cache.capacity or 0):
        raise ValueError(
            f"attention_mask covers {covered} tokens, but there are {cache.keys}: {cache.seen} cached and "
            f"{cache.keys - cache.seen} new; it must cover the cached ones too, and no others"
        )
    if covered < cache.keys:
        attention_mask = F.pad(attention_mask, (0, cache.keys - covered))
    return attention_mask[:, : cache.keys].bool()


def count_positions(real: torch.Tensor | None, cache: CacheState) -> Positions:
    """Positions counted from the real tokens [B, K], or from all: padding may be on either side."""
    if real is None:
        counts = torch.arange(1, cache.keys + 1, device=cache.slots.device)[None]
    else:
        counts = real.cumsum(-1)
    counts_of_new = counts.index_select(1, cache.slots)
    queries = (counts_of_new - 1).clamp(min=0)
    lengths = counts_of_new[:, -1:]
    if cache.quantised:  # all keys are folded again
        return Positions(queries, (counts - 1).clamp(min=0), real, lengths)
    if real is not None:
        real = real.index_select(1, cache.slots)
    return Positions(queries, queries, real, lengths)


def causal_mask(name: str, hidden_states: torch.Tensor, positions: Positions, cache: CacheState) -> Any:
    """Which keys each query sees: bool [B or 1, 1, Q, K]; None if the function's own causal mask is right.

    Padding is in the channels of the keys, so all rows have the same mask, unless they hold documents.

    Raises:
        ValueError: FlashAttention, whose mask is part of the kernel, over a static cache while compiling.
    """
    if "flash" in name:
        if cache.static_in_graph:
            raise ValueError(f"{name} does not work with a static cache in a compiled model; use sdpa")
        return None
    if positions.starts is None and not cache.static_in_graph:
        queries = hidden_states.shape[1]
        if queries == 1:  # which sees all keys
            return None
        if queries == cache.keys and name not in ("eager", "flex_attention"):
            return None
    mask = (torch.arange(cache.keys, device=cache.slots.device) <= cache.slots[:, None])[None, None]
    if positions.starts is not None:
        documents = positions.starts.cumsum(-1)
        mask = mask & (documents[:, :, None] == documents[:, None, :])[:, None]
    if name == "flex_attention":
        return block_mask(mask)
    return mask


def block_mask(mask: torch.Tensor) -> Any:
    """The mask [B or 1, 1, Q, K] for flex_attention, which skips the blocks that nothing in a row sees."""
    rows = len(mask)

    def sees(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return mask[row % rows, 0, query, key]  # one row stands for all

    return create_block_mask(sees, rows if rows > 1 else None, None, *mask.shape[2:], device=mask.device)
