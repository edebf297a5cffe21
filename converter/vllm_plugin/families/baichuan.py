"""Baichuan-13B and Baichuan2-13B."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from converter.vllm_plugin.attention import Channels, SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled
from converter.vllm_plugin.templates.modeling_ntk_baichuan import NtkBaichuanRMSNorm
from converter.vllm_plugin.templates.ntk_alibi import Alibi, stock_slopes


class BaichuanMLP(nn.Module):
    def __init__(self, setup: Setup, prefix: str):
        super().__init__()
        width, inner = setup.config.hidden_size, setup.config.intermediate_size
        rest = {"bias": False, "quant_config": setup.quant_config}
        self.gate_proj = ColumnParallelLinear(width, inner, prefix=f"{prefix}.gate_proj", **rest)
        self.up_proj = ColumnParallelLinear(width, inner, prefix=f"{prefix}.up_proj", **rest)
        self.down_proj = RowParallelLinear(inner, width, prefix=f"{prefix}.down_proj", **rest)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, _ = self.gate_proj(hidden_states)
        inner, _ = self.up_proj(hidden_states)
        output, _ = self.down_proj(F.silu(gate) * inner)
        return output


class BaichuanLayer(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        self.input_layernorm = NtkBaichuanRMSNorm(setup.config)
        self.self_attn = SelfAttention(setup, layer, f"{prefix}.self_attn", "W_pack", "o_proj", bias=False)
        self.post_attention_layernorm = NtkBaichuanRMSNorm(setup.config)
        self.mlp = BaichuanMLP(setup, f"{prefix}.mlp")

    def forward(self, hidden_states: torch.Tensor, channels: Channels | None) -> torch.Tensor:
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

    @staticmethod
    def softmax_scale(config: Any) -> float:
        return float((config.hidden_size // config.num_attention_heads) ** -0.5)


class NtkBaichuanForCausalLM(CausalLM):
    trunk_class = BaichuanModel

    def stored(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if name == "lm_head.weight" and self.config.norm_head:
            # Baichuan2 computes logits with the head's rows at unit length.
            tensor = F.normalize(tensor.float()).to(tensor.dtype)
        yield name, tensor
