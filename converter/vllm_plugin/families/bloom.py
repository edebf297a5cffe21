"""BLOOM."""

from __future__ import annotations

import torch
from torch import nn
from vllm.config import VllmConfig

from converter.vllm_plugin.attention import Channels, SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled
from converter.vllm_plugin.heads import without_logits
from converter.vllm_plugin.layer import MLP, Layer, gelu, layer_norm


class BloomLayer(Layer):
    names = ("input_layernorm", "self_attention", "post_attention_layernorm", "mlp")
    input_layernorm: nn.Module
    self_attention: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module

    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__(setup, layer, prefix)
        self.residual_after_norm = setup.config.apply_residual_connection_post_layernorm

    def make_attention(self, setup: Setup, layer: int, prefix: str) -> SelfAttention:
        names = "query_key_value", "dense"
        return SelfAttention(setup, layer, prefix, *names, bias=True, by_head=setup.as_stored)

    def make_mlp(self, setup: Setup, prefix: str) -> MLP:
        width = 4 * setup.config.hidden_size
        return MLP(setup, prefix, "dense_h_to_4h", "dense_4h_to_h", width, gelu, bias=True)

    def forward(self, hidden_states: torch.Tensor, channels: Channels) -> torch.Tensor:
        if not self.residual_after_norm:
            return super().forward(hidden_states, channels)
        normed = self.input_layernorm(hidden_states)
        normed = self.post_attention_layernorm(normed + self.self_attention(normed, channels))
        return normed + self.mlp(normed)


@compiled
class BloomModel(Decoder):
    family = "bloom"
    layer_class = BloomLayer

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.word_embeddings_layernorm = layer_norm(self.setup.config)

    def prepare_embeddings(self, embeddings: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings_layernorm(embeddings)


class NtkBloomForCausalLM(CausalLM):
    backbone_class = BloomModel
    by_head = "query_key_value"


NtkBloomModel, NtkBloomForSequenceClassification, NtkBloomForTokenClassification = without_logits(
    NtkBloomForCausalLM
)
