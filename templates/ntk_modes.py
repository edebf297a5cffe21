# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""What a forward pass of a decoder may be given beyond tokens, a padding mask and a cache.

* ``position_ids``: ``given_positions``. They also tell apart several documents in a row (packed rows), for
  which FlashAttention has keywords of its own: ``packed_keywords``.
* A mask of four dimensions, which says what each token sees: ``with_4d_mask``.
* The paged cache of transformers' continuous batching: ``with_paged_cache``.

ntk_plan.py calls these functions. Plain generation needs none of them.

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

# transformers' attention functions, by the names that ``attn_implementation`` takes.
FUNCTIONS = AttentionInterface()
# Arguments of attention functions that take rows of several documents.
PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})


class Positions(NamedTuple):
    """Where the tokens of a forward pass are in their documents. A row that is not packed is one document."""

    queries: torch.Tensor
    """int64 [B or 1, Q]: positions of the new tokens."""
    keys: torch.Tensor
    """int64: positions of the keys to fold. These are the new ones [B or 1, Q], or all [B or 1, K] if the
    cache is quantised."""
    real: torch.Tensor | None = None
    """bool, like ``keys``: False for padded tokens; None without padding."""
    lengths: torch.Tensor | None = None
    """int64 [B or 1, 1 or Q]: number of tokens in the document of each query, as far as it is known."""
    starts: torch.Tensor | None = None
    """bool [B, Q]: where a second document of a row, or a later one, starts; None if there is only one."""


# Given positions, and packed rows


def given_positions(
    position_ids: torch.Tensor, counted: Positions, hidden_states: torch.Tensor, cache: CacheState
) -> Positions:
    """The caller's positions [B or 1, Q] in the place of the counted ones, and where documents start.

    Raises:
        ValueError: the positions have another shape, do not rise by one, are negative, differ from those that
            a quantised cache counts, or start again over a cache, where nothing tells the documents apart.
    """
    rows, queries = hidden_states.shape[:2]
    position_ids = checked_shape(position_ids, hidden_states)
    if counted.real is not None:
        position_ids = positions_of_places(position_ids, counted, cache)
    if cache.quantised:
        check_counted(position_ids, counted)
        return counted
    one_document = counted._replace(queries=position_ids, keys=position_ids)
    if counted.real is None:
        one_document = one_document._replace(lengths=position_ids[:, -1:] + 1)
    # A graph cannot look at values: over a cache it takes a row for one document, without one for several.
    in_graph = torch.compiler.is_compiling()
    if queries == 1 or (in_graph and cache.used):
        return one_document

    position_ids = position_ids.expand(rows, -1)
    real = counted.real
    if real is None:
        real = torch.ones_like(position_ids).bool()
    starts = (position_ids == 0) & real & (real.cumsum(-1) > 1)
    if not in_graph:
        check_rising(position_ids, real, starts)
        if not starts.any():
            return one_document
        if cache.used:
            raise ValueError("documents in one row cannot share a cache; pass use_cache=False")
    return counted._replace(
        queries=position_ids,
        keys=position_ids,
        lengths=document_lengths(position_ids, real, starts),
        starts=starts,
    )


def checked_shape(position_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """The caller's positions, int64 [B or 1, Q], on the device of the hidden states [B, Q, hidden]."""
    rows, queries = hidden_states.shape[:2]
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, rows) or position_ids.shape[1] != queries:
        raise ValueError(f"position_ids must be [{rows}, {queries}], got {list(position_ids.shape)}")
    return position_ids.to(hidden_states.device)


def positions_of_places(position_ids: torch.Tensor, counted: Positions, cache: CacheState) -> torch.Tensor:
    """The counted positions where a caller gives places in the cache, which count padded tokens too.

    Chunked prefill of transformers 4.57 passes places.
    """
    are_places = (position_ids == cache.slots).all(dim=-1, keepdim=True)
    return torch.where(are_places, counted.queries, position_ids)


def check_counted(position_ids: torch.Tensor, counted: Positions) -> None:
    """Raises ValueError for positions that differ from those that a quantised cache counts.

    It holds keys without positions, so each pass counts them again, and there are no others.
    """
    if torch.compiler.is_compiling():
        return
    differ = position_ids != counted.queries
    if counted.real is not None:
        differ = differ & counted.real[:, -position_ids.shape[1] :]
    if differ.any():
        raise ValueError("a quantised cache counts positions by itself; drop position_ids")


def check_rising(position_ids: torch.Tensor, real: torch.Tensor, starts: torch.Tensor) -> None:
    """Raises ValueError if a real token starts no document and is not one position after the one before.

    All arguments are [B, Q].
    """
    jumps = F.pad(real[:, :-1] & (position_ids.diff() != 1), (1, 0))
    wrong = real & ~starts & (jumps | (position_ids < 0))
    if wrong.any():
        row, token = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids: token {token} of row {row} is at {int(position_ids[row, token])}; positions "
            "rise by one from token to token, or start again at 0 with another document"
        )


def document_lengths(position_ids: torch.Tensor, real: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """int64 [B, Q]: the number of tokens in the document of each token; the arguments are [B, Q]."""
    documents = starts.cumsum(-1)
    positions = position_ids * real
    last = torch.zeros_like(positions).scatter_reduce(1, documents, positions, "amax")
    return last.gather(1, documents) + 1


def packed_keywords(
    keywords: Mapping[str, Any],
    position_ids: torch.Tensor | None,
    positions: Positions,
    shape: tuple[int, int],
) -> dict[str, Any]:
    """The keywords, with those of FlashAttention, which takes no mask, for rows of several documents.

    Args:
        shape: B, Q.

    Raises:
        ValueError: ``cu_seq_lens_q`` and the positions disagree about where documents start, or there are no
            positions.
    """
    if position_ids is None:
        for name in keywords:
            if name in PACKED:
                raise ValueError(f"{name} needs position_ids, which start again at 0 with every document")
        return dict(keywords)
    others = {name: value for name, value in keywords.items() if name not in PACKED}
    given = keywords.get("cu_seq_lens_q")
    if given is None and positions.starts is None:
        return others
    if torch.compiler.is_compiling():  # the lengths would break the graph
        if positions.starts is None:
            return others
        return {**others, "position_ids": positions.queries}
    # Where documents start in all rows, one after another, and where the last one ends.
    rows, queries = shape
    bounds = torch.arange(rows + 1, device=positions.queries.device) * queries
    if positions.starts is not None:
        bounds = torch.cat([positions.starts.flatten().nonzero().flatten(), bounds]).unique()
    if given is not None and given.tolist() != bounds.tolist():
        raise ValueError("cu_seq_lens_q and position_ids disagree about where documents start")
    if positions.starts is None:
        return others
    longest, bounds = int(bounds.diff().max()), bounds.int()
    return {
        **others,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


# A mask of four dimensions


def with_4d_mask(
    name: str,
    alibi: Alibi,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor | None,
    cache: CacheState,
) -> tuple[Positions, torch.Tensor]:
    """The caller's positions, and a mask of four dimensions as floats to add to the scores, [B, 1, Q, K].

    Args:
        name: of the attention function.
        attention_mask: [B or 1, 1, Q, at least K]. It alone says what each query sees, future and padded keys
            included: True, or 0 in a mask of floats.
        position_ids: [B or 1, Q]; the mask does not say them.

    Raises:
        ValueError: the mask or the positions have another shape; the mask holds integers; there are no
            positions; the attention function, the scaling or the cache does not work with such a mask.
    """
    if "flash" in name:
        raise ValueError(f"{name} takes no 4-D attention_mask; use one of: sdpa, eager, flex_attention")
    check_lengths(alibi, "a 4-D attention_mask")
    if position_ids is None:
        raise ValueError("a 4-D attention_mask needs position_ids, because it does not say positions")
    if cache.quantised:
        raise ValueError("a 4-D attention_mask does not work with a quantised cache; use another cache")
    position_ids = checked_shape(position_ids, hidden_states)
    rows, queries = hidden_states.shape[:2]
    shape = list(attention_mask.shape)
    if shape[0] not in (1, rows) or shape[1:3] != [1, queries] or shape[3] < cache.keys:
        raise ValueError(
            f"a 4-D attention_mask must be [{rows}, 1, {queries}, {cache.keys}] here, got {shape}"
        )
    mask = attention_mask[..., : cache.keys].to(hidden_states.device)
    mask = additive_mask(mask, hidden_states.dtype).expand(rows, -1, -1, -1)
    return Positions(position_ids, position_ids), mask


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of booleans (True for what is seen) or of floats, as finite floats of this dtype."""
    lowest = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)
    elif not mask.is_floating_point():
        raise ValueError(f"a 4-D attention_mask must hold booleans or floats, got {mask.dtype}")
    return mask.clamp(min=lowest).to(dtype)


# Continuous batching


def with_paged_cache(
    name: str,
    alibi: Alibi,
    hidden_states: torch.Tensor,
    attention_mask: Any,
    position_ids: torch.Tensor | None,
) -> tuple[Positions, Any]:
    """The positions that transformers gives for tokens of several texts, and the mask of its function.

    Raises:
        ValueError: continuous batching does not work with folded keys here, or there are no positions.
    """
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
    return Positions(position_ids, position_ids), attention_mask


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
