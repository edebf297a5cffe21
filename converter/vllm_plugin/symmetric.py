"""Bidirectional ALiBi, -slope * |i - j|, for encoders.

No kernel of vLLM computes it on every platform, so attention is the templates' own, text by text. A text is
whole in its batch: vLLM neither cuts nor caches the texts of an encoder. So slopes may depend on a text's
length. On NVIDIA GPUs, FlashAttention 2 takes static slopes, and computes all texts at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, EncoderOnlyAttention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.selector import get_attn_backend

from converter.vllm_plugin.attention import Setup
from converter.vllm_plugin.templates.ntk_symmetric import (
    SymmetricAttention,
    SymmetricPlan,
    plan_symmetric_attention,
)


@dataclass
class Texts:
    """The texts of one forward pass: what vLLM gives the layers."""

    spans: list[slice]
    """The tokens of each."""
    plans: list[list[SymmetricPlan]] = field(default_factory=list)
    """For each text, one plan for all layers or one each; the first layer makes them."""


class TextsBuilder(AttentionMetadataBuilder[Texts]):
    def __init__(self, *arguments: Any):
        super().__init__(*arguments)

    def build(
        self,
        common_prefix_len: int,  # noqa: ARG002 -- vLLM passes both by name
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: ARG002
    ) -> Texts:
        ends = common_attn_metadata.query_start_loc_cpu.tolist()
        return Texts([slice(*ends[n : n + 2]) for n in range(common_attn_metadata.num_reqs)])


class TextByText(AttentionImpl[Texts]):
    """Attention of each text, by the templates' function; ``row`` says which of the plans is this layer's."""

    def __init__(self, num_heads: int, *_: Any, setup: Setup, row: int):
        self.num_heads = num_heads
        self.setup, self.row = setup, row
        self.attention = SymmetricAttention(num_heads, dropout=0.0).eval()

    def forward(
        self,
        layer: nn.Module,  # noqa: ARG002
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,  # noqa: ARG002
        attn_metadata: Texts | None,
        output: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Writes the heads' outputs, [T, H, D], of queries, keys and values of this shape."""
        if attn_metadata is None:  # a trial run, to see how much memory it takes
            return output.zero_()
        if not attn_metadata.plans:
            attn_metadata.plans = [self.plans(query[span]) for span in attn_metadata.spans]
        for span, plans in zip(attn_metadata.spans, attn_metadata.plans, strict=True):
            text = (states[span].transpose(0, 1)[None] for states in (query, key, value))
            attended, _ = self.attention.attend(*text, plans[self.row])
            output[span] = attended[0].unflatten(-1, (self.num_heads, -1))
        return output

    def plans(self, query: torch.Tensor) -> list[SymmetricPlan]:
        """One text's plans, with the slopes of this process's heads."""
        own = self.setup.own_heads

        def sliced(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[:, own]

        # Biases are not kept: those of all texts of a pass might not fit into memory.
        return [
            plan._replace(slopes=sliced(plan.slopes), query_factors=sliced(plan.query_factors), biases=None)
            for plan in plan_symmetric_attention(self.setup.alibi, "sdpa", query[None])
        ]


class TextByTextBackend(AttentionBackend):
    """vLLM chooses among its own backends; this one is given to a layer."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TextByText]:
        return TextByText

    @staticmethod
    def get_builder_cls() -> type[TextsBuilder]:
        return TextsBuilder


class EncoderAttention(nn.Module):
    """Bidirectional attention of every text, of this process's heads."""

    def __init__(self, setup: Setup, layer: int, heads: int, prefix: str):
        super().__init__()
        size = setup.config.hidden_size // setup.config.num_attention_heads
        row = layer if len(setup.alibi.slopes) > 1 else 0
        options = {
            "scale": size**-0.5,
            "num_kv_heads": heads,
            "cache_config": setup.vllm_config.cache_config,
            "quant_config": setup.quant_config,
            "prefix": f"{prefix}.attn",
        }
        self.factors: torch.Tensor | None = None
        if in_one_call(setup, size):
            slopes = setup.alibi.slopes[row][setup.own_heads]
            self.attn = EncoderOnlyAttention(heads, size, alibi_slopes=slopes, **options)
            if setup.alibi.temperatures is not None:
                values = torch.tensor(setup.alibi.temperatures[row][setup.own_heads], dtype=torch.float32)
                self.register_buffer("factors", values.repeat_interleave(size), persistent=False)
        else:
            own = {"attn_backend": TextByTextBackend, "attn_type": AttentionType.ENCODER_ONLY}
            self.attn = Attention(heads, size, **own, **options, setup=setup, row=row)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The heads' outputs, of the shape of query, key and value, [T, H * D]."""
        if self.factors is not None:
            query = (query * self.factors).to(query.dtype)
        output: torch.Tensor = self.attn(query, key, value)
        return output


def in_one_call(setup: Setup, size: int) -> bool:
    """Whether FlashAttention, the one kernel that takes the slopes of an encoder, can be used."""
    dtype = torch.get_default_dtype()
    if setup.alibi.dynamic is not None or not current_platform.is_cuda() or dtype == torch.float32:
        return False
    backend = get_attn_backend(size, dtype, "auto", attn_type=AttentionType.ENCODER_ONLY)
    return bool(backend.get_name() == "FLASH_ATTN")
