"""Refact-1.6B, in both layouts of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

from converter.vllm_plugin.attention import Channels, SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled, part
from converter.vllm_plugin.templates.modeling_ntk_refact import layer_norm, mlp_width
from converter.vllm_plugin.templates.ntk_alibi import Alibi, stock_slopes


class RefactMLP(nn.Module):
    def __init__(self, setup: Setup, prefix: str):
        super().__init__()
        width, inner = setup.config.n_embd, mlp_width(setup.config)
        rest = {"bias": False, "quant_config": setup.quant_config}
        self.gate_up_proj = MergedColumnParallelLinear(
            width, [inner, inner], prefix=f"{prefix}.gate_up_proj", **rest
        )
        self.c_proj = RowParallelLinear(inner, width, prefix=f"{prefix}.c_proj", **rest)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        fused, _ = self.gate_up_proj(hidden_states)
        gate, up = fused.chunk(2, dim=-1)
        output, _ = self.c_proj(F.silu(gate) * up)
        return output


class RefactLayer(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        self.ln_1 = layer_norm(setup.config)
        self.attn = SelfAttention(setup, layer, f"{prefix}.attn", "qkv", "c_proj", bias=False)
        self.ln_2 = layer_norm(setup.config)
        self.mlp = RefactMLP(setup, f"{prefix}.mlp")

    def forward(self, hidden_states: torch.Tensor, channels: Channels | None) -> torch.Tensor:
        hidden_states = hidden_states + self.attn(self.ln_1(hidden_states), channels)
        return hidden_states + self.mlp(self.ln_2(hidden_states))


@compiled
class RefactModel(Decoder):
    family = "refact"
    layer_class = RefactLayer
    norm_name = "ln_f"

    @staticmethod
    def make_norm(config: Any) -> nn.Module:
        return layer_norm(config, config.final_norm_bias)

    @staticmethod
    def alibi(config: Any) -> Alibi:
        return Alibi(stock_slopes(config.n_head), config.alibi_scaling, config.num_hidden_layers)

    @staticmethod
    def softmax_scale(config: Any) -> float:
        return float((config.n_embd // config.n_head) ** -0.5)


class NtkRefactForCausalLM(CausalLM):
    """Refact stores the final norm beside the head; here it is the trunk's, as in every other family."""

    trunk_class = RefactModel

    def stored(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if ".attn.kv." in name:
            key, value = tensor.chunk(2)
            yield name.replace(".kv.", ".qkv."), part(key, "k")
            yield name.replace(".kv.", ".qkv."), part(value, "v")
            return
        for stored, fused, shard in PARTS:
            if stored in name:
                name, tensor = name.replace(stored, fused), part(tensor, shard)
        yield name, tensor


PARTS: tuple[tuple[str, str, str | int], ...] = (
    *((f".attn.{shard}.", ".attn.qkv.", shard) for shard in ("q", "k", "v")),
    (".mlp.linear_1.", ".mlp.gate_up_proj.", 0),
    (".mlp.linear_3.", ".mlp.gate_up_proj.", 1),
)
"""Part of a stored name, the same part of vLLM's, and which part of the fused weight it is."""
