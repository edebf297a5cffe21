"""Falcon-RW, which is Falcon with ALiBi, in its three layouts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.activations import get_activation
from vllm.config import VllmConfig

from converter.vllm_plugin.attention import Channels, SelfAttention, Setup
from converter.vllm_plugin.checks import check_lora
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled, queries_first
from converter.vllm_plugin.mlp import MLP
from converter.vllm_plugin.templates.ntk_alibi import Alibi, stock_slopes


def layer_norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


def softmax_scale(config: Any) -> float:
    return float((config.hidden_size // config.num_attention_heads) ** -0.5)


def is_grouped(config: Any) -> bool:
    """Whether heads share keys. Then, a group's queries, its key and its value are stored together."""
    return bool(config.num_key_value_heads != config.num_attention_heads)


class FalconLayer(nn.Module):
    """Sequential (Falcon-RW), parallel with one norm, or parallel with a norm for each half."""

    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        config = setup.config
        self.parallel = config.parallel_attn or config.new_decoder_architecture
        self.two_norms = config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2)
        if self.two_norms:
            self.ln_attn, self.ln_mlp = layer_norm(config), layer_norm(config)
        else:
            self.input_layernorm = layer_norm(config)
        if not self.parallel:
            self.post_attention_layernorm = layer_norm(config)
        self.self_attention = SelfAttention(
            setup,
            layer,
            f"{prefix}.self_attention",
            "query_key_value",
            "dense",
            bias=config.bias,
            by_head=setup.as_stored and not is_grouped(config),
        )
        self.mlp = MLP(
            setup,
            f"{prefix}.mlp",
            "dense_h_to_4h",
            "dense_4h_to_h",
            config.ffn_hidden_size,
            get_activation(config.activation),
            bias=config.bias,
        )

    def forward(self, hidden_states: torch.Tensor, channels: Channels) -> torch.Tensor:
        normed = self.ln_attn(hidden_states) if self.two_norms else self.input_layernorm(hidden_states)
        attended = hidden_states + self.self_attention(normed, channels)
        if not self.parallel:
            return attended + self.mlp(self.post_attention_layernorm(attended))
        return attended + self.mlp(self.ln_mlp(hidden_states) if self.two_norms else normed)


@compiled
class FalconModel(Decoder):
    family = "falcon"
    layer_class = FalconLayer
    norm_name = "ln_f"
    make_norm = staticmethod(layer_norm)
    softmax_scale = staticmethod(softmax_scale)

    @staticmethod
    def alibi(config: Any) -> Alibi:
        # Falcon divides the bias by sqrt(head size) together with the scores.
        slopes = [slope * softmax_scale(config) for slope in stock_slopes(config.num_attention_heads)]
        return Alibi(slopes, config.alibi_scaling, config.num_hidden_layers)


class NtkFalconForCausalLM(CausalLM):
    trunk_class = FalconModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        check_lora(vllm_config.lora_config, grouped=is_grouped(vllm_config.model_config.hf_config))
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def stored(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if "query_key_value" in name and (is_grouped(self.config) or not self.trunk.setup.as_stored):
            groups = self.config.num_key_value_heads
            tensor = queries_first(tensor, groups, self.config.num_attention_heads // groups)
        yield name, tensor
