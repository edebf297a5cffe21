# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Code that decoders and encoders share: two heads, and what all heads have in common."""

import sys
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import QuestionAnsweringModelOutput, TokenClassifierOutput
from transformers.utils import can_return_tuple

# Arguments of any forward. One whose name is nearly one of these is misspelt.
NAMES = (
    *("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds", "labels"),
    *("past_key_values", "use_cache", "logits_to_keep", "output_attentions", "output_hidden_states"),
)
# Keywords of transformers' own models and of the originals that change the result, and are not served.
NOT_SERVED = frozenset(
    {
        *("head_mask", "cross_attn_head_mask", "encoder_hidden_states", "encoder_attention_mask"),
        *("is_causal", "prefix_mask", "sequence_id", "subset_mask", "masked_tokens_mask"),
    }
)


def check_keywords(model: nn.Module, keywords: Mapping[str, Any], *not_served: str) -> None:
    """Raises TypeError for a keyword of ``forward`` that is misspelt, or would change the result if served.

    Others change nothing, so they are ignored, as in transformers' own models: generate, pipelines, the
    Trainer and tokenizers pass many.
    """
    for name, value in keywords.items():
        if value is None:
            continue
        near = [known for known in NAMES if name not in NAMES and shortened(name) & shortened(known)]
        if near or name in NOT_SERVED or name in not_served:
            hint = f"; did you mean {near[0]!r}?" if near else ""
            message = f"{type(model).__name__}.forward() got an unexpected keyword argument {name!r}{hint}"
            raise TypeError(message)


def shortened(name: str) -> set[str]:
    """The name, and the name without one of its letters."""
    return {name, *(name[:at] + name[at + 1 :] for at in range(len(name)))}


class Support:
    """Mixin for a family's base class: what transformers may do with the family's models."""

    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True

    @classmethod
    def from_pretrained(
        cls, name: str | PathLike, *args: Any, config: Any = None, **kwargs: Any
    ) -> PreTrainedModel:
        """transformers' method, which may be given a config of another class, such as ``BertConfig``."""
        ours = cls.config_class
        if hasattr(config, "to_dict") and not isinstance(config, ours):
            config = ours.from_dict({**config.to_dict(), "model_type": ours.model_type})
        return super().from_pretrained(name, *args, config=config, **kwargs)

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Ties the head; transformers 5.3 leaves it without values."""
        super().tie_weights(*args, **kwargs)
        head = self.get_output_embeddings()
        if head is not None and head.weight.is_meta and self.config.tie_word_embeddings:
            head.weight = self.get_input_embeddings().weight

    @classmethod
    def is_backend_compatible(cls) -> bool:
        """Answers who asks whether the code runs with another attention: sentence-transformers and vLLM.

        vLLM would pass other keywords, and divide fused weights between processes by the wrong rows.

        Raises:
            ValueError: vLLM asks.
        """
        if "vllm" in sys.modules:
            raise ValueError(
                f"{cls.__name__}: vLLM cannot run this code. To serve a converted model with vLLM, leave out "
                "--trust-remote-code and --model-impl, and install the plugin: pip install '.[vllm]' in a "
                "clone of ntk-convert"
            )
        return bool(cls._supports_attention_backend)


class Head:
    """Mixin for every head.

    Each head's ``forward`` names the inputs of a tokenizer: the Trainer drops columns that it does not name.
    """

    def run_backbone(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        token_type_ids: torch.Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """The backbone's output; other inputs are passed on."""
        inputs |= {"attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        return self.base_model(input_ids, token_type_ids=token_type_ids, return_dict=True, **inputs)

    def add_dropout(self, config: Any) -> None:
        """Adds the dropout before a classifier; the config's name for its rate depends on the family."""
        names = ("classifier_dropout", "hidden_dropout", "hidden_dropout_prob")
        rates = (getattr(config, name, None) for name in names)
        self.dropout = nn.Dropout(next((rate for rate in rates if rate is not None), 0.1))


class TokenClassificationHead:
    """Scores [B, tokens, labels] of every token."""

    def add_head(self, config: Any) -> None:
        self.add_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Runs backbone and head. Arguments: the backbone's, and ``labels`` [B, tokens], class indices."""
        backbone = self.run_backbone(input_ids, attention_mask, inputs_embeds, token_type_ids, **kwargs)
        scores = self.classifier(self.dropout(backbone.last_hidden_state))
        loss = None if labels is None else self.loss_function(scores, labels, self.config)
        return TokenClassifierOutput(
            loss=loss, logits=scores, hidden_states=backbone.hidden_states, attentions=backbone.attentions
        )


class QuestionAnsweringHead:
    """Scores [B, tokens] of every token as the answer's start and as its end."""

    def add_head(self, config: Any) -> None:
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Runs backbone and head; the arguments are the backbone's, and:

        Args:
            start_positions, end_positions: [B] token indices of the answer. An index beyond the sequence
                means that the row has no answer; it adds nothing to the loss.
        """
        backbone = self.run_backbone(input_ids, attention_mask, inputs_embeds, token_type_ids, **kwargs)
        start, end = self.qa_outputs(backbone.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start,
            end_logits=end,
            hidden_states=backbone.hidden_states,
            attentions=backbone.attentions,
        )
