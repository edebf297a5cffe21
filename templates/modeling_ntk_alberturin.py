# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""AlBERTurin with scaled ALiBi slopes.

configuration_ntk_alberturin.py, ntk_config.py  the keys of config.json
modeling_ntk_alberturin.py                      this file: the layers, which only this family has
ntk_alibi.py                                    the slopes, and their scaling
ntk_encoder.py                                  the forward pass, and `encode` for embeddings
ntk_heads.py, ntk_encoder_heads.py              the heads on top of it
ntk_symmetric.py                                attention with the slopes, in one of these ways:
ntk_symmetric_sdpa.py, ntk_tiles.py             rows of one text each, and a faster way on CPUs
ntk_texts.py                                    texts one after another, without padding

ntk-convert wrote these files. They are the same for every model of this family, and under the Apache License
2.0. The weights, the tokenizer and their licence are those of the model that "ntk_convert" in config.json
names. ntk_convert.json lists the size and SHA-256 of the files that were written, but not of itself and
README.md. No code reads it.

The code imports torch, transformers, NumPy and Python's standard library. It opens no file and no connection,
starts no process and runs no text as code: transformers itself reads config.json and the weights, and for
`encode` the tokenizer of this repository.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from .configuration_ntk_alberturin import NtkAlberturinConfig
from .ntk_alibi import Alibi, stock_slopes
from .ntk_config import NtkConfig  # noqa: F401 -- transformers 4.57 copies only what this file imports
from .ntk_encoder import AlibiEncoder, by_slices
from .ntk_encoder_heads import EncoderHead, FirstTokenHead, MaskedLMHead
from .ntk_heads import QuestionAnsweringHead, Support, TokenClassificationHead
from .ntk_symmetric import SymmetricAttention, SymmetricPlan
from .ntk_symmetric_sdpa import sdpa_attention  # noqa: F401 -- see above
from .ntk_texts import Texts  # noqa: F401 -- see above
from .ntk_tiles import Tile  # noqa: F401 -- see above


def norm(config: NtkAlberturinConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class NtkAlberturinAttention(SymmetricAttention):
    def __init__(self, config: NtkAlberturinConfig):
        super().__init__(config.num_attention_heads, 0.0)
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, hidden_states: torch.Tensor, plan: SymmetricPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        parts = self.qkv_proj(hidden_states).chunk(3, dim=-1)
        output, weights = self.attend(*map(self.split_heads, parts), plan)
        return self.o_proj(output), weights


class NtkAlberturinMLP(nn.Module):
    def __init__(self, config: NtkAlberturinConfig):
        super().__init__()
        width = int(config.hidden_size * config.ffn_factor)
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return by_slices(self.transform, hidden_states)

    def transform(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class NtkAlberturinLayer(nn.Module):
    def __init__(self, config: NtkAlberturinConfig):
        super().__init__()
        self.attn_norm = norm(config)
        self.attn = NtkAlberturinAttention(config)
        self.mlp_norm = norm(config)
        self.mlp = NtkAlberturinMLP(config)

    def forward(
        self, hidden_states: torch.Tensor, plan: SymmetricPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, weights = self.attn(self.attn_norm(hidden_states), plan)
        hidden_states = hidden_states + output
        return hidden_states + self.mlp(self.mlp_norm(hidden_states)), weights


class NtkAlberturinBlocks(nn.Module):
    """The layers and the norm after them, under the original's name."""

    def __init__(self, config: NtkAlberturinConfig):
        super().__init__()
        self.layers = nn.ModuleList([NtkAlberturinLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = norm(config)


class NtkAlberturinPreTrainedModel(Support, PreTrainedModel):
    config_class = NtkAlberturinConfig
    base_model_prefix = "encoder"
    _no_split_modules = ["NtkAlberturinLayer"]
    # Of another head, and the slopes of the training, which are computed anew.
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"\.attn_kernel\.alibi_slopes$"]


class NtkAlberturinModel(AlibiEncoder, NtkAlberturinPreTrainedModel):
    """Token types, which a tokenizer may give, are ignored: the model has none."""

    def __init__(self, config: NtkAlberturinConfig, add_pooling_layer: bool | None = None):
        super().__init__(config, add_pooling_layer)
        self.alibi = Alibi(
            stock_slopes(config.num_attention_heads), config.alibi_scaling, config.num_hidden_layers
        )

    def add_modules(self, config: NtkAlberturinConfig) -> None:
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.blocks = NtkAlberturinBlocks(config)

    @property
    def encoder_layers(self) -> nn.ModuleList:
        return self.blocks.layers

    def prepare_embeddings(
        self,
        inputs_embeds: torch.Tensor,
        token_type_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        return inputs_embeds

    def final_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.blocks.norm(hidden_states)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value


class NtkAlberturinForMaskedLM(MaskedLMHead, NtkAlberturinPreTrainedModel):
    backbone_class = NtkAlberturinModel
    _tied_weights_keys = {"lm_head.weight": "encoder.embed_tokens.weight"}


class NtkAlberturinForSequenceClassification(FirstTokenHead, NtkAlberturinPreTrainedModel):
    backbone_class = NtkAlberturinModel
    pools = False


class NtkAlberturinForTokenClassification(TokenClassificationHead, EncoderHead, NtkAlberturinPreTrainedModel):
    backbone_class = NtkAlberturinModel


class NtkAlberturinForQuestionAnswering(QuestionAnsweringHead, EncoderHead, NtkAlberturinPreTrainedModel):
    backbone_class = NtkAlberturinModel
