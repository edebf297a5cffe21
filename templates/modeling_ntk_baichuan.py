# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Baichuan-13B and Baichuan2-13B with scaled ALiBi slopes.

configuration_ntk_baichuan.py, ntk_config.py  the keys of config.json
modeling_ntk_baichuan.py                      this file: the layers, which only this family has
ntk_alibi.py                                  the slopes, their scaling, and how attention applies them
ntk_concave.py                                the concave penalty, for which config.json may ask instead
ntk_decoder.py, ntk_heads.py                  the forward pass, and the heads on top of it
ntk_plan.py, ntk_attention.py                 positions and mask of a pass, and attention with them
ntk_modes.py                                  packed rows, 4-D masks, continuous batching
ntk_cache.py                                  a cache of keys and values that grows in place
tokenization_ntk_sentencepiece.py             a tokenizer; it is there only if the model needs it

ntk-convert wrote these files. They are the same for every model of this family, and under the Apache License
2.0. The weights, the tokenizer and their licence are those of the model that "ntk_convert" in config.json
names. ntk_convert.json lists the size and SHA-256 of the files that were written, but not of itself and
README.md. No code reads it.

The code imports torch, transformers and Python's standard library. It opens no file and no connection, starts
no process and runs no text as code: transformers itself reads config.json and the weights. Only the tokenizer
opens a file: its vocabulary, by the sentencepiece package. It copies it where the tokenizer is saved.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from .configuration_ntk_baichuan import NtkBaichuanConfig
from .ntk_alibi import Alibi, stock_slopes
from .ntk_attention import AlibiAttention
from .ntk_cache import Cache
from .ntk_concave import CURVE_CHANNELS  # noqa: F401 -- transformers 4.57 copies only what this file imports
from .ntk_config import NtkConfig  # noqa: F401 -- see above
from .ntk_decoder import AlibiDecoder, CausalLMHead, DecoderSupport, LastTokenHead
from .ntk_heads import QuestionAnsweringHead, TokenClassificationHead
from .ntk_modes import PACKED  # noqa: F401 -- see above
from .ntk_plan import AttentionPlan


class NtkBaichuanRMSNorm(nn.Module):
    def __init__(self, config: NtkBaichuanConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(self.weight.dtype)


class NtkBaichuanAttention(AlibiAttention):
    def __init__(self, config: NtkBaichuanConfig, layer_idx: int):
        heads, width = config.num_attention_heads, config.hidden_size
        super().__init__(config, heads, config.score_scale, 0.0, layer_idx)
        self.W_pack = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(
        self, hidden_states: torch.Tensor, plan: AttentionPlan, past_key_values: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.W_pack(hidden_states).chunk(3, dim=-1)
        )
        output, weights = self.attend(query, key, value, plan, past_key_values)
        return self.o_proj(output), weights


class NtkBaichuanMLP(nn.Module):
    def __init__(self, config: NtkBaichuanConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class NtkBaichuanLayer(nn.Module):
    def __init__(self, config: NtkBaichuanConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = NtkBaichuanRMSNorm(config)
        self.self_attn = NtkBaichuanAttention(config, layer_idx)
        self.post_attention_layernorm = NtkBaichuanRMSNorm(config)
        self.mlp = NtkBaichuanMLP(config)

    def forward(
        self, hidden_states: torch.Tensor, plan: AttentionPlan, past_key_values: Cache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, weights = self.self_attn(self.input_layernorm(hidden_states), plan, past_key_values)
        hidden_states = hidden_states + output
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), weights


class NtkBaichuanNormHead(nn.Linear):
    """Logits from the weight's rows scaled to unit length; the weight itself stays as it is stored.

    The logits are divided by the rows' lengths, so no normalised copy of the weight is needed. Each forward
    pass computes the lengths again, because training changes them. That adds a twentieth to the bytes that a
    decoding step of Baichuan2-13B reads.

    Do not put an adapter (LoRA) on this layer: it would add to the normalised logits, but merging it would
    change the weight before normalisation.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden_states)
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        lengths = torch.linalg.vector_norm(self.weight, dim=-1, dtype=wide).clamp(min=1e-12)
        return (logits / lengths).to(logits.dtype)


class NtkBaichuanPreTrainedModel(DecoderSupport, PreTrainedModel):
    config_class = NtkBaichuanConfig
    base_model_prefix = "model"
    _no_split_modules = ["NtkBaichuanLayer"]


class NtkBaichuanModel(AlibiDecoder, NtkBaichuanPreTrainedModel):
    embeddings_name, layers_name, norm_name = "embed_tokens", "layers", "norm"

    def __init__(self, config: NtkBaichuanConfig):
        super().__init__(config)
        self.alibi = Alibi(
            stock_slopes(config.num_attention_heads), config.alibi_scaling, config.num_hidden_layers
        )
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        layers = [NtkBaichuanLayer(config, index) for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = NtkBaichuanRMSNorm(config)
        self.post_init()


class NtkBaichuanForCausalLM(CausalLMHead, NtkBaichuanPreTrainedModel, GenerationMixin):
    backbone_class = NtkBaichuanModel

    def add_head(self, config: NtkBaichuanConfig) -> None:
        head_class = NtkBaichuanNormHead if config.norm_head else nn.Linear
        self.lm_head = head_class(config.hidden_size, config.vocab_size, bias=False)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Sets the head; converts the plain linear layer that transformers makes for another vocabulary."""
        if self.config.norm_head and not isinstance(new_embeddings, NtkBaichuanNormHead):
            rows, width = new_embeddings.weight.shape
            head = NtkBaichuanNormHead(width, rows, bias=False, device="meta")
            head.weight = new_embeddings.weight
            head._is_hf_initialized = True  # or transformers might give it random weights again
            new_embeddings = head
        self.lm_head = new_embeddings

    def loss_function(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Cross entropy plus the penalty on each token's largest logit that Baichuan2 was trained with."""
        loss = super().loss_function(logits, labels, **kwargs)
        if self.config.z_loss_weight:
            largest = logits[..., :-1, :].float().amax(dim=-1)
            loss = loss + self.config.z_loss_weight * largest.square().mean()
        return loss


class NtkBaichuanForSequenceClassification(LastTokenHead, NtkBaichuanPreTrainedModel):
    backbone_class = NtkBaichuanModel


class NtkBaichuanForTokenClassification(TokenClassificationHead, NtkBaichuanPreTrainedModel):
    backbone_class = NtkBaichuanModel


class NtkBaichuanForQuestionAnswering(QuestionAnsweringHead, NtkBaichuanPreTrainedModel):
    backbone_class = NtkBaichuanModel
