# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""BLOOM with scaled ALiBi slopes.

configuration_ntk_bloom.py, ntk_config.py  the keys of config.json
modeling_ntk_bloom.py                      this file: the layers, which only this family has
ntk_alibi.py                               the slopes, their scaling, and how attention applies them
ntk_concave.py                             the concave penalty, for which config.json may ask instead
ntk_decoder.py, ntk_heads.py               the forward pass, and the heads on top of it
ntk_plan.py, ntk_attention.py              positions and mask of a pass, and attention with them
ntk_modes.py                               packed rows, 4-D masks, continuous batching
ntk_cache.py                               a cache of keys and values that grows in place

ntk-convert wrote these files. They are the same for every model of this family, and under the Apache License
2.0. The weights, the tokenizer and their licence are those of the model that "ntk_convert" in config.json
names. ntk_convert.json lists the size and SHA-256 of the files that were written, but not of itself and
README.md. No code reads it.

The code imports torch, transformers and Python's standard library. It opens no file and no connection, starts
no process and runs no text as code: transformers itself reads config.json and the weights.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from .configuration_ntk_bloom import NtkBloomConfig
from .ntk_alibi import Alibi, stock_slopes
from .ntk_attention import AlibiAttention
from .ntk_cache import Cache
from .ntk_concave import CURVE_CHANNELS  # noqa: F401 -- transformers 4.57 copies only what this file imports
from .ntk_config import NtkConfig  # noqa: F401 -- see above
from .ntk_decoder import AlibiDecoder, CausalLMHead, DecoderSupport, LastTokenHead
from .ntk_heads import QuestionAnsweringHead, TokenClassificationHead
from .ntk_modes import PACKED  # noqa: F401 -- see above
from .ntk_plan import AttentionPlan


class NtkBloomAttention(AlibiAttention):
    def __init__(self, config: NtkBloomConfig, layer_idx: int):
        super().__init__(config, config.n_head, config.score_scale, config.attention_dropout, layer_idx)
        self.head_dim = config.hidden_size // config.n_head
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden_states: torch.Tensor, plan: AttentionPlan, past_key_values: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # The fused weight holds query, key and value of the first head, then of the second, and so on.
        fused = self.query_key_value(hidden_states).unflatten(-1, (-1, 3, self.head_dim))
        query, key, value = (part.transpose(1, 2) for part in fused.unbind(-2))
        output, weights = self.attend(query, key, value, plan, past_key_values)
        return self.dense(output), weights


class NtkBloomMLP(nn.Module):
    def __init__(self, config: NtkBloomConfig):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.dense_4h_to_h = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(hidden_states), approximate="tanh"))


class NtkBloomBlock(nn.Module):
    def __init__(self, config: NtkBloomConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.self_attention = NtkBloomAttention(config, layer_idx)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = NtkBloomMLP(config)
        self.residual_after_norm = config.apply_residual_connection_post_layernorm
        self.hidden_dropout = config.hidden_dropout

    def forward(
        self, hidden_states: torch.Tensor, plan: AttentionPlan, past_key_values: Cache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed = self.input_layernorm(hidden_states)
        residual = normed if self.residual_after_norm else hidden_states
        output, weights = self.self_attention(normed, plan, past_key_values)
        hidden_states = residual + F.dropout(output, self.hidden_dropout, self.training)

        normed = self.post_attention_layernorm(hidden_states)
        residual = normed if self.residual_after_norm else hidden_states
        return residual + F.dropout(self.mlp(normed), self.hidden_dropout, self.training), weights


class NtkBloomPreTrainedModel(DecoderSupport, PreTrainedModel):
    config_class = NtkBloomConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["NtkBloomBlock"]


class NtkBloomModel(AlibiDecoder, NtkBloomPreTrainedModel):
    embeddings_name, layers_name, norm_name = "word_embeddings", "h", "ln_f"

    def __init__(self, config: NtkBloomConfig):
        super().__init__(config)
        self.alibi = Alibi(stock_slopes(config.n_head), config.alibi_scaling, config.num_hidden_layers)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.word_embeddings_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.h = nn.ModuleList([NtkBloomBlock(config, index) for index in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_init()

    def prepare_embeddings(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings_layernorm(inputs_embeds)


class NtkBloomForCausalLM(CausalLMHead, NtkBloomPreTrainedModel, GenerationMixin):
    backbone_class = NtkBloomModel
    _tied_weights_keys = {"lm_head.weight": "transformer.word_embeddings.weight"}


class NtkBloomForSequenceClassification(LastTokenHead, NtkBloomPreTrainedModel):
    backbone_class = NtkBloomModel


class NtkBloomForTokenClassification(TokenClassificationHead, NtkBloomPreTrainedModel):
    backbone_class = NtkBloomModel


class NtkBloomForQuestionAnswering(QuestionAnsweringHead, NtkBloomPreTrainedModel):
    backbone_class = NtkBloomModel
