# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""MosaicGPT with scaled ALiBi slopes.

configuration_ntk_mosaic_gpt.py, ntk_config.py  the keys of config.json
modeling_ntk_mosaic_gpt.py                      this file: the layers, which only this family has
ntk_alibi.py                                    the slopes, their scaling, and how attention applies them
ntk_concave.py                                  the concave penalty, for which config.json may ask instead
ntk_decoder.py, ntk_heads.py                    the forward pass, and the heads on top of it
ntk_plan.py, ntk_attention.py                   positions and mask of a pass, and attention with them
ntk_modes.py                                    packed rows, 4-D masks, continuous batching
ntk_cache.py                                    a cache of keys and values that grows in place

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

from .configuration_ntk_mosaic_gpt import NtkMosaicGptConfig
from .ntk_alibi import Alibi
from .ntk_attention import AlibiAttention
from .ntk_cache import Cache
from .ntk_concave import CURVE_CHANNELS  # noqa: F401 -- transformers 4.57 copies only what this file imports
from .ntk_config import NtkConfig  # noqa: F401 -- see above
from .ntk_decoder import AlibiDecoder, CausalLMHead, DecoderSupport, LastTokenHead
from .ntk_heads import QuestionAnsweringHead, TokenClassificationHead
from .ntk_modes import PACKED  # noqa: F401 -- see above
from .ntk_plan import AttentionPlan


def plain_slopes(config: NtkMosaicGptConfig) -> list[float]:
    """One geometric series over all heads, even if their number is not a power of two."""
    heads = config.n_heads
    return [2.0 ** (-config.alibi_bias_max * head / heads) for head in range(1, heads + 1)]


def layer_norm(config: NtkMosaicGptConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.d_model, eps=1e-5, bias=not config.no_bias)


class NtkMosaicGptAttention(AlibiAttention):
    def __init__(self, config: NtkMosaicGptConfig, layer_idx: int):
        super().__init__(config, config.n_heads, config.score_scale, config.attn_pdrop, layer_idx)
        self.clip_qkv = config.attn_clip_qkv
        self.Wqkv = nn.Linear(config.d_model, 3 * config.d_model, bias=not config.no_bias)
        self.out_proj = nn.Linear(config.d_model, config.d_model, bias=not config.no_bias)
        if config.attn_qk_ln:
            # Over the whole width, before the split into heads.
            self.q_ln = layer_norm(config)
            self.k_ln = layer_norm(config)

    def forward(
        self, hidden_states: torch.Tensor, plan: AttentionPlan, past_key_values: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        fused = self.Wqkv(hidden_states)
        if self.clip_qkv:
            fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = fused.chunk(3, dim=-1)
        if hasattr(self, "q_ln"):
            query, key = self.q_ln(query).to(value.dtype), self.k_ln(key).to(value.dtype)
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (query, key, value)
        )
        output, weights = self.attend(query, key, value, plan, past_key_values)
        return self.out_proj(output), weights


class NtkMosaicGptMLP(nn.Module):
    def __init__(self, config: NtkMosaicGptConfig):
        super().__init__()
        width = config.mlp_ratio * config.d_model
        self.mlp_up = nn.Linear(config.d_model, width, bias=not config.no_bias)
        self.mlp_down = nn.Linear(width, config.d_model, bias=not config.no_bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.mlp_down(F.gelu(self.mlp_up(hidden_states)))


class NtkMosaicGptBlock(nn.Module):
    def __init__(self, config: NtkMosaicGptConfig, layer_idx: int):
        super().__init__()
        self.ln_1 = layer_norm(config)
        self.attn = NtkMosaicGptAttention(config, layer_idx)
        self.ln_2 = layer_norm(config)
        self.mlp = NtkMosaicGptMLP(config)
        self.resid_pdrop = config.resid_pdrop

    def forward(
        self, hidden_states: torch.Tensor, plan: AttentionPlan, past_key_values: Cache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, weights = self.attn(self.ln_1(hidden_states), plan, past_key_values)
        hidden_states = hidden_states + F.dropout(output, self.resid_pdrop, self.training)
        output = self.mlp(self.ln_2(hidden_states))
        return hidden_states + F.dropout(output, self.resid_pdrop, self.training), weights


class NtkMosaicGptPreTrainedModel(DecoderSupport, PreTrainedModel):
    config_class = NtkMosaicGptConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["NtkMosaicGptBlock"]


class NtkMosaicGptModel(AlibiDecoder, NtkMosaicGptPreTrainedModel):
    embeddings_name, layers_name, norm_name = "wte", "blocks", "ln_f"

    def __init__(self, config: NtkMosaicGptConfig):
        super().__init__(config)
        self.alibi = Alibi(plain_slopes(config), config.alibi_scaling, config.num_hidden_layers)
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList([NtkMosaicGptBlock(config, index) for index in range(config.n_layers)])
        self.ln_f = layer_norm(config)
        self.post_init()

    def prepare_embeddings(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        return F.dropout(inputs_embeds, self.config.emb_pdrop, self.training)


class NtkMosaicGptForCausalLM(CausalLMHead, NtkMosaicGptPreTrainedModel, GenerationMixin):
    backbone_class = NtkMosaicGptModel
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(hidden_states)
        scale = self.config.logit_scale
        if scale is None:
            return logits
        return logits * (self.config.d_model**-0.5 if scale == "inv_sqrt_d_model" else scale)


class NtkMosaicGptForSequenceClassification(LastTokenHead, NtkMosaicGptPreTrainedModel):
    backbone_class = NtkMosaicGptModel


class NtkMosaicGptForTokenClassification(TokenClassificationHead, NtkMosaicGptPreTrainedModel):
    backbone_class = NtkMosaicGptModel


class NtkMosaicGptForQuestionAnswering(QuestionAnsweringHead, NtkMosaicGptPreTrainedModel):
    backbone_class = NtkMosaicGptModel
