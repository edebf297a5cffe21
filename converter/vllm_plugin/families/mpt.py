"""MPT, with its options, and replit-code-v1_5-3b."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from converter.vllm_plugin.attention import Channels, SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled, named_scale
from converter.vllm_plugin.mlp import MLP
from converter.vllm_plugin.templates.modeling_ntk_mpt import ACTIVATIONS, layer_norm, norm
from converter.vllm_plugin.templates.ntk_alibi import Alibi, stock_slopes


class MptLayer(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        config, options = setup.config, setup.config.attn_config
        size = config.d_model // config.n_heads
        norms = None
        if options.get("qk_ln"):
            norms = layer_norm(config, config.d_model), layer_norm(config, config.num_key_value_heads * size)
        self.norm_1 = norm(config)
        self.attn = SelfAttention(
            setup,
            layer,
            f"{prefix}.attn",
            "Wqkv",
            "out_proj",
            bias=not config.no_bias,
            norms=norms,
            clip=options.get("clip_qkv"),
        )
        self.norm_2 = norm(config)
        ffn = config.ffn_config
        self.ffn = MLP(
            setup,
            f"{prefix}.ffn",
            "up_proj",
            "down_proj",
            ffn.get("ffn_hidden_size") or int(config.expansion_ratio * config.d_model),
            ACTIVATIONS[(ffn.get("ffn_act_fn") or {}).get("name", "gelu")],
            bias=not config.no_bias,
            gate="gate_proj" if ffn.get("ffn_type") == "mptglu" else None,
        )

    def forward(self, hidden_states: torch.Tensor, channels: Channels) -> torch.Tensor:
        hidden_states = hidden_states + self.attn(self.norm_1(hidden_states), channels)
        return hidden_states + self.ffn(self.norm_2(hidden_states))


@compiled
class MptModel(Decoder):
    family = "mpt"
    layer_class = MptLayer
    norm_name = "norm_f"
    make_norm = staticmethod(norm)

    @staticmethod
    def alibi(config: Any) -> Alibi:
        slopes = stock_slopes(config.n_heads, config.attn_config.get("alibi_bias_max", 8))
        return Alibi(slopes, config.alibi_scaling, config.num_hidden_layers)


class NtkMptForCausalLM(CausalLM):
    trunk_class = MptModel
    packed_modules_mapping = {"Wqkv": ["Wqkv"]}

    @staticmethod
    def logit_scale(config: Any) -> float:
        return named_scale(config.logit_scale, config.d_model)
