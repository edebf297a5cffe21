"""MosaicGPT."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from converter.vllm_plugin.attention import SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled, named_scale
from converter.vllm_plugin.heads import without_logits
from converter.vllm_plugin.layer import MLP, Layer
from converter.vllm_plugin.templates.modeling_ntk_mosaic_gpt import layer_norm


class MosaicGptLayer(Layer):
    names = ("ln_1", "attn", "ln_2", "mlp")
    make_norm = staticmethod(layer_norm)

    def make_attention(self, setup: Setup, layer: int, prefix: str) -> SelfAttention:
        config = setup.config
        return SelfAttention(
            setup,
            layer,
            prefix,
            "Wqkv",
            "out_proj",
            bias=not config.no_bias,
            norms=(layer_norm(config), layer_norm(config)) if config.attn_qk_ln else None,
            clip=config.attn_clip_qkv,
        )

    def make_mlp(self, setup: Setup, prefix: str) -> MLP:
        width, bias = setup.config.mlp_ratio * setup.config.d_model, not setup.config.no_bias
        return MLP(setup, prefix, "mlp_up", "mlp_down", width, F.gelu, bias=bias)


@compiled
class MosaicGptModel(Decoder):
    family = "mosaic_gpt"
    layer_class = MosaicGptLayer


class NtkMosaicGptForCausalLM(CausalLM):
    backbone_class = MosaicGptModel
    packed_modules_mapping = {"Wqkv": ["Wqkv"]}

    @staticmethod
    def logit_scale(config: Any) -> float:
        return named_scale(config.logit_scale, config.d_model)


NtkMosaicGptModel, NtkMosaicGptForSequenceClassification, NtkMosaicGptForTokenClassification = without_logits(
    NtkMosaicGptForCausalLM
)
