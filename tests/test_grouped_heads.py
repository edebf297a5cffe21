"""Key and value heads that several query heads share are not copied where the kernel takes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from templates import ntk_attention
from templates.ntk_alibi import CHANNELS, Alibi, fold, key_channels, stock_slopes
from templates.ntk_attention import AlibiAttention
from templates.ntk_plan import plan_attention

HEADS, SIZE, SCALE = 12, 16, 0.25
SDPA = SimpleNamespace(_attn_implementation="sdpa", head_dim=SIZE + CHANNELS)
# New tokens and cached ones: the kernel's causal mask, a mask, and none.
STEPS = {"prefill": (40, 0), "chunk": (24, 40), "decode": (1, 40)}


def states(groups: int, new: int, cached: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(HEADS, new), (groups, new), (groups, new), (groups, cached), (groups, cached)]
    return [torch.randn(2, heads, size, SIZE, generator=generator).to(dtype) for heads, size in sizes]


def attend(parts: list[torch.Tensor]) -> torch.Tensor:
    query, key, value, old_key, old_value = parts
    cache = DynamicCache()
    if old_key.shape[2]:
        positions = torch.arange(old_key.shape[2])[None]
        cache.update(fold(old_key, key_channels(positions, None)), F.pad(old_value, (0, CHANNELS)), 0)
    hidden = torch.zeros(2, query.shape[2], 1, dtype=query.dtype)
    plan = plan_attention(SDPA, Alibi(stock_slopes(HEADS)), SCALE, hidden, past_key_values=cache)
    return AlibiAttention(SDPA, HEADS, SCALE, 0.0, 0).attend(query, key, value, plan, cache)[0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The key heads that the kernel was given, and whether it was told that they are shared."""
    found: list[tuple[int, bool]] = []
    sdpa = F.scaled_dot_product_attention

    def spy(query: Any, key: Any, value: Any, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
        found.append((key.shape[1], enable_gqa))
        return sdpa(query, key, value, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return found


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 4, HEADS])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_heads_give_what_copies_give(
    step: str, groups: int, dtype: torch.dtype, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = states(groups, *STEPS[step], dtype)
    shared = attend(parts)
    takes = ntk_attention.CPU_KERNEL_TAKES_GROUPS
    monkeypatch.setattr(ntk_attention, "CPU_KERNEL_TAKES_GROUPS", False)
    copied = attend(parts)
    if groups < HEADS:
        # transformers gives copies to a kernel with a mask.
        grouped = takes and step != "chunk"
        assert calls[0] == (groups if grouped else HEADS, grouped)
        assert calls[1][0] == HEADS
    torch.testing.assert_close(shared, copied, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("step", STEPS)
def test_it_is_a_fused_kernel_that_takes_them(step: str) -> None:
    """torch's fallback would write out the attention weights, and be slower than copying the heads."""
    parts = states(4, *STEPS[step])
    with profile(activities=[ProfilerActivity.CPU]) as record:
        attend(parts)
    names = {event.key for event in record.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert "aten::_scaled_dot_product_attention_math" not in names


def test_training_copies_them(calls: list[Any]) -> None:
    """The CPU kernel sums a group's gradients in half precision; over copies they are as exact as ever."""
    parts = states(1, 64, 0, torch.bfloat16)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        query, key, value = (part.to(dtype, copy=True).requires_grad_() for part in parts[:3])
        attend(
            [query, key, value, *(part.to(dtype) for part in parts[3:])]
        ).double().square().sum().backward()
        found.append([part.grad.double() for part in (query, key, value)])
    assert calls[0][0] == HEADS
    for half, exact in zip(*found, strict=True):
        assert (half - exact).norm() / exact.norm() < 0.01
