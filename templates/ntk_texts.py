# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""The texts of a batch one after another, without padding, and attention over them.

A batch of rows with padding at their ends is packed once, before the first layer, and goes back into rows
after the last one. No layer then computes a padded token:

    rows     a a a . .      packed     a a a b b b b b c      bounds     0 3 8 9
             b b b b b
             c . . . .

So are rows that hold several texts from the start, as sentence-transformers gives them to FlashAttention.

Shapes below: N tokens in all, H heads, D head size.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask
from transformers.integrations.flex_attention import compile_friendly_flex_attention
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

from .ntk_symmetric_sdpa import sdpa_attention


class Texts(NamedTuple):
    """Where the texts are, in their rows and packed."""

    rows: tuple[int, int]
    """Number of rows, and of the tokens in each."""
    slots: torch.Tensor
    """int64 [N]: the places of the tokens in the rows, one row after another."""
    bounds: torch.Tensor
    """int32 [texts + 1]: where the texts begin, and where the last one ends."""
    spans: list[slice]
    """The tokens of each text."""

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [texts]."""
        return self.bounds.diff().long()

    @property
    def longest(self) -> int:
        return max(span.stop - span.start for span in self.spans)

    @property
    def numbers(self) -> torch.Tensor:
        """int64 [N]: which text each token belongs to."""
        texts = torch.arange(len(self.spans), device=self.slots.device)
        return texts.repeat_interleave(self.lengths, output_size=len(self.slots))

    @property
    def positions(self) -> torch.Tensor:
        """int64 [N]: the place of each token in its text."""
        places = torch.arange(len(self.slots), device=self.slots.device)
        return places - self.bounds[self.numbers]

    def pack(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, tokens, hidden] to [1, N, hidden]."""
        return hidden_states.flatten(0, 1)[None, self.slots]

    def unpack(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[1, N, hidden] to [rows, tokens, hidden], with zeros for padded tokens."""
        rows = hidden_states.new_zeros(self.rows[0] * self.rows[1], hidden_states.shape[-1])
        return rows.index_copy(0, self.slots, hidden_states[0]).unflatten(0, self.rows)


def find_texts(real: torch.Tensor, starts: torch.Tensor | None) -> Texts | None:
    """The texts of these rows; None if a row has padding before or between its tokens, or no token.

    Args:
        real: bool [B, L], False for padded tokens.
        starts: bool [B, L], where a second text of a row, or a later one, starts; None if there is only one.
    """
    padding_ends = real[:, 1:] & ~real[:, :-1]
    if padding_ends.any() or not real[:, 0].all():
        return None
    firsts = torch.zeros_like(real)
    firsts[:, 0] = True
    if starts is not None:
        firsts = firsts | starts
    slots = real.flatten().nonzero()[:, 0]
    begins = firsts.flatten()[slots].nonzero()[:, 0]
    bounds = F.pad(begins, (0, 1), value=len(slots))
    ends = bounds.tolist()
    spans = [slice(start, stop) for start, stop in pairwise(ends)]
    return Texts(tuple(real.shape), slots, bounds.int(), spans)


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
    """One text after another, for CPUs."""
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


def padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    scale: float,
    dropout: float,
    texts: Texts,
    biases: dict[int, torch.Tensor] | None,
) -> torch.Tensor:
    """All texts in rows with padding, for accelerators, which need much to do at once."""
    count, longest = len(texts.spans), texts.longest
    places = texts.numbers * longest + texts.positions

    def in_rows(states: torch.Tensor) -> torch.Tensor:
        """[1, H, N, any] to [texts, H, longest, any]."""
        rows = states.new_zeros(count * longest, states.shape[1], states.shape[-1])
        rows = rows.index_copy(0, places, states[0].transpose(0, 1))
        return rows.unflatten(0, (count, longest)).transpose(1, 2)

    if slopes.shape[-1] > 1:
        slopes = in_rows(slopes[..., None])[..., 0]
    real = torch.arange(longest, device=places.device) < texts.lengths[:, None]
    states = (in_rows(query), in_rows(key), in_rows(value))
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
    mask: Any,
) -> torch.Tensor:
    """All texts at once by torch's ``flex_attention``; ``mask`` is from ``text_mask``."""
    if slopes.shape[-1] == 1:  # one for each token, as the others
        slopes = slopes[..., 0].T
        if len(texts.spans) > 1 and slopes.shape[-1] > 1:
            slopes = slopes[:, texts.numbers]
        else:
            slopes = slopes.expand(-1, query.shape[2])
    else:
        slopes = slopes[0]

    def penalised(
        score: torch.Tensor, _: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return score - slopes[head, query] * (query - key).abs()

    training = torch.is_grad_enabled() and query.requires_grad
    return compile_friendly_flex_attention(
        query, key, value, training=training, score_mod=penalised, block_mask=mask, scale=scale
    )


def text_mask(texts: Texts) -> Any:
    """The mask of ``flex_attention``: tokens see those of their own text."""
    numbers = texts.numbers

    def sees(_: torch.Tensor, __: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return numbers[query] == numbers[key]

    count = len(numbers)
    return create_block_mask(sees, None, None, count, count, device=str(numbers.device))
