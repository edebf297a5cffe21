"""MosaicBERT and DNABERT-2."""

from __future__ import annotations

import torch
from torch import nn

from converter.vllm_plugin.attention import Setup
from converter.vllm_plugin.encoder import AttentionBlock, Encoder, EncoderModel, GatedMLP, compiled
from converter.vllm_plugin.heads import Embedding, FirstTokenClassifier, TokenClassifier


class MosaicBertLayer(nn.Module):
    def __init__(self, setup: Setup, layer: int, prefix: str):
        super().__init__()
        self.attention = AttentionBlock(setup, layer, "Wqkv", f"{prefix}.attention")
        self.mlp = GatedMLP(setup, "gelu", f"{prefix}.mlp")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(hidden_states))


@compiled
class MosaicBertModel(Encoder):
    family = "mosaic_bert"

    def make_layer(self, setup: Setup, layer: int, prefix: str) -> nn.Module:
        return MosaicBertLayer(setup, layer, prefix)


class MosaicBert(EncoderModel):
    backbone_class = MosaicBertModel


class NtkMosaicBertModel(MosaicBert, Embedding):
    pass


class NtkMosaicBertForMaskedLM(NtkMosaicBertModel):
    """It serves embeddings: vLLM has no fill-mask."""


class NtkMosaicBertForSequenceClassification(MosaicBert, FirstTokenClassifier):
    pass


class NtkMosaicBertForTokenClassification(MosaicBert, TokenClassifier):
    pass
