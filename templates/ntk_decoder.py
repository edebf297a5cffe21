# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""The forward pass of a decoder-only ALiBi backbone, and the heads on top of it.

Families differ in their embeddings and layers; the loop over the layers and the heads are shared.
A family's backbone and heads are its own classes. They name these mixins first, and then transformers' own
classes (``PreTrainedModel``, ``GenerationMixin``), which transformers looks for among a class's bases.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, DynamicCache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils import can_return_tuple, logging

from .ntk_alibi import Alibi, sdpa_kernels
from .ntk_attention import head_processes
from .ntk_cache import CACHE, grow, grows_in_place
from .ntk_heads import Head, Support, check_keywords
from .ntk_modes import PACKED, check_lengths, check_paged_float16
from .ntk_plan import plan_attention

logger = logging.get_logger(__name__)


class DecoderSupport(Support):
    """Mixin for a family's base class: what transformers may do with the family's models."""

    _skip_keys_device_placement = ["cache", "past_key_values"]


class AlibiDecoder:
    """Mixin for a family's backbone.

    The family sets ``alibi`` and names its modules. A layer is called as ``layer(hidden_states, plan,
    past_key_values)`` and returns the hidden states and its attention weights or None.
    """

    alibi: Alibi
    embeddings_name: str
    layers_name: str
    norm_name: str
    """The attributes that hold the token embeddings, the layers, and the norm after the last layer."""
    gradient_checkpointing = False

    @property
    def decoder_layers(self) -> nn.ModuleList:
        return getattr(self, self.layers_name)

    def get_input_embeddings(self) -> nn.Module:
        return getattr(self, self.embeddings_name)

    def set_input_embeddings(self, value: nn.Module) -> None:
        setattr(self, self.embeddings_name, value)

    def prepare_embeddings(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        """The first layer's input from the token embeddings, both [B, Q, hidden]."""
        return inputs_embeds

    def final_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The backbone's output [B, Q, hidden] from the last layer's output [B, Q, hidden]."""
        return getattr(self, self.norm_name)(hidden_states)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Runs the backbone.

        Args:
            input_ids: [B, Q] token ids, or None with ``inputs_embeds``.
            past_key_values: a transformers ``Cache``, also as ``cache``; a new one is made if ``use_cache``.
            attention_mask: [B, cached + Q], 1 for real and 0 for padded tokens; None for no padding. Or what
                each token sees, [B or 1, 1, Q, cached + Q], with ``position_ids``: True or 0 where it does,
                False or a large negative number where it does not.
            position_ids: [B or 1, Q], by default counted from the real tokens. Where they start again at 0,
                another document starts. Such rows are computed without a cache.
            inputs_embeds: [B, Q, hidden] instead of ``input_ids``.
            kwargs: keywords of the attention function (``cu_seq_lens_q``, ...) are handed down, others
                ignored.

        Raises:
            TypeError: a keyword that ``check_keywords`` rejects.
            ValueError: both or neither of ``input_ids`` and ``inputs_embeds``; a cache that is a tuple, as in
                old releases; a mask or positions that ``plan_attention`` rejects.
        """
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if use_cache is None:
            use_cache = self.config.use_cache
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        past_key_values = given_cache(past_key_values, kwargs)
        keywords = attention_keywords(self, kwargs)
        if past_key_values is not None and not isinstance(past_key_values, Cache):
            raise ValueError(f"pass a transformers Cache, not a {type(past_key_values).__name__}")
        checkpointing = self.gradient_checkpointing and self.training
        if checkpointing and (use_cache or past_key_values is not None):
            check_switched_off(past_key_values)
            use_cache, past_key_values = False, None

        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        hidden_states = self.prepare_embeddings(inputs_embeds)
        plan = plan_attention(
            self.config,
            self.alibi,
            self.config.score_scale,
            hidden_states,
            attention_mask,
            position_ids,
            past_key_values,
            output_attentions,
            self.head_processes(keywords),
            **keywords,
        )
        if use_cache and past_key_values is None and not plan.packed:
            past_key_values = DynamicCache()
        grow(past_key_values, len(self.decoder_layers))
        plan = plan._replace(cache_has_zeros=grows_in_place(past_key_values))

        all_hidden_states, all_attentions = [], []  # kept only if they are returned: they are large
        with sdpa_kernels(hidden_states.device, hidden_states.shape[1]):
            for layer in self.decoder_layers:
                if output_hidden_states:
                    all_hidden_states.append(hidden_states)
                run = self.layer_function(layer)
                hidden_states, weights = run(hidden_states, plan, past_key_values)
                if output_attentions:
                    all_attentions.append(weights)
        hidden_states = self.final_norm(hidden_states)
        if output_hidden_states:
            all_hidden_states.append(hidden_states)

        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
            attentions=tuple(all_attentions) if output_attentions else None,
            **{CACHE: past_key_values if use_cache else None},
        )

    def layer_function(self, layer: nn.Module) -> Callable[..., Any]:
        """The layer, or with gradient checkpointing a function that computes it anew in the backward pass."""
        if self.gradient_checkpointing and self.training:
            return partial(self._gradient_checkpointing_func, layer)
        return layer

    def head_processes(self, keywords: dict[str, Any]) -> Any | None:
        """The processes that share the heads in tensor parallelism, a ``DeviceMesh``; None without it."""
        processes = head_processes(self.decoder_layers[0])
        if processes is not None and is_continuous_batching(keywords):
            raise ValueError("continuous batching does not work with tensor parallelism; use generate")
        return processes


def is_continuous_batching(keywords: dict[str, Any]) -> bool:
    """Whether ``forward`` is given the paged cache of continuous batching, which is no ``Cache``."""
    return keywords.get("cache") is not None


def given_cache(past_key_values: Any | None, keywords: dict[str, Any]) -> Any | None:
    """``past_key_values``, or the ``cache`` that transformers 5.24 passes; takes it out of the keywords."""
    if not isinstance(keywords.get("cache"), Cache):
        return past_key_values
    if past_key_values is not None:
        raise ValueError("pass one of cache and past_key_values")
    return keywords.pop("cache")


def attention_keywords(model: nn.Module, keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords of ``forward`` that attention takes; TypeError for those that ``check_keywords`` rejects.

    Continuous batching has many keywords of its own, and attention takes all of them.
    """
    if is_continuous_batching(keywords):
        return keywords
    check_keywords(model, keywords)
    return {name: value for name, value in keywords.items() if name in PACKED or name == "kernel_options"}


def check_switched_off(past_key_values: Cache | None) -> None:
    """Warns that gradient checkpointing switches caching off; ValueError if the cache already has tokens."""
    if past_key_values is not None and past_key_values.get_seq_length():
        raise ValueError("gradient checkpointing does not work with a filled cache; train without")
    logger.warning_once("gradient checkpointing does not work with use_cache=True; caching is off")


class CausalLMHead(Head):
    """Next-token logits [B, Q, vocabulary] from a linear layer, tied to the embeddings if configured."""

    def add_head(self, config: Any) -> None:
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @staticmethod
    def create_masks_for_generate(
        attention_mask: torch.Tensor | None = None, **inputs: Any
    ) -> torch.Tensor | None:
        """Keeps the mask two-dimensional, since positions are read from it.

        ``generate`` calls this for caches of fixed size. The mask is padded to that size, so compiled
        decoding sees the same shapes at every step.
        """
        cache = inputs.get(CACHE)
        if attention_mask is None or cache is None:
            return attention_mask
        return F.pad(attention_mask, (0, cache.layers[0].max_cache_len - attention_mask.shape[1]))

    def _prepare_position_ids_for_generation(self, *_: Any, **__: Any) -> None:
        """Leaves the positions to the backbone, which counts them from the mask at every step.

        ``generate`` of transformers 5 counts those of the prompt, and then adds one to the last column's for
        each token. In a row that is padded on the right, that column is not the last token's.
        """

    def _get_static_cache_init_shape(self) -> tuple[int, int] | None:
        # transformers 5 does not recognise which heads a process has. Without a shape, the first keys decide.
        if (self.tp_size or 1) > 1:
            return None
        return super()._get_static_cache_init_shape()

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        # Later, these errors would only be logged.
        check_lengths(self.base_model.alibi, "continuous batching")
        check_paged_float16(self.base_model.alibi, self.dtype)
        return super().init_continuous_batching(*args, **kwargs)

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [B, any, vocabulary] of hidden states [B, any, hidden]."""
        return self.lm_head(hidden_states)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Runs backbone and head; the arguments are the backbone's, and:

        Args:
            labels: [B, Q] token ids for the shifted next-token loss; -100 is ignored.
            logits_to_keep: compute logits for only this many of the last tokens (0 for all), or for the
                tokens at these indices.
            kwargs: those of the loss (``num_items_in_batch``, ``ignore_index``, ``shift_labels``) and the
                backbone's.
        """
        backbone = self.run_backbone(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        kept = logits_to_keep
        if isinstance(logits_to_keep, int):
            kept = slice(-logits_to_keep, None)
        logits = self.project(backbone.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(backbone, CACHE)},
            hidden_states=backbone.hidden_states,
            attentions=backbone.attentions,
        )


class LastTokenHead(Head):
    """Classifies rows by the last token in each that is not padding."""

    output_class = SequenceClassifierOutputWithPast

    def add_head(self, config: Any) -> None:
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)

    def scores(self, backbone: Any, input_ids: torch.Tensor | None) -> torch.Tensor:
        """Scores [B, labels]; a ValueError for several rows without ``pad_token_id`` to see their ends."""
        scores = self.score(backbone.last_hidden_state)
        pad = self.config.pad_token_id
        if pad is None and len(scores) > 1:
            raise ValueError("set config.pad_token_id to classify more than one row at a time")
        if pad is None or input_ids is None:
            return scores[:, -1]
        real = (input_ids != pad).long()
        places = torch.arange(real.shape[1], device=real.device)
        last = (real * places).argmax(-1).to(scores.device)
        return scores[torch.arange(len(scores), device=scores.device), last]
