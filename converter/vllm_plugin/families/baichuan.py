"""Baichuan-13B and Baichuan2-13B."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from converter.vllm_plugin.attention import SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled
from converter.vllm_plugin.heads import without_logits
from converter.vllm_plugin.layer import MLP, Layer
from converter.vllm_plugin.templates.modeling_ntk_baichuan import NtkBaichuanRMSNorm


class BaichuanLayer(Layer):
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    make_norm = NtkBaichuanRMSNorm

    def make_attention(self, setup: Setup, layer: int, prefix: str) -> SelfAttention:
        return SelfAttention(setup, layer, prefix, "W_pack", "o_proj", bias=False)

    def make_mlp(self, setup: Setup, prefix: str) -> MLP:
        width = setup.config.intermediate_size
        return MLP(setup, prefix, "up_proj", "down_proj", width, F.silu, bias=False, gate="gate_proj")


@compiled
class BaichuanModel(Decoder):
    family = "baichuan"
    layer_class = BaichuanLayer
    norm_name = "norm"


class NtkBaichuanForCausalLM(CausalLM):
    backbone_class = BaichuanModel
    packed_modules_mapping = {"W_pack": ["W_pack"]}

    def unpack(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if name == "lm_head.weight" and self.config.norm_head:
            # Baichuan2 computes logits with the head's rows at unit length.
            tensor = F.normalize(tensor.float()).to(tensor.dtype)
        yield name, tensor


NtkBaichuanModel, NtkBaichuanForSequenceClassification, NtkBaichuanForTokenClassification = without_logits(
    NtkBaichuanForCausalLM
)
