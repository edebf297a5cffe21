# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""What ``plan_attention`` needs for given positions, several documents in a row, 4-D masks and paged caches.

Shapes below: B rows, H heads, Q new tokens (queries), K keys (cached and new).
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from .ntk_alibi import Alibi
from .ntk_cache import UPDATES_PAGED, CacheState

FUNCTIONS = AttentionInterface()
# Arguments of attention functions that take rows of several documents.
PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})


class Positions(NamedTuple):
    """Where the tokens of a forward pass are in their documents."""

    queries: torch.Tensor
    """int64 [B or 1, Q]: positions of the new tokens."""
    keys: torch.Tensor
    """int64 [B or 1, Q or K]: positions of the keys to fold."""
    real: torch.Tensor | None = None
    """bool, like ``keys``: False for padded tokens; None without padding."""
    lengths: torch.Tensor | None = None
    """int64 [B or 1, 1 or Q]: number of tokens in the document of each query, as far as it is known."""
    starts: torch.Tensor | None = None
    """bool [B, Q]: where a second document of a row, or a later one, starts; None if there is only one."""


def given_positions(
    position_ids: torch.Tensor, counted: Positions, hidden_states: torch.Tensor, cache: CacheState
) -> Positions:
    """The caller's positions [B or 1, Q], and where documents start.

    A quantised cache holds keys without positions, so each pass counts them again, and there are no others.

    Raises:
        ValueError: the positions have another shape, do not rise by one, are negative, differ from those that
            a quantised cache counts, or start again over a cache, where nothing tells the documents apart.
    """
    rows, queries = hidden_states.shape[:2]
    position_ids = checked_shape(position_ids, hidden_states)
    if counted.real is not None:
        # Places in the cache count padded tokens too. Chunked prefill of transformers 4.57 passes them.
        places = (position_ids == cache.slots).all(dim=-1, keepdim=True)
        position_ids = torch.where(places, counted.queries, position_ids)
    tracing = torch.compiler.is_compiling()
    if cache.quantised:
        real = True if counted.real is None else counted.real[:, -queries:]
        if not tracing and ((position_ids != counted.queries) & real).any():
            raise ValueError("a quantised cache counts positions by itself; drop position_ids")
        return counted
    single = counted._replace(queries=position_ids, keys=position_ids)
    if counted.real is None:
        single = single._replace(lengths=position_ids[:, -1:] + 1)
    if queries == 1 or (tracing and cache.used):
        return single

    position_ids = position_ids.expand(rows, -1)
    real = torch.ones_like(position_ids).bool() if counted.real is None else counted.real[:, -queries:]
    starts = (position_ids == 0) & real & (real.cumsum(-1) > 1)
    if not tracing:
        jumps = F.pad(real[:, :-1] & (position_ids.diff() != 1), (1, 0))
        wrong = real & ~starts & (jumps | (position_ids < 0))
        if wrong.any():
            row, token = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"position_ids: token {token} of row {row} is at {int(position_ids[row, token])}; positions "
                "rise by one from token to token, or start again at 0 with another document"
            )
        if not starts.any():
            return single
        if cache.used:
            raise ValueError("documents in one row cannot share a cache; pass use_cache=False")
    documents = starts.cumsum(-1)
    places = position_ids * real
    ends = torch.zeros_like(places).scatter_reduce(1, documents, places, "amax").gather(1, documents)
    return counted._replace(queries=position_ids, keys=position_ids, lengths=ends + 1, starts=starts)


def checked_shape(position_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """The caller's positions, int64 [B or 1, Q], on the device of the hidden states [B, Q, hidden]."""
    rows, queries = hidden_states.shape[:2]
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, rows) or position_ids.shape[1] != queries:
        raise ValueError(f"position_ids must be [{rows}, {queries}], got {list(position_ids.shape)}")
    return position_ids.to(hidden_states.device)


def packed_keywords(
    keywords: Mapping[str, Any],
    position_ids: torch.Tensor | None,
    positions: Positions,
    shape: tuple[int, int],
) -> dict[str, Any]:
    """The keywords, with those of FlashAttention, which takes no mask, for rows of several documents.

    Raises:
        ValueError: ``cu_seq_lens_q`` and the positions disagree about where documents start.
    """
    given, rest = keywords.get("cu_seq_lens_q"), {k: v for k, v in keywords.items() if k not in PACKED}
    if position_ids is None and (named := [name for name in keywords if name in PACKED]):
        raise ValueError(f"{named[0]} needs position_ids, which start again at 0 with every document")
    if torch.compiler.is_compiling():  # the lengths would break the graph
        return rest if positions.starts is None else {**rest, "position_ids": positions.queries}
    rows, queries = shape
    bounds = torch.arange(rows + 1, device=positions.queries.device) * queries
    if positions.starts is not None:
        bounds = torch.cat([positions.starts.flatten().nonzero().flatten(), bounds]).unique()
    if given is not None and given.tolist() != bounds.tolist():
        raise ValueError("cu_seq_lens_q and position_ids disagree about where documents start")
    if positions.starts is None:
        return rest
    lengths = dict.fromkeys(("max_length_q", "max_length_k"), int(bounds.diff().max()))
    return {**rest, **lengths, **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds.int())}


def stated(
    name: str,
    alibi: Alibi,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor | None,
    cache: CacheState,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caller's positions int64 [B or 1, Q] and mask of four dimensions, which does not say them.

    Args:
        attention_mask: [B or 1, 1, Q, at least K]. It alone says what each query sees, future and padded keys
            included: True, or 0 in a mask of floats, which are added to the scores. It is returned as floats
            in the states' dtype, [B, 1, Q, K].

    Raises:
        ValueError: the mask has another shape or holds integers; there are no positions; the attention
            function, the scaling or the cache does not work with such a mask.
    """
    if "flash" in name:
        raise ValueError(f"{name} takes no 4-D attention_mask; use one of: sdpa, eager, flex_attention")
    check_lengths(alibi, "a 4-D attention_mask")
    if position_ids is None:
        raise ValueError("a 4-D attention_mask needs position_ids, because it does not say positions")
    if cache.quantised:
        raise ValueError("a 4-D attention_mask does not work with a quantised cache; use another cache")
    position_ids = checked_shape(position_ids, hidden_states)
    (rows, queries, _), dtype = hidden_states.shape, hidden_states.dtype
    shape = list(attention_mask.shape)
    if shape[0] not in (1, rows) or shape[1:3] != [1, queries] or shape[3] < cache.keys:
        raise ValueError(
            f"a 4-D attention_mask must be [{rows}, 1, {queries}, {cache.keys}] here, got {shape}"
        )
    mask, lowest = attention_mask[..., : cache.keys].to(hidden_states.device), torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)
    elif not mask.is_floating_point():
        raise ValueError(f"a 4-D attention_mask must hold booleans or floats, got {mask.dtype}")
    return position_ids, mask.clamp(min=lowest).to(dtype).expand(rows, -1, -1, -1)


def check_paged(
    name: str, alibi: Alibi, hidden_states: torch.Tensor, position_ids: torch.Tensor | None
) -> None:
    """Raises ValueError if continuous batching does not work with folded keys here."""
    check_lengths(alibi, "continuous batching")
    check_paged_float16(alibi, hidden_states.dtype)
    takes_cache = name in FUNCTIONS and "cache" in inspect.signature(FUNCTIONS[name]).parameters
    if not (UPDATES_PAGED or takes_cache or "paged" in name):  # it would attend to the new tokens only
        paged = ", ".join(key for key in FUNCTIONS if "paged" in key)
        raise ValueError(f"{name} does not work with continuous batching here; use one of: {paged}")
    if "eager" in name and hidden_states.dtype != torch.float32:
        raise ValueError(f"{name} rounds the scores to {hidden_states.dtype}; use sdpa or float32")
    if position_ids is None:
        raise ValueError("continuous batching needs position_ids")


def check_paged_float16(alibi: Alibi, dtype: torch.dtype) -> None:
    """Raises ValueError for a concave penalty in float16: paged caches do not tell how long texts are."""
    if alibi.power is not None and dtype == torch.float16:
        raise ValueError(
            "continuous batching does not work with a concave penalty in float16, which holds it for some "
            "lengths only; load the model in bfloat16"
        )


def check_lengths(alibi: Alibi, what: str) -> None:
    """Raises ValueError for a length-dynamic scaling, where hidden states depend on the tokens after them."""
    if alibi.dynamic == "length":
        raise ValueError(
            f"{what} does not work with length-dynamic scaling; convert the model with --dynamic position"
        )
