"""MPT, with its options, and replit-code-v1_5-3b."""

from __future__ import annotations

from typing import Any

from converter.vllm_plugin.attention import SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled, named_scale
from converter.vllm_plugin.heads import without_logits
from converter.vllm_plugin.layer import MLP, Layer
from converter.vllm_plugin.templates.modeling_ntk_mpt import ACTIVATIONS, layer_norm, norm


class MptLayer(Layer):
    names = ("norm_1", "attn", "norm_2", "ffn")
    make_norm = staticmethod(norm)

    def make_attention(self, setup: Setup, layer: int, prefix: str) -> SelfAttention:
        config, options = setup.config, setup.config.attn_config
        widths = config.d_model, config.num_key_value_heads * (config.d_model // config.n_heads)
        first, second = (layer_norm(config, width) for width in widths)
        return SelfAttention(
            setup,
            layer,
            prefix,
            "Wqkv",
            "out_proj",
            bias=not config.no_bias,
            norms=(first, second) if options.get("qk_ln") else None,
            clip=options.get("clip_qkv"),
        )

    def make_mlp(self, setup: Setup, prefix: str) -> MLP:
        config, options = setup.config, setup.config.ffn_config
        return MLP(
            setup,
            prefix,
            "up_proj",
            "down_proj",
            options.get("ffn_hidden_size") or int(config.expansion_ratio * config.d_model),
            ACTIVATIONS[(options.get("ffn_act_fn") or {}).get("name", "gelu")],
            bias=not config.no_bias,
            gate="gate_proj" if options.get("ffn_type") == "mptglu" else None,
        )


@compiled
class MptModel(Decoder):
    family = "mpt"
    layer_class = MptLayer
    norm_name = "norm_f"


class NtkMptForCausalLM(CausalLM):
    backbone_class = MptModel
    packed_modules_mapping = {"Wqkv": ["Wqkv"]}

    @staticmethod
    def logit_scale(config: Any) -> float:
        return named_scale(config.logit_scale, config.d_model)


NtkMptModel, NtkMptForSequenceClassification, NtkMptForTokenClassification = without_logits(NtkMptForCausalLM)
