"""Refact-1.6B, in both layouts of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from converter.vllm_plugin.attention import Channels, SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled, part
from converter.vllm_plugin.mlp import MLP
from converter.vllm_plugin.templates.modeling_ntk_refact import layer_norm, mlp_width
from converter.vllm_plugin.templates.ntk_alibi import Alibi, stock_slopes


class RefactLayer(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        self.ln_1 = layer_norm(setup.config)
        self.attn = SelfAttention(setup, layer, f"{prefix}.attn", "qkv", "c_proj", bias=False)
        self.ln_2 = layer_norm(setup.config)
        width = mlp_width(setup.config)
        self.mlp = MLP(
            setup, f"{prefix}.mlp", "linear_3", "c_proj", width, F.silu, bias=False, gate="linear_1"
        )

    def forward(self, hidden_states: torch.Tensor, channels: Channels) -> torch.Tensor:
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


class NtkRefactForCausalLM(CausalLM):
    """Refact stores the final norm beside the head; here it is the trunk's, as in every other family."""

    trunk_class = RefactModel
    packed_modules_mapping = {"qkv": ["q", "k", "v"]}

    def stored(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        for packed, parts in PACKED.items():
            if packed in name:
                for unpacked, half in zip(parts, tensor.chunk(2), strict=True):
                    yield from self.stored(name.replace(packed, unpacked), half)
                return
        for shard in ("q", "k", "v"):
            if f".attn.{shard}." in name:
                name, tensor = name.replace(f".attn.{shard}.", ".attn.qkv."), part(tensor, shard)
        yield name, tensor


PACKED = {".attn.kv.": (".attn.k.", ".attn.v."), ".mlp.gate_up_proj.": (".mlp.linear_1.", ".mlp.linear_3.")}
"""Part of the name of a tensor of the current layout -> those of its halves in the first one."""
