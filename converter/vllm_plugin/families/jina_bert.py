"""JinaBERT, in both layouts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers.activations import get_activation
from vllm.model_executor.layers.linear import RowParallelLinear

from converter.vllm_plugin.attention import Setup
from converter.vllm_plugin.encoder import (
    AttentionBlock,
    Encoder,
    EncoderModel,
    GatedMLP,
    Output,
    compiled,
    gated,
    projection,
)
from converter.vllm_plugin.heads import Embedding, FirstTokenClassifier, TokenClassifier
from converter.vllm_plugin.model import part
from converter.vllm_plugin.templates.modeling_ntk_jina_bert import GATES
from converter.vllm_plugin.templates.ntk_encoder import layer_norm


class Intermediate(nn.Module):
    """The first half of BERT's feed-forward layer."""

    def __init__(self, setup: Setup, prefix: str):
        super().__init__()
        self.dense = projection(setup, f"{prefix}.dense", bias=True)
        self.act = get_activation(setup.config.hidden_act)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inner, _ = self.dense(hidden_states)
        return self.act(inner)


class JinaBertLayer(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        self.attention = AttentionBlock(setup, layer, "qkv", f"{prefix}.attention")
        if gate := GATES.get(setup.config.feed_forward_type):
            self.mlp = GatedMLP(setup, gate, f"{prefix}.mlp")
        else:
            self.intermediate = Intermediate(setup, f"{prefix}.intermediate")
            self.output = Output(setup, setup.config.intermediate_size, f"{prefix}.output")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = self.attention(hidden_states)
        if hasattr(self, "mlp"):
            return self.mlp(hidden_states)
        return self.output(self.intermediate(hidden_states), hidden_states)


class QkMLP(nn.Module):
    """The feed-forward layer of the layout with normalised queries and keys; its gate is the second half."""

    def __init__(self, setup: Setup, prefix: str):
        super().__init__()
        config = setup.config
        gate = GATES.get(config.feed_forward_type)
        if gate is None:
            self.up_layer = projection(setup, f"{prefix}.up_layer", bias=False)
        else:
            self.up_gated_layer = gated(setup, f"{prefix}.up_gated_layer")
        self.act = get_activation(gate or config.hidden_act)
        self.down_layer = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            quant_config=setup.quant_config,
            prefix=f"{prefix}.down_layer",
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "up_layer"):
            inner, _ = self.up_layer(hidden_states)
            inner = self.act(inner)
        else:
            fused, _ = self.up_gated_layer(hidden_states)
            up, gate = fused.chunk(2, dim=-1)
            inner = up * self.act(gate)
        output, _ = self.down_layer(inner)
        return output


class QkLayer(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        self.attention = AttentionBlock(setup, layer, "qkv", f"{prefix}.attention", norms=True)
        self.layer_norm_1, self.layer_norm_2 = layer_norm(setup.config), layer_norm(setup.config)
        self.mlp = QkMLP(setup, f"{prefix}.mlp")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # The attention's output already includes the residual; the original code adds it twice, too.
        hidden_states = self.layer_norm_1(hidden_states + self.attention(hidden_states))
        return self.layer_norm_2(hidden_states + self.mlp(hidden_states))


@compiled
class JinaBertModel(Encoder):
    family = "jina_bert"

    def make_layer(self, setup: Setup, layer: int, prefix: str) -> nn.Module:
        return (QkLayer if setup.config.qk_post_norm else JinaBertLayer)(setup, layer, prefix)


class JinaBert(EncoderModel):
    backbone_class = JinaBertModel

    def unpack(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        for stored, shard in (("query", "q"), ("key", "k"), ("value", "v")):
            if f".self.{stored}." in name:
                name, tensor = name.replace(f".self.{stored}.", ".self.qkv."), part(tensor, shard)
        yield name, tensor


class NtkJinaBertModel(JinaBert, Embedding):
    pass


class NtkJinaBertForMaskedLM(NtkJinaBertModel):
    """Jina's own embedding models name this class and have no such head."""


class NtkJinaBertForSequenceClassification(JinaBert, FirstTokenClassifier):
    pass


class NtkJinaBertForTokenClassification(JinaBert, TokenClassifier):
    pass
