# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""JinaBERT (Jina Embeddings v2) with scaled ALiBi slopes; supports both layouts.

configuration_ntk_jina_bert.py, ntk_config.py  the keys of config.json
modeling_ntk_jina_bert.py                      this file: the layers, which only this family has
ntk_alibi.py                                   the slopes, and their scaling
ntk_encoder.py                                 the forward pass, and `encode` for embeddings
ntk_heads.py, ntk_encoder_heads.py             the heads on top of it
ntk_symmetric.py                               attention with the slopes, in one of these ways:
ntk_symmetric_sdpa.py, ntk_tiles.py            rows of one text each, and a faster way on CPUs
ntk_texts.py                                   texts one after another, without padding

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
from transformers.activations import ACT2FN

from .configuration_ntk_jina_bert import NtkJinaBertConfig
from .ntk_alibi import Alibi, stock_slopes
from .ntk_config import NtkConfig  # noqa: F401 -- transformers 4.57 copies only what this file imports
from .ntk_encoder import (
    AlibiEncoder,
    EncoderAttention,
    EncoderOutput,
    GatedMLP,
    SentenceEncoding,
    by_slices,
    layer_norm,
)
from .ntk_encoder_heads import BertMaskedLMHead, EncoderHead, FirstTokenHead, Predictions
from .ntk_heads import QuestionAnsweringHead, Support, TokenClassificationHead
from .ntk_symmetric import SymmetricAttention, SymmetricPlan
from .ntk_symmetric_sdpa import sdpa_attention  # noqa: F401 -- see above
from .ntk_texts import Texts  # noqa: F401 -- see above
from .ntk_tiles import Tile  # noqa: F401 -- see above

GATES = {"geglu": "gelu", "reglu": "relu"}


class NtkJinaBertSelfAttention(SymmetricAttention):
    def __init__(self, config: NtkJinaBertConfig):
        super().__init__(config.num_attention_heads, config.attention_probs_dropout_prob)
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        if config.qk_post_norm:
            # Over the whole width, before the split into heads.
            self.layer_norm_q = layer_norm(config)
            self.layer_norm_k = layer_norm(config)

    def forward(
        self, hidden_states: torch.Tensor, plan: SymmetricPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)
        if hasattr(self, "layer_norm_q"):
            query, key = self.layer_norm_q(query), self.layer_norm_k(key)
        return self.attend(self.split_heads(query), self.split_heads(key), self.split_heads(value), plan)


class NtkJinaBertIntermediate(nn.Module):
    def __init__(self, config: NtkJinaBertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.act(self.dense(hidden_states))


class NtkJinaBertLayer(nn.Module):
    def __init__(self, config: NtkJinaBertConfig):
        super().__init__()
        self.attention = EncoderAttention(config, NtkJinaBertSelfAttention(config))
        if config.feed_forward_type in GATES:
            self.mlp = GatedMLP(config, GATES[config.feed_forward_type])
        else:
            self.intermediate = NtkJinaBertIntermediate(config)
            self.output = EncoderOutput(config, config.intermediate_size)

    def forward(
        self, hidden_states: torch.Tensor, plan: SymmetricPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden_states, weights = self.attention(hidden_states, plan)
        if hasattr(self, "mlp"):
            return self.mlp(hidden_states), weights
        return self.output(self.intermediate(hidden_states), hidden_states), weights


class NtkJinaBertQkMLP(nn.Module):
    """The feed-forward layer of the layout with normalised queries and keys; its gate is the second half."""

    def __init__(self, config: NtkJinaBertConfig):
        super().__init__()
        gate = GATES.get(config.feed_forward_type)
        if gate is None:
            self.up_layer = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        else:
            self.up_gated_layer = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.act = ACT2FN[gate or config.hidden_act]
        self.down_layer = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return by_slices(self.transform, hidden_states)

    def transform(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "up_layer"):
            inner = self.act(self.up_layer(hidden_states))
        else:
            up, gate = self.up_gated_layer(hidden_states).chunk(2, dim=-1)
            inner = up * self.act(gate)
        return self.down_layer(self.dropout(inner))


class NtkJinaBertQkLayer(nn.Module):
    def __init__(self, config: NtkJinaBertConfig):
        super().__init__()
        self.attention = EncoderAttention(config, NtkJinaBertSelfAttention(config))
        self.layer_norm_1 = layer_norm(config)
        self.layer_norm_2 = layer_norm(config)
        self.mlp = NtkJinaBertQkMLP(config)

    def forward(
        self, hidden_states: torch.Tensor, plan: SymmetricPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # The attention's output already includes the residual; the original code adds it twice, too.
        output, weights = self.attention(hidden_states, plan)
        hidden_states = self.layer_norm_1(hidden_states + output)
        return self.layer_norm_2(hidden_states + self.mlp(hidden_states)), weights


class NtkJinaBertPreTrainedModel(Support, PreTrainedModel):
    config_class = NtkJinaBertConfig
    base_model_prefix = "bert"
    _no_split_modules = ["NtkJinaBertLayer", "NtkJinaBertQkLayer"]
    # Tensors of other heads, and a second name for cls.predictions.bias.
    _keys_to_ignore_on_load_unexpected = [r"pooler\.", r"^cls\."]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Predictions):
            nn.init.zeros_(module.bias)


class NtkJinaBertModel(SentenceEncoding, AlibiEncoder, NtkJinaBertPreTrainedModel):
    def __init__(self, config: NtkJinaBertConfig, add_pooling_layer: bool | None = None):
        self.layer_class = NtkJinaBertQkLayer if config.qk_post_norm else NtkJinaBertLayer
        super().__init__(config, add_pooling_layer)
        self.alibi = Alibi(
            stock_slopes(config.num_attention_heads), config.alibi_scaling, config.num_hidden_layers
        )


class NtkJinaBertForMaskedLM(BertMaskedLMHead, NtkJinaBertPreTrainedModel):
    backbone_class = NtkJinaBertModel
    _tied_weights_keys = {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"}


class NtkJinaBertForSequenceClassification(FirstTokenHead, NtkJinaBertPreTrainedModel):
    backbone_class = NtkJinaBertModel


class NtkJinaBertForTokenClassification(TokenClassificationHead, EncoderHead, NtkJinaBertPreTrainedModel):
    backbone_class = NtkJinaBertModel


class NtkJinaBertForQuestionAnswering(QuestionAnsweringHead, EncoderHead, NtkJinaBertPreTrainedModel):
    backbone_class = NtkJinaBertModel
