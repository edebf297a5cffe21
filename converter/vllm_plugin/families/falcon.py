"""Falcon-RW, which is Falcon with ALiBi."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.activations import get_activation

from converter.vllm_plugin.attention import Channels, SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled, queries_first
from converter.vllm_plugin.mlp import MLP
from converter.vllm_plugin.templates.ntk_alibi import Alibi, stock_slopes


def layer_norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


class FalconLayer(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        config = setup.config
        self.input_layernorm = layer_norm(config)
        self.self_attention = SelfAttention(
            setup,
            layer,
            f"{prefix}.self_attention",
            "query_key_value",
            "dense",
            bias=config.bias,
            by_head=setup.as_stored,
        )
        self.post_attention_layernorm = layer_norm(config)
        self.mlp = MLP(
            setup,
            f"{prefix}.mlp",
            "dense_h_to_4h",
            "dense_4h_to_h",
            config.ffn_hidden_size or 4 * config.hidden_size,
            get_activation(config.activation),
            bias=config.bias,
        )

    def forward(self, hidden_states: torch.Tensor, channels: Channels) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attention(self.input_layernorm(hidden_states), channels)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@compiled
class FalconModel(Decoder):
    family = "falcon"
    layer_class = FalconLayer
    norm_name = "ln_f"
    make_norm = staticmethod(layer_norm)

    @staticmethod
    def alibi(config: Any) -> Alibi:
        # Falcon divides the bias by sqrt(head size) together with the scores.
        slopes = [slope * config.score_scale for slope in stock_slopes(config.num_attention_heads)]
        return Alibi(slopes, config.alibi_scaling, config.num_hidden_layers)


class NtkFalconForCausalLM(CausalLM):
    trunk_class = FalconModel

    def stored(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if "query_key_value" in name and not self.trunk.setup.as_stored:
            tensor = queries_first(tensor, self.config.num_attention_heads)
        yield name, tensor
