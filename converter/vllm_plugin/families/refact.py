"""Refact-1.6B, in both layouts of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from converter.vllm_plugin.attention import SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled
from converter.vllm_plugin.heads import without_logits
from converter.vllm_plugin.layer import MLP, Layer
from converter.vllm_plugin.model import part
from converter.vllm_plugin.templates.modeling_ntk_refact import layer_norm, mlp_width


class RefactLayer(Layer):
    names = ("ln_1", "attn", "ln_2", "mlp")
    make_norm = staticmethod(layer_norm)

    def make_attention(self, setup: Setup, layer: int, prefix: str) -> SelfAttention:
        return SelfAttention(setup, layer, prefix, "qkv", "c_proj", bias=False)

    def make_mlp(self, setup: Setup, prefix: str) -> MLP:
        width = mlp_width(setup.config)
        return MLP(setup, prefix, "linear_3", "c_proj", width, F.silu, bias=False, gate="linear_1")


@compiled
class RefactModel(Decoder):
    family = "refact"
    layer_class = RefactLayer

    def final_norm(self, config: Any) -> nn.Module:
        if config.architectures == ["NtkRefactModel"]:
            return nn.Identity()  # the heads have the norm
        return layer_norm(config, config.final_norm_bias)


class NtkRefactForCausalLM(CausalLM):
    """Refact stores the final norm beside the head; here it is the backbone's, as in every other family."""

    backbone_class = RefactModel
    packed_modules_mapping = {"qkv": ["q", "k", "v"]}

    def unpack(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if ".ln_f." in name and isinstance(self.backbone.ln_f, nn.Identity):
            return
        for packed, parts in PACKED.items():
            if packed in name:
                for unpacked, half in zip(parts, tensor.chunk(2), strict=True):
                    yield from self.unpack(name.replace(packed, unpacked), half)
                return
        for shard in ("q", "k", "v"):
            if f".attn.{shard}." in name:
                name, tensor = name.replace(f".attn.{shard}.", ".attn.qkv."), part(tensor, shard)
        yield name, tensor


NtkRefactModel, NtkRefactForSequenceClassification, NtkRefactForTokenClassification = without_logits(
    NtkRefactForCausalLM
)


PACKED = {".attn.kv.": (".attn.k.", ".attn.v."), ".mlp.gate_up_proj.": (".mlp.linear_1.", ".mlp.linear_3.")}
"""Part of the name of a tensor of the current layout -> those of its halves in the first one."""
