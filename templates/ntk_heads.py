# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Code that decoders and encoders share: two heads, and what all heads have in common."""

import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import QuestionAnsweringModelOutput, TokenClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

# Keywords that transformers (generate, Trainer, tokenizers) passes to any model. ALiBi needs none of them.
IGNORED = frozenset(
    {"cache_position", "num_items_in_batch", "output_router_logits", "skip_logits", "token_type_ids"}
)
# transformers 4.57 looks up names in plans after it has replaced every number in them, as in dense_h_to_4h.
OLD_NAMES = transformers.__version__.startswith("4.")


def refuse_vllm(cls: type[PreTrainedModel]) -> bool:
    """Answers who asks whether the code runs with another attention, as sentence-transformers and vLLM do.

    vLLM would pass other keywords, and divide fused weights between processes by the wrong rows.

    Raises:
        ValueError: vLLM asks.
    """
    if "vllm" in sys.modules:
        raise ValueError(
            f"{cls.__name__}: vLLM cannot run this code. To serve a converted model with vLLM, leave out "
            "--trust-remote-code and --model-impl, and install the plugin: pip install '.[vllm]' in a clone "
            "of ntk-convert"
        )
    return bool(cls._supports_attention_backend)


def check_keywords(model: nn.Module, keywords: Mapping[str, Any], known: frozenset[str] = IGNORED) -> None:
    """Raises TypeError for an unknown keyword of ``forward``; None is always accepted, as it changes nothing.

    A model that ignored a misspelt ``attention_mask`` would silently be wrong.
    """
    for name, value in keywords.items():
        if value is not None and name not in known:
            raise TypeError(f"{type(model).__name__}.forward() got an unexpected keyword argument {name!r}")


def checked_tp_plan(model: Any) -> dict[str, str]:
    """The model's plan for tensor parallelism, which transformers reads before it divides the weights.

    Raises:
        ValueError: the model's class has no plan, or its heads cannot be divided among the processes.
    """
    plan = PreTrainedModel.tp_plan.fget(model)
    processes, config = model._tp_size or 1, model.config
    if processes > 1:
        name = type(model).__name__
        if not plan:
            raise ValueError(f"{name} does not support tensor parallelism; load it without tp_plan")
        heads = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", heads)
        if heads % processes or (groups % processes and processes % groups):
            raise ValueError(
                f"the {heads} attention heads of {name} ({groups} key heads) cannot be divided evenly among "
                f"{processes} processes; use another number of processes"
            )
    if OLD_NAMES:
        plan = {re.sub(r"\d+", "*", weights): style for weights, style in plan.items()}
    return plan


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
        **kwargs: Unpack[TransformersKwargs],
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
        **kwargs: Unpack[TransformersKwargs],
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
