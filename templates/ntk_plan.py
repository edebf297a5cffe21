# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""What the layers of a decoder need for one forward pass: positions, masks and folded channels.

It is computed once per pass, from what the caller says about the tokens (``attention_mask``,
``position_ids``, the cache), and every layer uses it (see ntk_attention.py).

Shapes below: B rows, H heads, Q new tokens (queries), K keys (cached and new), D head size.
"""

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import cache_utils
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .ntk_alibi import Alibi, key_channels, query_channels
from .ntk_cache import CACHE, UPDATES_PAGED

# Arguments of attention functions that take rows of several documents.
PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
# All that mask functions read of a config, for a pass that returns attention weights. (torch.compile cannot
# make such an object in a graph.)
EAGER = SimpleNamespace(_attn_implementation="eager")
# transformers 4.57 has one argument more, and another name for the embeddings.
MASK_ARGUMENTS = frozenset(inspect.signature(create_causal_mask).parameters)
EMBEDDINGS = "inputs_embeds" if "inputs_embeds" in MASK_ARGUMENTS else "input_embeds"
# Attention functions that take a mask of any shape; in FlashAttention, masks are part of the kernel.
TAKES_MASK = ("sdpa", "eager", "flex_attention")
QUANTISED = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)


class AttentionPlan(NamedTuple):
    """How one forward pass computes attention; made once and used by every layer."""

    implementation: str
    """The name of the attention function, as in ``attn_implementation``."""
    mask: Any
    """What transformers' mask functions make for it; None if its own causal mask is right."""
    keywords: Mapping[str, Any]
    """Other arguments of the attention function."""
    query_channels: tuple[torch.Tensor, ...]
    """The slopes, to append to queries: [B or 1, H, 1 or Q, CHANNELS], one for all layers or one each."""
    query_factors: tuple[torch.Tensor, ...] | None
    """What to multiply queries by, float32 [B or 1, H, 1 or Q]: one for all layers or one each; None without
    temperatures."""
    key_channels: torch.Tensor
    """[B or 1, 1, Q or K, CHANNELS]: the positions, to append to the new keys, or all if ``fold_cached``."""
    fold_cached: bool
    """Whether keys are folded after they leave the cache, because it would round the channels."""
    slots: torch.Tensor
    """int64 [Q]: the places of the new keys in the cache."""
    key_length: int
    """Number of keys that attention reads, from the start of the cache."""
    packed: bool
    """Whether rows hold several documents. There is no cache from which they could be continued."""


class Positions(NamedTuple):
    """Where the tokens of a forward pass are in their documents."""

    queries: torch.Tensor
    """int64 [B or 1, Q]: positions of the new tokens."""
    keys: torch.Tensor
    """int64 [B or 1, Q or K]: positions of the keys to fold."""
    real: torch.Tensor | None
    """bool, like ``keys``: False for padded tokens; None without padding."""
    lengths: torch.Tensor | None = None
    """int64 [B or 1, 1 or Q]: number of tokens in the document of each query, as far as it is known."""
    starts: torch.Tensor | None = None
    """bool [B, Q]: where a second document of a row, or a later one, starts; None if there is only one."""


class CacheState(NamedTuple):
    """What a forward pass finds in its cache. transformers' mask functions call the methods."""

    used: bool
    seen: Any
    """Number of cached tokens: a tensor in compiled decoding over a static cache, else an int."""
    keys: int
    """Number of keys, cached and new. Compiled decoding needs a constant: all that the cache can hold."""
    read: int
    """Number of keys that attention reads. The weights that eager attention returns are as long as a static
    cache, as in transformers' own models."""
    slots: torch.Tensor
    """int64 [Q]: the places of the new keys in the cache."""
    quantised: bool
    """Whether the cache rounds keys, so that they are folded after they leave it."""

    @property
    def compiled(self) -> bool:
        return isinstance(self.seen, torch.Tensor)

    def get_query_offset(self, *_: Any) -> Any:
        return self.seen

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        return self.read, 0


def plan_attention(
    config: Any,
    alibi: Alibi,
    scaling: float,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any | None = None,
    output_attentions: bool = False,
    **keywords: Any,
) -> AttentionPlan:
    """Decides how this forward pass computes attention and prepares its tensors.

    Positions come from continuous batching, from the caller beside a mask of four dimensions, or from the
    real tokens and the starts of documents.

    Args:
        config: names the attention function in ``_attn_implementation``.
        scaling: the factor on q.k.
        hidden_states: [B, Q, hidden]; only its shape, dtype and device are used.
        attention_mask: [B, at least K], 1 for real and 0 for padded tokens, including cached tokens; None
            means no padding. Or the caller's own mask, see ``own_mask``. (Continuous batching passes the
            mask of its attention function.)
        position_ids: int64 [B or 1, Q], positions of the new tokens; None to count the real tokens. Where
            they start again at 0, another document starts.
        past_key_values: a transformers ``Cache`` or None.
        output_attentions: compute attention weights, whatever the config names.
        keywords: other arguments of the attention function.

    Raises:
        ValueError: the mask has a wrong shape or does not cover all keys; the positions make no sense; the
            attention function or the scaling cannot work with this mask, cache or dtype.
    """
    name = "eager" if output_attentions else config._attn_implementation
    cache = cache_state(name, config, hidden_states, past_key_values)
    if keywords.get("cache") is not None:  # continuous batching has a cache and masks of its own
        positions, mask = paged_positions(name, alibi, hidden_states, position_ids), attention_mask
    elif attention_mask is not None and attention_mask.dim() == 4:
        positions = stated_positions(name, alibi, hidden_states, position_ids, cache)
        mask = own_mask(attention_mask, hidden_states, cache.read)
    else:
        positions = token_positions(attention_mask, position_ids, hidden_states, cache, keywords)
        keywords = packed_keywords(keywords, positions, hidden_states.shape[:2])
        mask = causal_mask(name, config, hidden_states, positions, cache)

    slopes = alibi.at(positions.queries, positions.lengths)
    factors = alibi.query_factors(positions.queries, positions.lengths)
    return AttentionPlan(
        implementation=name,
        mask=mask,
        keywords=keywords,
        query_channels=query_channels(slopes, scaling).to(hidden_states.dtype).unbind(),
        query_factors=None if factors is None else factors.unbind(),
        key_channels=key_channels(positions.keys, positions.real).to(hidden_states.dtype),
        fold_cached=cache.quantised,
        slots=cache.slots,
        key_length=cache.read,
        packed=positions.starts is not None and not torch.compiler.is_compiling(),
    )


def cache_state(name: str, config: Any, hidden_states: torch.Tensor, past_key_values: Any) -> CacheState:
    """What the cache holds, and what attention will read of it."""
    queries = hidden_states.shape[1]
    layers = getattr(past_key_values, "layers", [])
    seen: Any = 0 if past_key_values is None else past_key_values.get_seq_length()
    if isinstance(seen, torch.Tensor) and not torch.compiler.is_compiling():
        seen = int(seen)
    compiled = isinstance(seen, torch.Tensor)
    capacity = getattr(layers[0], "max_cache_len", None) if layers else None
    keys = capacity if compiled else seen + queries
    quantised = any(isinstance(layer, QUANTISED) for layer in layers)
    stored = getattr(layers[0], "keys", None) if layers and not quantised else None
    if isinstance(stored, torch.Tensor) and stored.dim() == 4 and stored.shape[-1] != config.head_dim:
        raise ValueError(
            f"the cache holds heads of size {stored.shape[-1]}, but this model's have {config.head_dim}, "
            "with channels for positions. Prefix tuning is not supported; use LoRA or prompt tuning"
        )
    slots = torch.arange(queries, device=hidden_states.device) + seen
    read = capacity if capacity is not None and (compiled or name == "eager") else keys
    return CacheState(past_key_values is not None, seen, keys, read, slots, quantised)


def paged_positions(
    name: str, alibi: Alibi, hidden_states: torch.Tensor, position_ids: torch.Tensor | None
) -> Positions:
    """The positions that continuous batching gives, if it works with folded keys here."""
    check_paged_scaling(alibi)
    # Other functions would attend to the new tokens only; so would sdpa in transformers 4.57.
    function = ALL_ATTENTION_FUNCTIONS.get(name)  # None for eager
    takes_cache = function is not None and "cache" in inspect.signature(function).parameters
    if not (UPDATES_PAGED or takes_cache or "paged" in name):
        paged = ", ".join(key for key in ALL_ATTENTION_FUNCTIONS if "paged" in key)
        raise ValueError(f"{name} does not work with continuous batching here; use one of: {paged}")
    if "eager" in name and hidden_states.dtype != torch.float32:
        raise ValueError(f"{name} rounds the scores to {hidden_states.dtype}; use sdpa or float32")
    if position_ids is None:
        raise ValueError("continuous batching needs position_ids")
    return Positions(position_ids, position_ids, None)


def check_paged_scaling(alibi: Alibi) -> None:
    """Raises ValueError for a scaling that continuous batching cannot have."""
    if alibi.dynamic == "length":
        raise ValueError(
            "continuous batching does not work with length-dynamic scaling, where a token's hidden state "
            "depends on the tokens after it; convert the model with --dynamic position"
        )


def stated_positions(
    name: str,
    alibi: Alibi,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor | None,
    cache: CacheState,
) -> Positions:
    """The caller's positions beside a mask of four dimensions, which does not say them."""
    if name not in TAKES_MASK:
        raise ValueError(f"{name} takes no 4-D attention_mask; use one of: {', '.join(TAKES_MASK)}")
    if alibi.dynamic == "length":
        raise ValueError(
            "a 4-D attention_mask does not say the lengths that length-dynamic scaling needs; convert the "
            "model with --dynamic position"
        )
    if position_ids is None:
        raise ValueError("a 4-D attention_mask needs position_ids, because it does not say positions")
    if cache.quantised:
        raise ValueError("a 4-D attention_mask does not work with a quantised cache; use another cache")
    position_ids = checked_shape(position_ids, hidden_states)
    return Positions(position_ids, position_ids, None)


def own_mask(attention_mask: torch.Tensor, hidden_states: torch.Tensor, keys: int) -> torch.Tensor:
    """The caller's mask as numbers to add to the scores, [B, 1, Q, keys] in the states' dtype.

    Args:
        attention_mask: [B or 1, 1, Q, at least keys]. It alone says what each query sees, future and padded
            keys included: True, or 0 in a mask of floats, which are added to the scores.
        hidden_states: [B, Q, hidden]; only its shape, dtype and device are used.
        keys: number of keys that attention reads.

    Raises:
        ValueError: the mask has another shape or holds integers.
    """
    (rows, queries, _), dtype = hidden_states.shape, hidden_states.dtype
    shape = list(attention_mask.shape)
    if shape[0] not in (1, rows) or shape[1:3] != [1, queries] or shape[3] < keys:
        raise ValueError(f"a 4-D attention_mask must be [{rows}, 1, {queries}, {keys}] here, got {shape}")
    mask, lowest = attention_mask[..., :keys].to(hidden_states.device), torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)
    elif not mask.is_floating_point():
        raise ValueError(f"a 4-D attention_mask must hold booleans or floats, got {mask.dtype}")
    return mask.clamp(min=lowest).to(dtype).expand(rows, -1, -1, -1)


def token_positions(
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    hidden_states: torch.Tensor,
    cache: CacheState,
    keywords: Mapping[str, Any],
) -> Positions:
    """The positions of the real tokens in their documents; the caller's, if there are any."""
    real = None if attention_mask is None else real_tokens(attention_mask.to(hidden_states.device), cache)
    counted = count_positions(real, cache)
    if position_ids is None:
        if named := [keyword for keyword in keywords if keyword in PACKED]:
            raise ValueError(f"{named[0]} needs position_ids, which start again at 0 with every document")
        return counted
    given = given_positions(position_ids, counted, hidden_states, cache)
    if not cache.quantised:
        return given
    # A quantised cache holds keys without positions, so all of them are counted again for every pass.
    different = given.queries != counted.queries
    if real is not None:
        different = different & real[:, -given.queries.shape[1] :]
    if not torch.compiler.is_compiling() and different.any():
        raise ValueError(
            "a quantised cache counts positions by itself; drop position_ids, or use another cache"
        )
    return counted


def real_tokens(attention_mask: torch.Tensor, cache: CacheState) -> torch.Tensor:
    """The mask of all keys, bool [B, K]; padded over a static cache."""
    if attention_mask.dim() != 2:
        shape = list(attention_mask.shape)
        raise ValueError(f"attention_mask must be [rows, tokens], got {shape} (or 4-D, with position_ids)")
    short = cache.keys - attention_mask.shape[1]
    if short > 0 and not cache.compiled:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[1]} tokens, but there are {cache.keys}: "
            f"{cache.seen} cached and {cache.keys - cache.seen} new; it must cover the cached ones too"
        )
    return F.pad(attention_mask, (0, max(short, 0)))[:, : cache.keys].bool()


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


def checked_shape(position_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """The caller's positions, int64 [B or 1, Q], on the device of the hidden states [B, Q, hidden]."""
    rows, queries = hidden_states.shape[:2]
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, rows) or position_ids.shape[1] != queries:
        raise ValueError(f"position_ids must be [{rows}, {queries}], got {list(position_ids.shape)}")
    return position_ids.to(hidden_states.device)


def given_positions(
    position_ids: torch.Tensor, counted: Positions, hidden_states: torch.Tensor, cache: CacheState
) -> Positions:
    """The caller's positions [B or 1, Q], and where documents start.

    Raises:
        ValueError: the positions have another shape, do not rise by one, are negative, or start again over a
            cache, where nothing tells the documents apart.
    """
    rows, queries = hidden_states.shape[:2]
    position_ids = checked_shape(position_ids, hidden_states)
    if counted.real is not None:
        # Places in the cache count padded tokens too. Chunked prefill of transformers 4.57 passes them.
        places = (position_ids == cache.slots).all(dim=-1, keepdim=True)
        position_ids = torch.where(places, counted.queries, position_ids)
    tracing = torch.compiler.is_compiling()
    single = counted._replace(queries=position_ids, keys=position_ids)
    if counted.real is None:
        single = single._replace(lengths=position_ids[:, -1:] + 1)
    if queries == 1 or (tracing and cache.used):
        return single

    position_ids = position_ids.expand(rows, -1)
    real = torch.ones_like(position_ids).bool() if counted.real is None else counted.real[:, -queries:]
    # A document starts where the position is not the one after that of the last real token.
    last = torch.where(real, torch.arange(queries, device=real.device), -1).cummax(-1).values[:, :-1]
    steps = position_ids[:, 1:] != position_ids.gather(1, last.clamp(min=0)) + 1
    starts = F.pad(steps & real[:, 1:] & (last >= 0), (1, 0))
    wrong = real & ((position_ids < 0) | (starts & (position_ids != 0)))
    if not tracing:
        if not (starts | wrong).any():
            return single
        if wrong.any():
            row, token = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"position_ids: token {token} of row {row} is at {int(position_ids[row, token])}; positions "
                "rise by one from token to token, or start again at 0 with another document"
            )
        if cache.used:
            raise ValueError(
                "position_ids start again at 0, but documents in one row cannot share a cache; pass "
                "use_cache=False and no past_key_values"
            )
    documents = starts.cumsum(-1)
    places = position_ids * real
    ends = torch.zeros_like(places).scatter_reduce(1, documents, places, "amax").gather(1, documents)
    return Positions(position_ids, position_ids, counted.real, ends + 1, starts)


def causal_mask(
    name: str, config: Any, hidden_states: torch.Tensor, positions: Positions, cache: CacheState
) -> Any:
    """The mask that transformers makes for this attention function; None if its own causal mask is right.

    Padding is in the channels of the keys, so all rows have the same mask, unless they hold documents.

    Raises:
        ValueError: a compiled model reads a static cache, for which this function has no mask.
    """
    packed, queries = positions.starts is not None, hidden_states.shape[1]
    plain = not packed and not cache.compiled and queries in (1, cache.read)
    if name == "sdpa" and plain:
        return None  # while a graph is traced, transformers would write out this mask
    past = None if packed else cache
    arguments = {
        "config": EAGER if name == "eager" else config,
        EMBEDDINGS: hidden_states if packed else hidden_states[:1],
        "attention_mask": None,
        CACHE: past,
        "position_ids": positions.queries if packed else None,
        "cache_position": cache.slots,
    }
    mask = create_causal_mask(**{name: value for name, value in arguments.items() if name in MASK_ARGUMENTS})
    if mask is None and cache.compiled:
        raise ValueError(f"{name} does not work with a static cache in a compiled model; use sdpa")
    return mask


def packed_keywords(
    keywords: Mapping[str, Any], positions: Positions, shape: tuple[int, int]
) -> dict[str, Any]:
    """The keywords, with those of an attention function that takes no mask and rows of several documents.

    Raises:
        ValueError: ``cu_seq_lens_q`` and the positions disagree about where documents start.
    """
    keywords = {name: value for name, value in keywords.items() if name != "seq_idx"}
    given = keywords.get("cu_seq_lens_q")
    if torch.compiler.is_compiling():  # the lengths would break the graph
        return keywords if positions.starts is None else {"position_ids": positions.queries} | keywords
    if positions.starts is None and given is None:
        return keywords
    rows, queries = shape
    bounds = torch.arange(rows + 1, device=positions.queries.device) * queries
    if positions.starts is not None:
        bounds = torch.cat([positions.starts.flatten().nonzero().flatten(), bounds]).unique()
    bounds = bounds.int()
    if given is not None and not torch.equal(given.to(bounds), bounds):
        raise ValueError("cu_seq_lens_q and position_ids disagree about where documents start")
    longest = int(bounds.diff().max())
    return keywords | {
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds),
        **dict.fromkeys(("max_length_q", "max_length_k"), longest),
    }
