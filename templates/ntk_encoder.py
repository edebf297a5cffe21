# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""The forward pass of an ALiBi encoder; its heads are in ntk_encoder_heads.py.

BERT's skeleton: embeddings without positions, layers that normalise after each residual, a pooler.
Families differ in their layers. A family's backbone is its own class. It names these mixins first and keeps
``PreTrainedModel`` among its direct bases.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoTokenizer
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import can_return_tuple

from .ntk_alibi import Alibi
from .ntk_heads import check_keywords
from .ntk_symmetric import SymmetricAttention, SymmetricPlan, plan_symmetric_attention
from .ntk_texts import Texts
from .ntk_tiles import infers_on_cpu

# Tokens that feed-forward layers take at a time.
SLICE = 512


# Values of attn_implementation. transformers takes FlashAttention 2 from the Hub's kernels if the package is
# missing and ``kernels`` is there, and then writes the last name.
ATTENTION = ("sdpa", "eager", "flash_attention_2", "flex_attention", "kernels-community/flash-attn2")


def check_attention(name: str) -> None:
    """Raises ValueError for a function of transformers that could not compute a bias of -slope * |i - j|."""
    if name not in ATTENTION:
        raise ValueError(
            f'Specified `attn_implementation="{name}"` is not supported, because it cannot compute the ALiBi '
            f"bias of an encoder; use one of: {', '.join(ATTENTION[:-1])}"
        )


def layer_norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class EncoderEmbeddings(nn.Module):
    """Word and token type embeddings, normalised; attention adds the positions."""

    def __init__(self, config: Any):
        super().__init__()
        self.word_embeddings = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = layer_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, inputs_embeds: torch.Tensor, token_type_ids: torch.Tensor | None) -> torch.Tensor:
        """The first layer's input [B, L, hidden].

        Args:
            inputs_embeds: word embeddings [B, L, hidden].
            token_type_ids: [B, L]; None means all 0.
        """
        if token_type_ids is None:
            token_type_ids = torch.zeros(
                inputs_embeds.shape[:2], dtype=torch.long, device=inputs_embeds.device
            )
        return self.dropout(self.LayerNorm(inputs_embeds + self.token_type_embeddings(token_type_ids)))


class EncoderOutput(nn.Module):
    """A projection, the residual, and the norm after both."""

    def __init__(self, config: Any, inputs: int):
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden_size)
        self.LayerNorm = layer_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + residual)


class EncoderAttention(nn.Module):
    """A family's attention with its output projection and norm, under BERT's names."""

    def __init__(self, config: Any, attention: SymmetricAttention):
        super().__init__()
        self.self = attention
        self.output = EncoderOutput(config, config.hidden_size)

    def forward(
        self, hidden_states: torch.Tensor, plan: SymmetricPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, weights = self.self(hidden_states, plan)
        return self.output(output, hidden_states), weights


class GatedMLP(nn.Module):
    """wo(act(first half of gated_layers) * second half), the residual, and the norm after both."""

    def __init__(self, config: Any, activation: str):
        super().__init__()
        self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.act = ACT2FN[activation]
        self.wo = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layernorm = layer_norm(config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return by_slices(self.transform, hidden_states)

    def transform(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.gated_layers(hidden_states).chunk(2, dim=-1)
        return self.layernorm(self.wo(self.dropout(self.act(gate) * up)) + hidden_states)


def by_slices(function: Callable[[torch.Tensor], torch.Tensor], hidden_states: torch.Tensor) -> torch.Tensor:
    """``function``, which works on each token alone, of hidden states [B, L, hidden].

    Inference on a CPU goes through a few tokens at a time. The wide tensors in between then stay in the
    processor's cache, and take no memory for all tokens.
    """
    if not infers_on_cpu(hidden_states):
        return function(hidden_states)
    parts = [function(part) for part in hidden_states.flatten(0, 1).split(SLICE)]
    return torch.cat(parts).view_as(hidden_states)


class EncoderLayers(nn.Module):
    """The stack, under BERT's name for it."""

    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__()
        self.layer = nn.ModuleList(layers)


class Pooler(nn.Module):
    """tanh of a projection of each row's first token."""

    def __init__(self, config: Any):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(hidden_states[:, 0]))


class AlibiEncoder:
    """Mixin for a family's backbone; ``layer_class`` is the family's layer.

    The family sets ``alibi`` after calling ``__init__``. A layer is called as ``layer(hidden_states, plan)``
    and returns the hidden states and its attention weights or None. A family with other modules than BERT's
    overrides what stands before ``forward``.
    """

    alibi: Alibi
    layer_class: type
    gradient_checkpointing = False
    zero_padding = False
    """Whether the hidden states of padded tokens are 0 even where padding is not left out."""

    def __init__(self, config: Any, add_pooling_layer: bool | None = None):
        super().__init__(config)
        if add_pooling_layer is None:  # a model without a head
            add_pooling_layer = config.add_pooling_layer is not False
        self.add_modules(config)
        self.pooler = Pooler(config) if add_pooling_layer else None
        self.post_init()

    def add_modules(self, config: Any) -> None:
        """Adds all but the pooler."""
        self.embeddings = EncoderEmbeddings(config)
        self.encoder = EncoderLayers([self.layer_class(config) for _ in range(config.num_hidden_layers)])

    @property
    def encoder_layers(self) -> nn.ModuleList:
        return self.encoder.layer

    def prepare_embeddings(
        self, inputs_embeds: torch.Tensor, token_type_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """The first layer's input [B, L, hidden]; the arguments are those of ``EncoderEmbeddings``."""
        return self.embeddings(inputs_embeds, token_type_ids)

    def final_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The backbone's output from the last layer's output, both [B, L, hidden]."""
        return hidden_states

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Runs the backbone.

        Args:
            input_ids: [B, L] token ids, or None with ``inputs_embeds``.
            attention_mask: [B, L], 1 for real and 0 for padded tokens; None for no padding.
            token_type_ids: [B, L]; all 0 if None.
            inputs_embeds: [B, L, hidden] instead of ``input_ids``.
            position_ids: [B or 1, L]. Where they start again at 0, another text starts.
            kwargs: ``cu_seq_lens_q`` [texts + 1], where texts start, as ``position_ids`` say, too. Others are
                ignored.

        Raises:
            TypeError: a keyword that ``check_keywords`` rejects.
            ValueError: both or neither of ``input_ids`` and ``inputs_embeds``; an attention function that
                cannot compute the bias; a mask or positions that ``plan_symmetric_attention`` rejects.
        """
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        check_keywords(self, kwargs, "cache", "past_key_values")
        check_attention(self.config._attn_implementation)
        attention = self.config._attn_implementation
        if output_attentions:
            attention = "eager"

        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        hidden_states = self.prepare_embeddings(inputs_embeds, token_type_ids)
        plans = plan_symmetric_attention(
            self.alibi,
            attention,
            hidden_states,
            attention_mask,
            position_ids,
            kwargs.get("cu_seq_lens_q"),
            self.training,
        )
        texts, real = plans[0].texts, plans[0].real
        if len(plans) == 1:
            plans = plans * len(self.encoder_layers)
        if texts is not None:
            hidden_states = texts.pack(hidden_states)

        all_hidden_states, all_attentions = [], []  # kept only if they are returned: they are large
        for plan, layer in zip(plans, self.encoder_layers, strict=True):
            if output_hidden_states:
                all_hidden_states.append(in_rows(hidden_states, texts))
            hidden_states, weights = self.layer_function(layer)(hidden_states, plan)
            if output_attentions:
                all_attentions.append(weights)
        hidden_states = in_rows(self.final_norm(hidden_states), texts)
        if self.zero_padding and real is not None:
            hidden_states = hidden_states.masked_fill(~real[..., None].to(hidden_states.device), 0.0)
        if output_hidden_states:
            all_hidden_states.append(hidden_states)

        return BaseModelOutputWithPooling(
            last_hidden_state=hidden_states,
            pooler_output=None if self.pooler is None else self.pooler(hidden_states),
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
            attentions=tuple(all_attentions) if output_attentions else None,
        )

    def layer_function(self, layer: nn.Module) -> Callable[..., Any]:
        """The layer, or with gradient checkpointing a function that computes it anew in the backward pass."""
        if self.gradient_checkpointing and self.training:
            return partial(self._gradient_checkpointing_func, layer)
        return layer


def in_rows(hidden_states: torch.Tensor, texts: Texts | None) -> torch.Tensor:
    """Hidden states [B, L, hidden], of rows or of texts without padding; zeros for the padding left out."""
    if texts is None:
        return hidden_states
    return texts.unpack(hidden_states)


class SentenceEncoding:
    """Mixin for a backbone that embeds texts. A text's embedding is the mean of its tokens' hidden states."""

    file_arguments: Mapping[str, Any] = {}
    """Arguments of ``from_pretrained`` that say where the model's files are, its revision among them."""
    tokenizer: Any = None
    """The repository's tokenizer, once ``encode`` has loaded it."""

    @torch.inference_mode()
    def encode(
        self,
        sentences: str | Sequence[str],
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: torch.device | str | None = None,
        normalize_embeddings: bool = False,
        **tokenizer_options: Any,
    ) -> Any:
        """Returns embeddings: float32 [texts, hidden], or [hidden] for a single text.

        The first call has transformers load the tokenizer of the repository and revision of this model. It
        may run code from there, as the model does.

        Args:
            batch_size: number of texts in a batch; texts of similar length share a batch.
            show_progress_bar: accepted but ignored.
            convert_to_numpy: return a NumPy array instead of a list of tensors.
            convert_to_tensor: return one tensor; takes precedence over ``convert_to_numpy``.
            device: move the model there first.
            normalize_embeddings: scale each embedding to unit length.
            tokenizer_options: passed to the repository's tokenizer. ``max_length``, in tokens, is the
                config's ``max_position_embeddings`` by default.
        """
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        if self.tokenizer is None:
            self.tokenizer = AutoTokenizer.from_pretrained(
                self.name_or_path, trust_remote_code=True, **self.file_arguments
            )
        options = {"padding": True, "truncation": True, "max_length": self.config.max_position_embeddings}
        options |= tokenizer_options
        if device is not None:
            self.to(device)
        training = self.training
        self.eval()
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        embeddings: list[Any] = [None] * len(texts)
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            batch = self.tokenizer([texts[index] for index in indices], return_tensors="pt", **options)
            batch = batch.to(self.device)
            hidden_states = self(**batch, return_dict=True).last_hidden_state.float()
            pooled = mean_pooling(hidden_states, batch["attention_mask"])
            if normalize_embeddings:
                pooled = F.normalize(pooled, dim=-1)
            for index, embedding in zip(indices, pooled, strict=True):
                embeddings[index] = embedding
        self.train(training)

        result: Any = embeddings
        if convert_to_tensor:
            result = torch.stack(embeddings) if embeddings else torch.empty(0)
        elif convert_to_numpy:
            result = np.asarray([embedding.cpu().numpy() for embedding in embeddings])
        return result[0] if isinstance(sentences, str) else result


def mean_pooling(hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The mean [B, hidden] of each row's real tokens in [B, L, hidden]."""
    weights = attention_mask[..., None].to(hidden_states.dtype)
    return (hidden_states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
