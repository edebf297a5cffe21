"""Attention in half precision at long range, against float64: only the format's own rounding is left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from templates.ntk_alibi import Alibi, fold, key_channels, stock_slopes
from templates.ntk_attention import AlibiAttention
from templates.ntk_config import FOLDED_CHANNELS
from templates.ntk_plan import plan_attention

HEADS, HEAD_DIM, ROWS = 16, 64, 32
SDPA, EAGER = (
    SimpleNamespace(_attn_implementation=name, head_dim=HEAD_DIM + FOLDED_CHANNELS)
    for name in ("sdpa", "eager")
)
LIMITS = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-3}


def exact(query, key, value, slopes):
    """float64 attention of the last queries over all keys, the bias relative to each query."""
    keys, queries = key.shape[2], query.shape[2]
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None, :]
    scores = query.double() @ key.double().transpose(-1, -2) * HEAD_DIM**-0.5
    scores = scores - torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance
    scores = scores.masked_fill(distance < 0, -torch.inf)
    return (scores.softmax(-1) @ value.double()).transpose(1, 2).flatten(2)


def error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


@torch.no_grad()
@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize("dtype", LIMITS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("length", [2048, pytest.param(32768, marks=pytest.mark.slow)])
def test_attention_output(length: int, dtype: torch.dtype, factor: float) -> None:
    """Chunks (with a mask) and single tokens, in the fused kernel and in plain attention.

    Chunks of the last queries, because float64 over all of 32768 queries would take an hour; the
    channels they use are those of the whole prefill.
    """
    generator = torch.Generator().manual_seed(length)
    shape = (1, HEADS, length, HEAD_DIM)
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    alibi = Alibi(stock_slopes(HEADS), {"type": "ntk", "factor": factor})
    hidden = torch.zeros(1, 1, 1, dtype=dtype)
    folded = fold(key, key_channels(torch.arange(length)[None], None))
    padded = torch.nn.functional.pad(value, (0, folded.shape[-1] - HEAD_DIM))

    for queries in (ROWS, 1):
        last = [states[:, :, -queries:] for states in (query, key, value)]
        expected = exact(last[0], key, value, alibi.slopes[0])
        for config in (SDPA, EAGER):
            cache = DynamicCache()
            cache.update(folded[:, :, :-queries], padded[:, :, :-queries], 0)
            plan = plan_attention(
                config, alibi, HEAD_DIM**-0.5, hidden.expand(1, queries, 1), past_key_values=cache
            )
            assert (plan.mask is None) == (queries == 1)
            output, _ = AlibiAttention(config, HEADS, HEAD_DIM**-0.5, 0.0, 0).attend(*last, plan, cache)
            assert error(output, expected) <= LIMITS[dtype]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_whole_prefill(dtype: torch.dtype) -> None:
    """The fused kernel with its own causal mask, over a padded row too."""
    length, pad = 2048, 300
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, HEADS, length, HEAD_DIM, generator=generator).to(dtype) for _ in range(3)
    )
    alibi = Alibi(stock_slopes(HEADS), {"type": "ntk", "factor": 2.0})
    attention = AlibiAttention(SDPA, HEADS, HEAD_DIM**-0.5, 0.0, 0)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :pad] = 0
    hidden = torch.zeros(2, length, 1, dtype=dtype)
    plan = plan_attention(SDPA, alibi, HEAD_DIM**-0.5, hidden, mask)
    assert plan.mask is None
    output, _ = attention.attend(query, key, value, plan)
    for row, start in ((0, 0), (1, pad)):
        states = [part[row : row + 1, :, start:] for part in (query, key, value)]
        assert error(output[row : row + 1, start:], exact(*states, alibi.slopes[0])) <= LIMITS[dtype]
