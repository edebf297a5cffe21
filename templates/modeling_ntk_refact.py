# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Refact-1.6B with scaled ALiBi slopes.

configuration_ntk_refact.py, ntk_config.py  the keys of config.json
modeling_ntk_refact.py                      this file: the layers, which only this family has
ntk_alibi.py                                the slopes, their scaling, and how attention applies them
ntk_concave.py                              the concave penalty, for which config.json may ask instead
ntk_decoder.py, ntk_heads.py                the forward pass, and the heads on top of it
ntk_plan.py, ntk_attention.py               positions and mask of a pass, and attention with them
ntk_modes.py                                packed rows, 4-D masks, continuous batching
ntk_cache.py                                a cache of keys and values that grows in place

ntk-convert wrote these files. They are the same for every model of this family, and under the Apache License
2.0. The weights, the tokenizer and their licence are those of the model that "ntk_convert" in config.json
names. ntk_convert.json lists the size and SHA-256 of the files that were written, but not of itself and
README.md. No code reads it.

The code imports torch, transformers and Python's standard library. It opens no file and no connection, starts
no process and runs no text as code: transformers itself reads config.json and the weights.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from .configuration_ntk_refact import NtkRefactConfig
from .ntk_alibi import Alibi, stock_slopes
from .ntk_attention import AlibiAttention
from .ntk_cache import Cache
from .ntk_concave import CURVE_CHANNELS  # noqa: F401 -- transformers 4.57 copies only what this file imports
from .ntk_config import NtkConfig  # noqa: F401 -- see above
from .ntk_decoder import AlibiDecoder, CausalLMHead, DecoderSupport, LastTokenHead
from .ntk_heads import QuestionAnsweringHead, TokenClassificationHead
from .ntk_modes import PACKED  # noqa: F401 -- see above
from .ntk_plan import AttentionPlan

# The MLP's width is rounded up to a multiple of this.
MULTIPLE = 256


def layer_norm(config: NtkRefactConfig, bias: bool = False) -> nn.LayerNorm:
    return nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, bias=bias)


def mlp_width(config: NtkRefactConfig) -> int:
    inner = 4 * config.n_embd if config.n_inner is None else config.n_inner
    return (2 * inner // 3 + MULTIPLE - 1) // MULTIPLE * MULTIPLE


class NtkRefactAttention(AlibiAttention):
    """Many query heads that share one key and one value head."""

    def __init__(self, config: NtkRefactConfig, layer_idx: int):
        head_dim = config.n_embd // config.n_head
        super().__init__(config, config.n_head, config.score_scale, 0.0, layer_idx)
        self.q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.packed = config.packed_projections
        if self.packed:
            self.kv = nn.Linear(config.n_embd, 2 * head_dim, bias=False)
        else:
            self.k = nn.Linear(config.n_embd, head_dim, bias=False)
            self.v = nn.Linear(config.n_embd, head_dim, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(
        self, hidden_states: torch.Tensor, plan: AttentionPlan, past_key_values: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query = self.q(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if self.packed:
            key, value = self.kv(hidden_states).chunk(2, dim=-1)
        else:
            key, value = self.k(hidden_states), self.v(hidden_states)
        output, weights = self.attend(query, key[:, None], value[:, None], plan, past_key_values)
        return self.c_proj(output), weights


class NtkRefactMLP(nn.Module):
    def __init__(self, config: NtkRefactConfig):
        super().__init__()
        width = mlp_width(config)
        self.packed = config.packed_projections
        if self.packed:
            self.gate_up_proj = nn.Linear(config.n_embd, 2 * width, bias=False)
        else:
            self.linear_1 = nn.Linear(config.n_embd, width, bias=False)
            self.linear_3 = nn.Linear(config.n_embd, width, bias=False)
        self.c_proj = nn.Linear(width, config.n_embd, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.packed:
            gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        else:
            gate, up = self.linear_1(hidden_states), self.linear_3(hidden_states)
        return self.c_proj(F.silu(gate) * up)


class NtkRefactBlock(nn.Module):
    def __init__(self, config: NtkRefactConfig, layer_idx: int):
        super().__init__()
        self.ln_1 = layer_norm(config)
        self.attn = NtkRefactAttention(config, layer_idx)
        self.ln_2 = layer_norm(config)
        self.mlp = NtkRefactMLP(config)

    def forward(
        self, hidden_states: torch.Tensor, plan: AttentionPlan, past_key_values: Cache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, weights = self.attn(self.ln_1(hidden_states), plan, past_key_values)
        hidden_states = hidden_states + output
        return hidden_states + self.mlp(self.ln_2(hidden_states)), weights


class NtkRefactPreTrainedModel(DecoderSupport, PreTrainedModel):
    config_class = NtkRefactConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["NtkRefactBlock"]


class NtkRefactModel(AlibiDecoder, NtkRefactPreTrainedModel):
    """The backbone without the final norm, which Refact stores beside the head."""

    embeddings_name, layers_name = "wte", "h"

    def __init__(self, config: NtkRefactConfig):
        super().__init__(config)
        self.alibi = Alibi(stock_slopes(config.n_head), config.alibi_scaling, config.num_hidden_layers)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList([NtkRefactBlock(config, index) for index in range(config.n_layer)])
        self.post_init()

    def final_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states  # the heads have the norm


class FinalNorm:
    """Mixin for the heads: the final norm, which the checkpoint stores outside the backbone."""

    def add_head(self, config: NtkRefactConfig) -> None:
        super().add_head(config)
        self.ln_f = layer_norm(config, config.final_norm_bias)

    def run_backbone(self, *inputs: Any, **keywords: Any) -> BaseModelOutputWithPast:
        output = super().run_backbone(*inputs, **keywords)
        output.last_hidden_state = self.ln_f(output.last_hidden_state)
        return output


class NtkRefactForCausalLM(FinalNorm, CausalLMHead, NtkRefactPreTrainedModel, GenerationMixin):
    backbone_class = NtkRefactModel


class NtkRefactForSequenceClassification(FinalNorm, LastTokenHead, NtkRefactPreTrainedModel):
    backbone_class = NtkRefactModel


class NtkRefactForTokenClassification(FinalNorm, TokenClassificationHead, NtkRefactPreTrainedModel):
    backbone_class = NtkRefactModel


class NtkRefactForQuestionAnswering(FinalNorm, QuestionAnsweringHead, NtkRefactPreTrainedModel):
    backbone_class = NtkRefactModel
