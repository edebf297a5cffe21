"""The forward pass of a decoder-only ALiBi trunk, and the heads on top of it.

Families differ in their embeddings and layers; the loop over the layers and the heads are the same.
A family's trunk and heads are classes of their own that name these mixins first, so that the classes
transformers looks for (``PreTrainedModel``, ``GenerationMixin``) stay among their direct bases.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils import logging

from .ntk_alibi import Alibi, plan_attention
from .ntk_heads import Head

logger = logging.get_logger(__name__)


class AlibiDecoder:
    """Mixin for a family's trunk.

    The family sets ``alibi`` and ``softmax_scale`` and names its modules in the four attributes;
    a layer is called as ``layer(hidden_states, plan=..., past_key_values=...)`` and returns the hidden
    states and its attention weights or None.
    """

    alibi: Alibi
    softmax_scale: float
    _input_embed_layer: str
    _layers_name: str
    _final_norm_name: str | None

    def get_input_embeddings(self) -> nn.Module:
        return getattr(self, self._input_embed_layer)

    def set_input_embeddings(self, value: nn.Module) -> None:
        setattr(self, self._input_embed_layer, value)

    def enter(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        """From token embeddings to the first layer's input, both [B, Q, hidden]."""
        return inputs_embeds

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> tuple | BaseModelOutputWithPast:
        """Runs the trunk.

        Args:
            input_ids: [B, Q] token ids, or None with ``inputs_embeds``.
            past_key_values: a transformers ``Cache``; a new one is made if ``use_cache``.
            attention_mask: [B, cached + Q], 1 for real and 0 for padded tokens; None for no padding.
            inputs_embeds: [B, Q, hidden] instead of ``input_ids``.

        Other keywords that transformers passes to every model (``position_ids``, ``cache_position``)
        carry nothing that ALiBi needs and are ignored.

        Raises:
            ValueError: both or neither of ``input_ids`` and ``inputs_embeds``; a legacy tuple as
                cache; a ``head_mask``; an attention mask that is not [B, cached + Q].
        """
        config = self.config
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        use_cache = config.use_cache if use_cache is None else use_cache
        return_dict = config.return_dict if return_dict is None else return_dict

        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if kwargs.get("head_mask") is not None:
            raise ValueError("head_mask is not supported")
        if past_key_values is not None and not isinstance(past_key_values, Cache):
            kind = type(past_key_values).__name__
            raise ValueError(f"past_key_values must be a transformers Cache, got {kind}")
        if self.gradient_checkpointing and self.training and use_cache:
            logger.warning_once("use_cache=True does not go with gradient checkpointing; caching is off")
            use_cache = False
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()

        hidden_states = self.enter(inputs_embeds)
        eager = output_attentions or config._attn_implementation == "eager"
        plan = plan_attention(
            self.alibi, hidden_states, attention_mask, past_key_values, self.softmax_scale, eager
        )
        all_hidden_states, all_attentions = [], []
        for layer in getattr(self, self._layers_name):
            all_hidden_states.append(hidden_states)
            hidden_states, weights = layer(hidden_states, plan=plan, past_key_values=past_key_values)
            all_attentions.append(weights)
        if self._final_norm_name is not None:
            hidden_states = getattr(self, self._final_norm_name)(hidden_states)
        all_hidden_states.append(hidden_states)

        output = BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
            attentions=tuple(all_attentions) if output_attentions else None,
        )
        return output if return_dict else output.to_tuple()


class DecoderHead(Head):
    """Mixin for a trunk with a head; ``trunk_class`` is the family's trunk."""

    trunk_class: type

    def __init__(self, config: Any):
        super().__init__(config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.trunk_class(config))
        self.add_head(config)
        self.post_init()

    def run_trunk(self, input_ids: Any, kwargs: dict) -> BaseModelOutputWithPast:
        kwargs = {**kwargs, "return_dict": True}
        return self.base_model(input_ids, **kwargs)


class CausalLMHead(DecoderHead):
    """Next-token logits [B, Q, vocabulary] from a linear layer, tied to the embeddings if configured."""

    def add_head(self, config: Any) -> None:
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    @staticmethod
    def create_masks_for_generate(
        attention_mask: torch.Tensor | None = None, past_key_values: Cache | None = None, **_: Any
    ) -> torch.Tensor | None:
        """Keeps the mask two-dimensional, since positions are read from it.

        ``generate`` calls this for caches of fixed size; the mask gets that size, so that compiled
        decoding sees the same shapes at every step.
        """
        if attention_mask is None or past_key_values is None:
            return attention_mask
        return F.pad(attention_mask, (0, past_key_values.layers[0].max_cache_len - attention_mask.shape[1]))

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [B, any, vocabulary] of hidden states [B, any, hidden]."""
        return self.lm_head(hidden_states)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> tuple | CausalLMOutputWithPast:
        """Runs trunk and head; arguments as the trunk's, and:

        Args:
            labels: [B, Q] token ids for the shifted next-token loss; -100 is ignored.
            logits_to_keep: compute logits of the last so many tokens only (0: of all), or of the
                tokens at the given indices.
        """
        trunk = self.base_model(
            input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            head_mask=kwargs.pop("head_mask", None),
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.project(trunk.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=trunk.past_key_values,
            hidden_states=trunk.hidden_states,
            attentions=trunk.attentions,
        )
        return output if self.wants_dict(return_dict) else output.to_tuple()


class SequenceClassificationHead(DecoderHead):
    """Scores [B, labels] of each row's last token that is not padding."""

    def add_head(self, config: Any) -> None:
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> tuple | SequenceClassifierOutputWithPast:
        """Runs trunk and head; arguments as the trunk's, and:

        Args:
            labels: [B] class indices or, for regression or several labels, float targets; the loss
                follows ``config.problem_type`` or is chosen by the labels.

        Raises:
            ValueError: several rows, but no ``pad_token_id`` in the config to find their ends.
        """
        trunk = self.run_trunk(
            input_ids, {**kwargs, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        )
        scores = self.score(trunk.last_hidden_state)
        rows, length = scores.shape[:2]
        pad = self.config.pad_token_id
        if pad is None and rows > 1:
            raise ValueError("set config.pad_token_id to classify more than one row at a time")
        if pad is None or input_ids is None:
            last = torch.full((rows,), length - 1, device=scores.device)
        else:
            real = (input_ids != pad).to(device=scores.device, dtype=torch.long)
            last = (real * torch.arange(length, device=scores.device)).argmax(-1)
        pooled = scores[torch.arange(rows, device=scores.device), last]
        output = SequenceClassifierOutputWithPast(
            loss=None if labels is None else self.classification_loss(pooled, labels.to(pooled.device)),
            logits=pooled,
            past_key_values=trunk.past_key_values,
            hidden_states=trunk.hidden_states,
            attentions=trunk.attentions,
        )
        return output if self.wants_dict(return_dict) else output.to_tuple()
