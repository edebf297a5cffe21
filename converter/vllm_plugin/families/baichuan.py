"""Baichuan-13B and Baichuan2-13B."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from converter.vllm_plugin.attention import Channels, SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled
from converter.vllm_plugin.mlp import MLP
from converter.vllm_plugin.templates.modeling_ntk_baichuan import NtkBaichuanRMSNorm
from converter.vllm_plugin.templates.ntk_alibi import Alibi, stock_slopes


class BaichuanLayer(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        self.input_layernorm = NtkBaichuanRMSNorm(setup.config)
        self.self_attn = SelfAttention(setup, layer, f"{prefix}.self_attn", "W_pack", "o_proj", bias=False)
        self.post_attention_layernorm = NtkBaichuanRMSNorm(setup.config)
        self.mlp = MLP(
            setup,
            f"{prefix}.mlp",
            "up_proj",
            "down_proj",
            setup.config.intermediate_size,
            F.silu,
            bias=False,
            gate="gate_proj",
        )

    def forward(self, hidden_states: torch.Tensor, channels: Channels) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), channels)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@compiled
class BaichuanModel(Decoder):
    family = "baichuan"
    layer_class = BaichuanLayer
    norm_name = "norm"
    make_norm = staticmethod(NtkBaichuanRMSNorm)

    @staticmethod
    def alibi(config: Any) -> Alibi:
        return Alibi(stock_slopes(config.num_attention_heads), config.alibi_scaling, config.num_hidden_layers)


class NtkBaichuanForCausalLM(CausalLM):
    trunk_class = BaichuanModel
    packed_modules_mapping = {"W_pack": ["W_pack"]}

    def stored(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if name == "lm_head.weight" and self.config.norm_head:
            # Baichuan2 computes logits with the head's rows at unit length.
            tensor = F.normalize(tensor.float()).to(tensor.dtype)
        yield name, tensor
