# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Bidirectional ALiBi through torch's ``scaled_dot_product_attention``, in one of these ways:

* On a CPU, the bias is a view on a few numbers, not a tensor [L, L]: ``toeplitz_attention`` in ntk_tiles.py.
* In inference on a CPU, the same without the keys that are too far to matter: ``tiled_attention``.
* Elsewhere, each block of queries gets its own bias, one block after another: ``blockwise_attention``. The
  view does not work if the kernel wants aligned rows (accelerators), copies views (torch.compile) or does not
  support dropout, or if every query has its own slopes. The backward pass computes these biases again instead
  of keeping them.

A product of two extra channels masks padded keys.

Measured on one CPU thread, 12 heads x 64, 8192 tokens, float32: the view takes 0.1 GB (0.2 GB with padding)
and 1.4 times as long as attention without any bias; in tiles, with random queries and keys, 0.4 times as
long. The whole bias takes 3.9 GB and 3.3 times as long.

Shapes below: B rows, H heads, L tokens (queries and keys), D head size.
"""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .ntk_alibi import PADDED_KEY, PADDED_QUERY, fold, sdpa_kernels
from .ntk_config import FOLDED_CHANNELS
from .ntk_tiles import tiled_attention, toeplitz_attention

# Queries per block. Small blocks fit a CPU's caches; an accelerator needs large ones to be busy.
CPU_BLOCK, BLOCK = 128, 1024
# A pass keeps the biases of its blocks for all layers if they are not larger than this, in bytes.
LARGEST_KEPT = 100e6


def sdpa_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    scale: float,
    dropout: float,
    real: torch.Tensor | None = None,
    biases: dict[int, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The heads' outputs [B, H, L, D], in one of the ways at the head of this file.

    Args:
        query, key, value: [B, H, L, D].
        slopes: float32 [1 or B, H, 1 or L]; the last size is L if every query has its own slopes.
        scale: the factor on q.k.
        dropout: probability of dropping an attention weight.
        real: bool [B, L], False for padded tokens; None without padding.
        biases: those of blocks, to use again in layers with the same slopes; new ones are added. None keeps
            none.
    """
    size = query.shape[-1]
    if real is not None:
        query, key, value = mask_padding(query, key, value, real, scale)
    one_slope_a_head = slopes.shape[-1] == 1
    # Compiled code would copy the view to a whole tensor; there, blocks save the memory.
    uncompiled_cpu = query.device.type == "cpu" and not torch.compiler.is_compiling()
    if not (uncompiled_cpu and one_slope_a_head and dropout == 0.0):
        block = CPU_BLOCK if uncompiled_cpu else BLOCK
        output = blockwise_attention(query, key, value, slopes, scale, dropout, block, biases)
    elif real is None:
        output = tiled_attention(query, key, value, slopes, scale)
    else:
        output = toeplitz_attention(query, key, value, slopes, scale)
    return output[..., :size]


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
    biases: dict[int, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The heads' outputs [B, H, L, D] for slopes [1 or B, H, 1 or L], ``block`` queries at a time."""
    length = query.shape[2]

    def bias_of(start: int, stop: int) -> torch.Tensor:
        block_slopes = slopes
        if slopes.shape[-1] > 1:
            block_slopes = slopes[..., start:stop]
        return block_bias(block_slopes, start, stop, length, query.dtype)

    def attend(
        queries: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if bias is None:
            bias = bias_of(start, start + queries.shape[2])
        with sdpa_kernels(queries.device, queries.shape[2]):
            return F.scaled_dot_product_attention(
                queries, key, value, attn_mask=bias, dropout_p=dropout, scale=scale
            )

    size = slopes.shape[0] * slopes.shape[1] * length**2 * query.element_size()
    needs_none = torch.compiler.is_compiling() or torch.is_grad_enabled()
    keeps_biases = not needs_none and biases is not None and size <= LARGEST_KEPT
    outputs = []
    for start in range(0, length, block):
        queries = query[:, :, start : start + block]
        bias = None
        if keeps_biases:
            if start not in biases:
                biases[start] = bias_of(start, start + queries.shape[2])
            bias = biases[start]
        if torch.is_grad_enabled() and query.requires_grad and length > block:
            outputs.append(checkpoint(attend, queries, key, value, start, bias, use_reentrant=False))
        else:
            outputs.append(attend(queries, key, value, start, bias))
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs, dim=2)


def block_bias(slopes: torch.Tensor, start: int, stop: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """The bias of the queries ``start`` to ``stop`` on the keys 0 to ``keys``, [1 or B, H, queries, keys].

    With one slope a head, a row is that of the query before, one place further on. All are windows on one
    vector, which is much faster to copy than to compute: 0.2 times as long at 8192 keys on a CPU.

    Args:
        slopes: float32 [1 or B, H, 1 or queries].
    """
    if slopes.shape[-1] > 1:
        return distance_bias(slopes, torch.arange(start, stop, device=slopes.device), keys).to(dtype)
    # From the first key seen by the last query, to the last key seen by the first one.
    distances = torch.arange(1 - stop, keys - start, device=slopes.device).abs()
    return (slopes * -distances).to(dtype).unfold(-1, keys, 1).flip(-2)


def distance_bias(slopes: torch.Tensor, slots: torch.Tensor, keys: int) -> torch.Tensor:
    """The bias of the queries at ``slots`` [Q] on so many keys: float32 [1 or B, H, Q, keys].

    Args:
        slopes: float32 [1 or B, H, 1 or Q].
    """
    distances = (slots[:, None] - torch.arange(keys, device=slots.device)).abs()
    return slopes[..., None] * -distances
