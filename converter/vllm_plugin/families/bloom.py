"""BLOOM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from converter.vllm_plugin.attention import Channels, SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled, queries_first
from converter.vllm_plugin.templates.ntk_alibi import Alibi, stock_slopes


def layer_norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


class BloomMLP(nn.Module):
    def __init__(self, setup: Setup, prefix: str):
        super().__init__()
        width, quant = setup.config.hidden_size, setup.quant_config
        self.dense_h_to_4h = ColumnParallelLinear(
            width, 4 * width, quant_config=quant, prefix=f"{prefix}.dense_h_to_4h"
        )
        self.dense_4h_to_h = RowParallelLinear(
            4 * width, width, quant_config=quant, prefix=f"{prefix}.dense_4h_to_h"
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inner, _ = self.dense_h_to_4h(hidden_states)
        output, _ = self.dense_4h_to_h(F.gelu(inner, approximate="tanh"))
        return output


class BloomLayer(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        self.input_layernorm = layer_norm(setup.config)
        self.self_attention = SelfAttention(
            setup, layer, f"{prefix}.self_attention", "query_key_value", "dense", bias=True
        )
        self.post_attention_layernorm = layer_norm(setup.config)
        self.mlp = BloomMLP(setup, f"{prefix}.mlp")
        self.residual_after_norm = setup.config.apply_residual_connection_post_layernorm

    def forward(self, hidden_states: torch.Tensor, channels: Channels | None) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        residual = normed if self.residual_after_norm else hidden_states
        hidden_states = residual + self.self_attention(normed, channels)
        normed = self.post_attention_layernorm(hidden_states)
        residual = normed if self.residual_after_norm else hidden_states
        return residual + self.mlp(normed)


@compiled
class BloomModel(Decoder):
    family = "bloom"
    layer_class = BloomLayer
    norm_name = "ln_f"
    make_norm = staticmethod(layer_norm)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.word_embeddings_layernorm = layer_norm(self.setup.config)

    @staticmethod
    def alibi(config: Any) -> Alibi:
        return Alibi(stock_slopes(config.n_head), config.alibi_scaling, config.num_hidden_layers)

    @staticmethod
    def softmax_scale(config: Any) -> float:
        return float((config.hidden_size // config.n_head) ** -0.5)

    def prepare_embeddings(self, embeddings: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings_layernorm(embeddings)


class NtkBloomForCausalLM(CausalLM):
    trunk_class = BloomModel

    def stored(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        # The fused weight holds query, key and value of the first head, then of the second, and so on.
        yield name, queries_first(tensor, self.config.n_head, 1) if "query_key_value" in name else tensor
