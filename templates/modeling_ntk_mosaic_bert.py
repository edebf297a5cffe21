# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""MosaicBERT (and DNABERT-2) with scaled ALiBi slopes.

configuration_ntk_mosaic_bert.py, ntk_config.py  the keys of config.json
modeling_ntk_mosaic_bert.py                      this file: the layers, which only this family has
ntk_alibi.py                                     the slopes, and their scaling
ntk_encoder.py                                   the forward pass, and `encode` for embeddings
ntk_heads.py, ntk_encoder_heads.py               the heads on top of it
ntk_symmetric.py                                 attention with the slopes, in one of these ways:
ntk_symmetric_sdpa.py, ntk_tiles.py              rows of one text each, and a faster way on CPUs
ntk_texts.py                                     texts one after another, without padding

ntk-convert wrote these files. They are the same for every model of this family, and under the Apache License
2.0. The weights, the tokenizer and their licence are those of the model that "ntk_convert" in config.json
names. ntk_convert.json lists the size and SHA-256 of the files that were written, but not of itself and
README.md. No code reads it.

The code imports torch, transformers, NumPy and Python's standard library. It opens no file and no connection,
starts no process and runs no text as code: transformers itself reads config.json and the weights, and for
`encode` the tokenizer of this repository.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from .configuration_ntk_mosaic_bert import NtkMosaicBertConfig
from .ntk_alibi import Alibi, stock_slopes
from .ntk_config import NtkConfig  # noqa: F401 -- transformers 4.57 copies only what this file imports
from .ntk_encoder import AlibiEncoder, EncoderAttention, GatedMLP
from .ntk_encoder_heads import BertMaskedLMHead, EncoderHead, FirstTokenHead
from .ntk_heads import QuestionAnsweringHead, Support, TokenClassificationHead
from .ntk_symmetric import SymmetricAttention, SymmetricPlan
from .ntk_symmetric_sdpa import sdpa_attention  # noqa: F401 -- see above
from .ntk_texts import Texts  # noqa: F401 -- see above
from .ntk_tiles import Tile  # noqa: F401 -- see above


class NtkMosaicBertSelfAttention(SymmetricAttention):
    def __init__(self, config: NtkMosaicBertConfig):
        super().__init__(config.num_attention_heads, config.attention_probs_dropout_prob)
        self.Wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(
        self, hidden_states: torch.Tensor, plan: SymmetricPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = (self.split_heads(part) for part in self.Wqkv(hidden_states).chunk(3, dim=-1))
        return self.attend(query, key, value, plan)


class NtkMosaicBertLayer(nn.Module):
    def __init__(self, config: NtkMosaicBertConfig):
        super().__init__()
        self.attention = EncoderAttention(config, NtkMosaicBertSelfAttention(config))
        self.mlp = GatedMLP(config, "gelu")

    def forward(
        self, hidden_states: torch.Tensor, plan: SymmetricPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden_states, weights = self.attention(hidden_states, plan)
        return self.mlp(hidden_states), weights


class NtkMosaicBertPreTrainedModel(Support, PreTrainedModel):
    config_class = NtkMosaicBertConfig
    base_model_prefix = "bert"
    _no_split_modules = ["NtkMosaicBertLayer"]
    # Tensors of other heads.
    _keys_to_ignore_on_load_unexpected = [r"pooler\.", r"^cls\."]


class NtkMosaicBertModel(AlibiEncoder, NtkMosaicBertPreTrainedModel):
    layer_class = NtkMosaicBertLayer
    zero_padding = True

    def __init__(self, config: NtkMosaicBertConfig, add_pooling_layer: bool | None = None):
        super().__init__(config, add_pooling_layer)
        self.alibi = Alibi(
            stock_slopes(config.num_attention_heads), config.alibi_scaling, config.num_hidden_layers
        )


class NtkMosaicBertForMaskedLM(BertMaskedLMHead, NtkMosaicBertPreTrainedModel):
    backbone_class = NtkMosaicBertModel
    _tied_weights_keys = {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"}
    # Fixed: the original code does not use the config's layer_norm_eps here.
    prediction_epsilon = 1e-12
    decoder_bias = True


class NtkMosaicBertForSequenceClassification(FirstTokenHead, NtkMosaicBertPreTrainedModel):
    backbone_class = NtkMosaicBertModel


class NtkMosaicBertForTokenClassification(TokenClassificationHead, EncoderHead, NtkMosaicBertPreTrainedModel):
    backbone_class = NtkMosaicBertModel


class NtkMosaicBertForQuestionAnswering(QuestionAnsweringHead, EncoderHead, NtkMosaicBertPreTrainedModel):
    backbone_class = NtkMosaicBertModel
