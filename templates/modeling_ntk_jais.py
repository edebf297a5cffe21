# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""JAIS and BTLM with scaled ALiBi slopes.

configuration_ntk_jais.py, ntk_config.py  the keys of config.json
modeling_ntk_jais.py                      this file: the layers, which only this family has
ntk_alibi.py                              the slopes, their scaling, and how attention applies them
ntk_concave.py                            the concave penalty, for which config.json may ask instead
ntk_decoder.py, ntk_heads.py              the forward pass, and the heads on top of it
ntk_plan.py, ntk_attention.py             positions and mask of a pass, and attention with them
ntk_modes.py                              packed rows, 4-D masks, continuous batching
ntk_cache.py                              a cache of keys and values that grows in place

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
from transformers.pytorch_utils import Conv1D

from .configuration_ntk_jais import NtkJaisConfig
from .ntk_alibi import Alibi, stock_slopes
from .ntk_attention import AlibiAttention
from .ntk_cache import Cache
from .ntk_concave import CURVE_CHANNELS  # noqa: F401 -- transformers 4.57 copies only what this file imports
from .ntk_config import NtkConfig  # noqa: F401 -- see above
from .ntk_decoder import AlibiDecoder, CausalLMHead, DecoderSupport, LastTokenHead
from .ntk_heads import QuestionAnsweringHead, TokenClassificationHead
from .ntk_modes import PACKED  # noqa: F401 -- see above
from .ntk_plan import AttentionPlan


class NtkJaisAttention(AlibiAttention):
    def __init__(self, config: NtkJaisConfig, layer_idx: int):
        super().__init__(config, config.n_head, config.score_scale, config.attn_pdrop, layer_idx)
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)

    def forward(
        self, hidden_states: torch.Tensor, plan: AttentionPlan, past_key_values: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.c_attn(hidden_states).chunk(3, dim=-1)
        )
        output, weights = self.attend(query, key, value, plan, past_key_values)
        return self.c_proj(output), weights


class NtkJaisMLP(nn.Module):
    """SwiGLU; ``c_fc2`` is the gate."""

    def __init__(self, config: NtkJaisConfig):
        super().__init__()
        width = 4 * config.n_embd if config.n_inner is None else config.n_inner
        self.c_fc = Conv1D(width, config.n_embd)
        self.c_fc2 = Conv1D(width, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.c_fc(hidden_states) * F.silu(self.c_fc2(hidden_states)))


class NtkJaisBlock(nn.Module):
    def __init__(self, config: NtkJaisConfig, layer_idx: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = NtkJaisAttention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = NtkJaisMLP(config)
        self.resid_pdrop = config.resid_pdrop

    def forward(
        self, hidden_states: torch.Tensor, plan: AttentionPlan, past_key_values: Cache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, weights = self.attn(self.ln_1(hidden_states), plan, past_key_values)
        hidden_states = hidden_states + F.dropout(output, self.resid_pdrop, self.training)
        output = self.mlp(self.ln_2(hidden_states))
        return hidden_states + F.dropout(output, self.resid_pdrop, self.training), weights


class NtkJaisPreTrainedModel(DecoderSupport, PreTrainedModel):
    config_class = NtkJaisConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["NtkJaisBlock"]
    # The slopes (the config has them too) and the causal masks that old checkpoints store as buffers.
    _keys_to_ignore_on_load_unexpected = [r"relative_pe\.slopes$", r"(^|\.)attn\.(bias|masked_bias)$"]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Conv1D):  # transformers' method knows linear layers, but not this one
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            nn.init.zeros_(module.bias)


class NtkJaisModel(AlibiDecoder, NtkJaisPreTrainedModel):
    embeddings_name, layers_name, norm_name = "wte", "h", "ln_f"

    def __init__(self, config: NtkJaisConfig):
        super().__init__(config)
        slopes = stock_slopes(config.n_head) if config.alibi_slopes is None else config.alibi_slopes
        self.alibi = Alibi(slopes, config.alibi_scaling, config.num_hidden_layers)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList([NtkJaisBlock(config, index) for index in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.post_init()

    def prepare_embeddings(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        scaled = inputs_embeds * self.config.mup_embeddings_scale
        return F.dropout(scaled, self.config.embd_pdrop, self.training)


class NtkJaisForCausalLM(CausalLMHead, NtkJaisPreTrainedModel, GenerationMixin):
    backbone_class = NtkJaisModel
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_states) * (self.config.mup_output_alpha * self.config.mup_width_scale)


class NtkJaisForSequenceClassification(LastTokenHead, NtkJaisPreTrainedModel):
    backbone_class = NtkJaisModel


class NtkJaisForTokenClassification(TokenClassificationHead, NtkJaisPreTrainedModel):
    backbone_class = NtkJaisModel


class NtkJaisForQuestionAnswering(QuestionAnsweringHead, NtkJaisPreTrainedModel):
    backbone_class = NtkJaisModel
