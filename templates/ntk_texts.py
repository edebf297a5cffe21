# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""The texts of a batch one after another, without padding, and attention over them.

A batch of rows with padding at their ends is packed once, before the first layer, and goes back into rows
after the last one. In between, nothing computes a padded token but attention on accelerators:

    rows     a a a . .      packed     a a a b b b b b c      bounds     0 3 8 9
             b b b b b
             c . . . .

So are rows that hold several texts from the start, as sentence-transformers gives them to FlashAttention.

Shapes below: N tokens in all, H heads, D head size.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers.integrations.flex_attention import compile_friendly_flex_attention
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

from .ntk_symmetric_sdpa import sdpa_attention

# On accelerators, texts go into rows with padding if these have at most so many places for each token.
LARGEST_SHARE = 4
# The side of the blocks in which flex_attention skips keys, in tokens.
FLEX_BLOCK = 128


class Texts(NamedTuple):
    """Where the texts are, in their rows and packed."""

    shape: tuple[int, int]
    """Number of rows, and of the tokens in each."""
    slots: torch.Tensor
    """int64 [N]: the places of the tokens in the rows, one row after another."""
    bounds: torch.Tensor
    """int32 [texts + 1]: where the texts begin, and where the last one ends."""
    spans: list[slice]
    """The tokens of each text."""
    lengths: torch.Tensor
    """int64 [texts]: number of tokens."""
    longest: int
    """That of the longest text."""
    numbers: torch.Tensor
    """int64 [N]: which text each token belongs to."""
    positions: torch.Tensor
    """int64 [N]: the place of each token in its text."""

    def pack(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, tokens, hidden] to [1, N, hidden]."""
        return hidden_states.flatten(0, 1)[None, self.slots]

    def unpack(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[1, N, hidden] to [rows, tokens, hidden], with zeros for padded tokens."""
        rows, tokens = self.shape
        places = hidden_states.new_zeros(rows * tokens, hidden_states.shape[-1])
        slots = self.slots.to(hidden_states.device)  # the last layer may be on another device than the first
        return places.index_copy(0, slots, hidden_states[0]).unflatten(0, self.shape)


def find_texts(real: torch.Tensor, starts: torch.Tensor | None) -> Texts | None:
    """The texts of these rows; None if a row has padding before or between its tokens, or no token at all.

    Args:
        real: bool [B, L], False for padded tokens.
        starts: bool [B, L], where a second text of a row, or a later one, starts; None if there is only one.
    """
    padding_ends = real[:, 1:] & ~real[:, :-1]
    if real.numel() == 0 or padding_ends.any() or not real[:, 0].all():
        return None
    firsts = torch.zeros_like(real)
    firsts[:, 0] = True
    if starts is not None:
        firsts = firsts | starts
    slots = real.flatten().nonzero()[:, 0]
    begins = firsts.flatten()[slots].nonzero()[:, 0]
    bounds = F.pad(begins, (0, 1), value=len(slots))
    spans = [slice(start, stop) for start, stop in pairwise(bounds.tolist())]
    lengths = bounds.diff()
    numbers = torch.arange(len(spans), device=real.device)
    numbers = numbers.repeat_interleave(lengths, output_size=len(slots))
    return Texts(
        shape=tuple(real.shape),
        slots=slots,
        bounds=bounds.int(),
        spans=spans,
        lengths=lengths,
        longest=max(span.stop - span.start for span in spans),
        numbers=numbers,
        positions=torch.arange(len(slots), device=real.device) - bounds[numbers],
    )


# Attention. Each function takes query, key and value [1, H, N, D], slopes float32 [1 or texts, H, 1] or, if
# every query has its own, [1, H, N], and the factor on q.k. It returns the heads' outputs [1, H, N, D].


def text_by_text(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    scale: float,
    dropout: float,
    texts: Texts,
) -> torch.Tensor:
    """One text after another: on CPUs, and where texts of very unequal lengths would be mostly padding."""
    outputs = []
    for number, span in enumerate(texts.spans):
        of_text = slopes
        if slopes.shape[-1] > 1:
            of_text = slopes[..., span]
        elif len(slopes) > 1:
            of_text = slopes[number, None]
        states = (query[:, :, span], key[:, :, span], value[:, :, span])
        outputs.append(sdpa_attention(*states, of_text, scale, dropout))
    return torch.cat(outputs, dim=2)


def in_padded_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    scale: float,
    dropout: float,
    texts: Texts,
    biases: dict[int, torch.Tensor] | None,
) -> torch.Tensor:
    """All texts in rows with padding, [texts, longest], for accelerators, which need much to do at once."""
    count, longest = len(texts.spans), texts.longest
    places = texts.numbers * longest + texts.positions

    def with_padding(states: torch.Tensor) -> torch.Tensor:
        """[1, H, N, any] to [texts, H, longest, any]."""
        rows = states.new_zeros(count * longest, states.shape[1], states.shape[-1])
        rows = rows.index_copy(0, places, states[0].transpose(0, 1))
        return rows.unflatten(0, (count, longest)).transpose(1, 2)

    if slopes.shape[-1] > 1:
        slopes = with_padding(slopes[..., None])[..., 0]
    real = torch.arange(longest, device=places.device) < texts.lengths[:, None]
    states = (with_padding(query), with_padding(key), with_padding(value))
    output = sdpa_attention(*states, slopes, scale, dropout, real, biases)
    return output.transpose(1, 2).flatten(0, 1)[places].transpose(0, 1)[None]


def flash_attention(
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    scale: float,
    dropout: float,
    texts: Texts,
) -> torch.Tensor:
    """All texts at once by FlashAttention 2, whose ``alibi_slopes`` are this bias if nothing is causal."""
    alibi_slopes = slopes[..., 0]
    if len(alibi_slopes) == 1:
        alibi_slopes = alibi_slopes[0]
    packed_attention = lazy_import_flash_attention(name)[0][1]
    # Norms of queries and keys leave float32 under torch's automatic casts.
    query, key = query.to(value.dtype), key.to(value.dtype)
    output = packed_attention(
        *(states[0].transpose(0, 1) for states in (query, key, value)),
        cu_seqlens_q=texts.bounds,
        cu_seqlens_k=texts.bounds,
        max_seqlen_q=texts.longest,
        max_seqlen_k=texts.longest,
        dropout_p=dropout,
        softmax_scale=scale,
        causal=False,
        alibi_slopes=alibi_slopes.contiguous(),
    )
    return output.transpose(0, 1)[None]


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    scale: float,
    texts: Texts,
    mask: BlockMask,
) -> torch.Tensor:
    """All texts at once by torch's ``flex_attention``; ``mask`` is from ``text_mask``."""
    # [H, N], one slope for each query.
    if slopes.shape[-1] > 1:
        slopes = slopes[0]
    elif len(slopes) > 1:
        slopes = slopes[texts.numbers, :, 0].T
    else:
        slopes = slopes[0].expand(-1, query.shape[2])

    def penalised(
        score: torch.Tensor, _: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return score - slopes[head, query] * (query - key).abs()

    training = torch.is_grad_enabled() and query.requires_grad
    return compile_friendly_flex_attention(
        query, key, value, training=training, score_mod=penalised, block_mask=mask, scale=scale
    )


def text_mask(texts: Texts) -> BlockMask:
    """The mask of ``flex_attention``: tokens see those of their own text.

    A block of queries skips the blocks before its first text and after its last one. torch's own function
    would look at every pair of tokens to find them.
    """
    numbers, count = texts.numbers, len(texts.numbers)

    def sees(_: torch.Tensor, __: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return numbers[query] == numbers[key]

    starts = torch.arange(0, count, FLEX_BLOCK, device=numbers.device)
    stops = (starts + FLEX_BLOCK).clamp(max=count)
    first_keys = texts.bounds[numbers[starts]]
    last_keys = texts.bounds[numbers[stops - 1] + 1] - 1
    first_blocks, last_blocks = first_keys // FLEX_BLOCK, last_keys // FLEX_BLOCK
    blocks = torch.arange(len(starts), device=numbers.device, dtype=torch.int32)
    # Of each row, so many count as the block has keys in.
    indices = (first_blocks[:, None] + blocks).clamp(max=len(starts) - 1)
    counts = last_blocks - first_blocks + 1
    return BlockMask.from_kv_blocks(
        counts[None, None].int(),
        indices[None, None].int(),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=sees,
        seq_lengths=(count, count),
    )
