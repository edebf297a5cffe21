"""MosaicGPT."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from converter.vllm_plugin.attention import Channels, SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled, named_scale
from converter.vllm_plugin.mlp import MLP
from converter.vllm_plugin.templates.modeling_ntk_mosaic_gpt import layer_norm, plain_slopes
from converter.vllm_plugin.templates.ntk_alibi import Alibi


class MosaicGptLayer(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        config = setup.config
        self.ln_1 = layer_norm(config)
        self.attn = SelfAttention(
            setup,
            layer,
            f"{prefix}.attn",
            "Wqkv",
            "out_proj",
            bias=not config.no_bias,
            norms=(layer_norm(config), layer_norm(config)) if config.attn_qk_ln else None,
            clip=config.attn_clip_qkv,
        )
        self.ln_2 = layer_norm(config)
        self.mlp = MLP(
            setup,
            f"{prefix}.mlp",
            "mlp_up",
            "mlp_down",
            config.mlp_ratio * config.d_model,
            F.gelu,
            bias=not config.no_bias,
        )

    def forward(self, hidden_states: torch.Tensor, channels: Channels) -> torch.Tensor:
        hidden_states = hidden_states + self.attn(self.ln_1(hidden_states), channels)
        return hidden_states + self.mlp(self.ln_2(hidden_states))


@compiled
class MosaicGptModel(Decoder):
    family = "mosaic_gpt"
    layer_class = MosaicGptLayer
    norm_name = "ln_f"
    make_norm = staticmethod(layer_norm)

    @staticmethod
    def alibi(config: Any) -> Alibi:
        return Alibi(plain_slopes(config), config.alibi_scaling, config.num_hidden_layers)


class NtkMosaicGptForCausalLM(CausalLM):
    trunk_class = MosaicGptModel
    packed_modules_mapping = {"Wqkv": ["Wqkv"]}

    @staticmethod
    def logit_scale(config: Any) -> float:
        return named_scale(config.logit_scale, config.d_model)
