# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""MPT with scaled ALiBi slopes.

configuration_ntk_mpt.py, ntk_config.py  the keys of config.json
modeling_ntk_mpt.py                      this file: the layers, which only this family has
ntk_alibi.py                             the slopes, their scaling, and how attention applies them
ntk_concave.py                           the concave penalty, for which config.json may ask instead
ntk_decoder.py, ntk_heads.py             the forward pass, and the heads on top of it
ntk_plan.py, ntk_attention.py            positions and mask of a pass, and attention with them
ntk_modes.py                             packed rows, 4-D masks, continuous batching
ntk_cache.py                             a cache of keys and values that grows in place
tokenization_ntk_sentencepiece.py        a tokenizer; it is there only if the model needs it

ntk-convert wrote these files. They are the same for every model of this family, and under the Apache License
2.0. The weights, the tokenizer and their licence are those of the model that "ntk_convert" in config.json
names. ntk_convert.json lists the size and SHA-256 of the files that were written, but not of itself and
README.md. No code reads it.

The code imports torch, transformers and Python's standard library. It opens no file and no connection, starts
no process and runs no text as code: transformers itself reads config.json and the weights. Only the tokenizer
opens a file: its vocabulary, by the sentencepiece package. It copies it where the tokenizer is saved.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from .configuration_ntk_mpt import NtkMptConfig
from .ntk_alibi import Alibi, stock_slopes
from .ntk_attention import AlibiAttention
from .ntk_cache import Cache
from .ntk_concave import CURVE_CHANNELS  # noqa: F401 -- transformers 4.57 copies only what this file imports
from .ntk_config import NtkConfig  # noqa: F401 -- see above
from .ntk_decoder import AlibiDecoder, CausalLMHead, DecoderSupport, LastTokenHead
from .ntk_heads import QuestionAnsweringHead, TokenClassificationHead
from .ntk_modes import PACKED  # noqa: F401 -- see above
from .ntk_plan import AttentionPlan

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


def layer_norm(config: NtkMptConfig, width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=config.layer_norm_epsilon, bias=not config.no_bias)


def norm(config: NtkMptConfig) -> nn.Module:
    """The norm of the residual stream. An RMSNorm never has a bias, even if ``no_bias`` is false."""
    if config.norm_type.endswith("rmsnorm"):
        return nn.RMSNorm(config.d_model, eps=config.layer_norm_epsilon)
    return layer_norm(config, config.d_model)


class NtkMptAttention(AlibiAttention):
    def __init__(self, config: NtkMptConfig, layer_idx: int):
        options = config.attn_config
        super().__init__(
            config, config.n_heads, config.score_scale, options.get("attn_pdrop") or 0.0, layer_idx
        )
        self.clip_qkv = options.get("clip_qkv")
        kv_width = config.num_key_value_heads * (config.d_model // config.n_heads)
        self.widths = [config.d_model, kv_width, kv_width]
        self.Wqkv = nn.Linear(config.d_model, sum(self.widths), bias=not config.no_bias)
        self.out_proj = nn.Linear(config.d_model, config.d_model, bias=not config.no_bias)
        if options.get("qk_ln"):
            # Over the whole width, before the split into heads, as in llm-foundry.
            self.q_ln = layer_norm(config, config.d_model)
            self.k_ln = layer_norm(config, kv_width)

    def forward(
        self, hidden_states: torch.Tensor, plan: AttentionPlan, past_key_values: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        fused = self.Wqkv(hidden_states)
        if self.clip_qkv:
            fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = fused.split(self.widths, dim=-1)
        if hasattr(self, "q_ln"):
            query, key = self.q_ln(query).to(value.dtype), self.k_ln(key).to(value.dtype)
        size = self.widths[0] // self.num_heads
        query, key, value = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in (query, key, value))
        output, weights = self.attend(query, key, value, plan, past_key_values)
        return self.out_proj(output), weights


class NtkMptMLP(nn.Module):
    def __init__(self, config: NtkMptConfig):
        super().__init__()
        options = config.ffn_config
        width = options.get("ffn_hidden_size") or int(config.expansion_ratio * config.d_model)
        self.activation = ACTIVATIONS[(options.get("ffn_act_fn") or {}).get("name", "gelu")]
        self.up_proj = nn.Linear(config.d_model, width, bias=not config.no_bias)
        self.down_proj = nn.Linear(width, config.d_model, bias=not config.no_bias)
        if options.get("ffn_type") == "mptglu":
            self.gate_proj = nn.Linear(config.d_model, width, bias=not config.no_bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inner = self.up_proj(hidden_states)
        if hasattr(self, "gate_proj"):
            return self.down_proj(self.activation(self.gate_proj(hidden_states)) * inner)
        return self.down_proj(self.activation(inner))


class NtkMptBlock(nn.Module):
    def __init__(self, config: NtkMptConfig, layer_idx: int):
        super().__init__()
        self.norm_1 = norm(config)
        self.attn = NtkMptAttention(config, layer_idx)
        self.norm_2 = norm(config)
        self.ffn = NtkMptMLP(config)
        self.resid_pdrop = config.resid_pdrop

    def forward(
        self, hidden_states: torch.Tensor, plan: AttentionPlan, past_key_values: Cache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, weights = self.attn(self.norm_1(hidden_states), plan, past_key_values)
        hidden_states = hidden_states + F.dropout(output, self.resid_pdrop, self.training)
        output = self.ffn(self.norm_2(hidden_states))
        return hidden_states + F.dropout(output, self.resid_pdrop, self.training), weights


class NtkMptPreTrainedModel(DecoderSupport, PreTrainedModel):
    config_class = NtkMptConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["NtkMptBlock"]


class NtkMptModel(AlibiDecoder, NtkMptPreTrainedModel):
    embeddings_name, layers_name, norm_name = "wte", "blocks", "norm_f"

    def __init__(self, config: NtkMptConfig):
        super().__init__(config)
        bias_max = config.attn_config.get("alibi_bias_max", 8)
        self.alibi = Alibi(
            stock_slopes(config.n_heads, bias_max), config.alibi_scaling, config.num_hidden_layers
        )
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList([NtkMptBlock(config, index) for index in range(config.n_layers)])
        self.norm_f = norm(config)
        self.post_init()

    def prepare_embeddings(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        return F.dropout(inputs_embeds, self.config.emb_pdrop, self.training)


class NtkMptForCausalLM(CausalLMHead, NtkMptPreTrainedModel, GenerationMixin):
    backbone_class = NtkMptModel
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(hidden_states)
        scale = self.config.logit_scale
        if scale is None:
            return logits
        return logits * (self.config.d_model**-0.5 if scale == "inv_sqrt_d_model" else scale)


class NtkMptForSequenceClassification(LastTokenHead, NtkMptPreTrainedModel):
    backbone_class = NtkMptModel


class NtkMptForTokenClassification(TokenClassificationHead, NtkMptPreTrainedModel):
    backbone_class = NtkMptModel


class NtkMptForQuestionAnswering(QuestionAnsweringHead, NtkMptPreTrainedModel):
    backbone_class = NtkMptModel
