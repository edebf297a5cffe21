# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Bidirectional ALiBi for inference on a CPU, without the keys that are too far from a query to matter.

Far keys get so small a probability that float32 rounds it away. Attention leaves out those for which a bound
proves this: steep heads then look at few of many keys. What is left is computed in tiles, some queries of
some heads with the keys that they need.

In a tile, the queries are in reverse order. The bias -slope * |i - j| is then constant along the
anti-diagonals: every row is a window on one vector of numbers. torch's fused kernel on the CPU reads that
view without copying it, so there is no tensor [queries, keys].

Shapes below: B rows, H heads, L tokens (queries and keys), D head size.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .ntk_alibi import is_traced

# The size of tiles in tokens: so many blocks of queries, and whole blocks of keys.
TILE_KEYS, BLOCKS = 128, 2
TILE_QUERIES = BLOCKS * TILE_KEYS
# Tiles save time in rows of at least so many tokens, which are more in half precision, and on at most so many
# threads. More would wait for each other.
SHORTEST, SHORTEST_HALF, MOST_THREADS = 2048, 4096, 8
# What the probabilities of all keys left out for a query may add up to: float32 rounds 1 + this to 1.
NEGLIGIBLE = 2.0**-24
# A head is computed in tiles if these have less than this share of all its pairs of a query and a key.
LARGEST_SHARE = 0.8


class Tile(NamedTuple):
    """Some queries of some heads, and the keys that they have to look at."""

    heads: slice
    queries: slice
    keys: slice


def tiled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The heads' outputs [B, H, L, D], without the keys that do not matter.

    Args:
        query, key, value: [B, H, L, D].
        slopes: [1 or B, H, 1].
        scale: the factor on q.k.
    """
    tiles = needed_tiles(query, key, slopes, scale)
    if tiles is None:
        return toeplitz_attention(query, key, value, slopes, scale)
    output = torch.empty_like(query)
    for heads, queries, keys in tiles:
        output[:, heads, queries] = toeplitz_attention(
            query[:, heads, queries],
            key[:, heads, keys],
            value[:, heads, keys],
            slopes[:, heads],
            scale,
            keys.start - queries.start,
        )
    return output


def toeplitz_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    scale: float,
    start: int = 0,
) -> torch.Tensor:
    """The heads' outputs [B, H, L, D] for slopes [1 or B, H, 1]; the keys' slots begin at ``start``."""
    queries, keys = query.shape[2], key.shape[2]
    distances = (torch.arange(queries + keys - 1, device=query.device) + (start - queries + 1)).abs()
    # float32 for half precision too: the kernel adds the bias to float32 scores. For float64, it would read
    # the numbers of a float32 bias as others.
    bias = (slopes * -distances).to(torch.promote_types(query.dtype, torch.float32)).unfold(-1, keys, 1)
    reverse = query.flip(2)
    return F.scaled_dot_product_attention(reverse, key, value, attn_mask=bias, scale=scale).flip(2)


def needed_tiles(
    query: torch.Tensor, key: torch.Tensor, slopes: torch.Tensor, scale: float
) -> list[Tile] | None:
    """Tiles without far keys; None if they would not save time. The arguments are those of ``far_keys``.

    The tiles hold every query of every head once.
    """
    length = query.shape[2]
    shortest = SHORTEST if query.dtype == torch.float32 else SHORTEST_HALF
    if length < shortest or torch.get_num_threads() > MOST_THREADS or not infers_on_cpu(query):
        return None
    near = ~far_keys(query, key, slopes, scale)

    # The keys of a tile are those from the first block that is needed to the last, and its queries' own.
    starts = torch.arange(0, length, TILE_QUERIES)
    stops = (starts + TILE_QUERIES).clamp(max=length)
    firsts = torch.minimum(near.int().argmax(-1) * TILE_KEYS, starts)
    lasts = (near.shape[-1] - near.flip(-1).int().argmax(-1)) * TILE_KEYS
    lasts = torch.maximum(lasts.clamp(max=length), stops)
    pairs = ((lasts - firsts) * (stops - starts)).sum(-1)
    is_tiled = (pairs < LARGEST_SHARE * length**2).tolist()
    if not any(is_tiled):
        return None

    whole = slice(0, length)
    tiles = [Tile(heads, whole, whole) for heads, head_is_tiled in runs(is_tiled) if not head_is_tiled]
    blocks = zip(starts.tolist(), stops.tolist(), firsts.T.tolist(), lasts.T.tolist(), strict=True)
    for start, stop, *keys in blocks:
        for heads, (head_is_tiled, first, last) in runs(zip(is_tiled, *keys, strict=True)):
            if head_is_tiled:
                tiles.append(Tile(heads, slice(start, stop), slice(first, last)))
    return tiles


def far_keys(query: torch.Tensor, key: torch.Tensor, slopes: torch.Tensor, scale: float) -> torch.Tensor:
    """Which blocks of keys are too far from a block of queries to matter.

    Softmax ignores a term that is constant along a row, so the mean of the keys may be taken from each. Then,
    by Cauchy and Schwarz, a key's score exceeds that of the query's own key by at most

        scale * (|q_i| |k_j| - q_i.k_i) - slope * |i - j|

    and its probability is at most e to that power. A block is far if for all its keys this is below
    ``NEGLIGIBLE`` / L.

    Args:
        query, key: [B, H, L, D], of the same tokens.
        slopes: float32 [1 or B, H, 1].
        scale: the factor on q.k.

    Returns:
        bool [H, blocks of TILE_QUERIES, blocks of TILE_KEYS]; True where the keys are far in all rows.
    """
    length = query.shape[2]
    center = key[:, :, ::16].float().mean(2, keepdim=True)  # of some keys; any vector would do
    largest = []
    # Block by block, so what is in between stays in the processor's cache.
    for q, k in zip(query.split(TILE_KEYS, 2), key.split(TILE_KEYS, 2), strict=True):
        q, k = q.float() * scale, k.float() - center
        largest.append(torch.stack([q.norm(dim=-1), k.norm(dim=-1), -(q * k).sum(-1)]).amax(-1))
    query_norms, key_norms, own_keys = torch.stack(largest, -1)
    query_norms, own_keys = in_blocks(query_norms).amax(-1), in_blocks(own_keys).amax(-1)
    excess = query_norms[..., None] * key_norms[:, :, None] + own_keys[..., None]

    # From the nearest token of one block to that of the other; the blocks at the end may be shorter.
    query_starts = torch.arange(0, length, TILE_QUERIES)[:, None]
    key_starts = torch.arange(0, length, TILE_KEYS)
    before = query_starts - (key_starts + TILE_KEYS - 1)
    after = key_starts - (query_starts + TILE_QUERIES - 1)
    distances = torch.maximum(before, after).clamp(min=0)
    # Comparisons with NaN are false, so then no key is far.
    return (excess - slopes[..., None] * distances < math.log(NEGLIGIBLE / length)).all(0)


def in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Values of blocks of keys [..., n] as [..., blocks of queries, BLOCKS]; the last value fills up."""
    count = values.shape[-1]
    places = torch.arange(count + -count % BLOCKS).clamp(max=count - 1)
    return values[..., places].unflatten(-1, (-1, BLOCKS))


def runs(labels: Iterable[Hashable]) -> Iterator[tuple[slice, Any]]:
    """Each run of neighbours with the same label, as a slice, and the label."""
    start = 0
    for label, same in itertools.groupby(labels):
        stop = start + sum(1 for _ in same)
        yield slice(start, stop), label
        start = stop


def infers_on_cpu(states: torch.Tensor) -> bool:
    """Whether no gradients are wanted and nothing is traced, so that work may depend on the rows at hand."""
    return states.device.type == "cpu" and not (torch.is_grad_enabled() or is_traced())
