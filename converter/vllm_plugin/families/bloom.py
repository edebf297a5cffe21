"""BLOOM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from converter.vllm_plugin.attention import Channels, SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled, queries_first
from converter.vllm_plugin.mlp import MLP, gelu
from converter.vllm_plugin.templates.ntk_alibi import Alibi, stock_slopes


def layer_norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


class BloomLayer(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        self.input_layernorm = layer_norm(setup.config)
        self.self_attention = SelfAttention(
            setup,
            layer,
            f"{prefix}.self_attention",
            "query_key_value",
            "dense",
            bias=True,
            by_head=setup.as_stored,
        )
        self.post_attention_layernorm = layer_norm(setup.config)
        self.mlp = MLP(
            setup,
            f"{prefix}.mlp",
            "dense_h_to_4h",
            "dense_4h_to_h",
            4 * setup.config.hidden_size,
            gelu,
            bias=True,
        )
        self.residual_after_norm = setup.config.apply_residual_connection_post_layernorm

    def forward(self, hidden_states: torch.Tensor, channels: Channels) -> torch.Tensor:
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

    def prepare_embeddings(self, embeddings: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings_layernorm(embeddings)


class NtkBloomForCausalLM(CausalLM):
    trunk_class = BloomModel

    def stored(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if "query_key_value" in name and not self.trunk.setup.as_stored:
            tensor = queries_first(tensor, self.config.n_head)
        yield name, tensor
