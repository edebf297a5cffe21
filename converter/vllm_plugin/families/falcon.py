"""Falcon-RW, which is Falcon with ALiBi."""

from __future__ import annotations

from transformers.activations import get_activation

from converter.vllm_plugin.attention import SelfAttention, Setup
from converter.vllm_plugin.decoder import CausalLM, Decoder, compiled
from converter.vllm_plugin.heads import without_logits
from converter.vllm_plugin.layer import MLP, Layer


class FalconLayer(Layer):
    names = ("input_layernorm", "self_attention", "post_attention_layernorm", "mlp")

    def make_attention(self, setup: Setup, layer: int, prefix: str) -> SelfAttention:
        names = "query_key_value", "dense"
        return SelfAttention(setup, layer, prefix, *names, bias=setup.config.bias, by_head=setup.as_stored)

    def make_mlp(self, setup: Setup, prefix: str) -> MLP:
        config = setup.config
        width = config.ffn_hidden_size or 4 * config.hidden_size
        activation = get_activation(config.activation)
        return MLP(setup, prefix, "dense_h_to_4h", "dense_4h_to_h", width, activation, bias=config.bias)


@compiled
class FalconModel(Decoder):
    family = "falcon"
    layer_class = FalconLayer


class NtkFalconForCausalLM(CausalLM):
    backbone_class = FalconModel
    by_head = "query_key_value"


NtkFalconModel, NtkFalconForSequenceClassification, NtkFalconForTokenClassification = without_logits(
    NtkFalconForCausalLM
)
