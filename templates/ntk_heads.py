# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Code that decoders and encoders share: two heads, and what all heads have in common."""

import sys
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import QuestionAnsweringModelOutput, SequenceClassifierOutput
from transformers.utils import can_return_tuple

# Arguments of any forward. One whose name is nearly one of these is misspelt.
NAMES = (
    *("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds", "labels"),
    *("past_key_values", "use_cache", "logits_to_keep", "output_attentions", "output_hidden_states"),
)
# Keywords of transformers' own models and of the originals that change the result, and are not served.
NOT_SERVED = (
    *("head_mask", "cross_attn_head_mask", "encoder_hidden_states", "encoder_attention_mask", "is_causal"),
    *("prefix_mask", "sequence_id", "subset_mask", "masked_tokens_mask"),
)

# Arguments of from_pretrained that say where files are; neither token nor proxies, which pickles would hold.
FILE_ARGUMENTS = ("cache_dir", "local_files_only", "revision", "subfolder")


def check_keywords(model: nn.Module, keywords: Mapping[str, Any], *not_served: str) -> None:
    """Raises TypeError for a keyword of ``forward`` that is misspelt, or would change the result if served.

    Others change nothing, so they are ignored, as in transformers' own models: generate, pipelines, the
    Trainer and tokenizers pass many.
    """
    for name, value in keywords.items():
        if value is None:
            continue
        known = misspelt(name)
        if known is not None or name in NOT_SERVED or name in not_served:
            hint = "" if known is None else f"; did you mean {known!r}?"
            raise TypeError(
                f"{type(model).__name__}.forward() got an unexpected keyword argument {name!r}{hint}"
            )


def misspelt(name: str) -> str | None:
    """The argument from which this name differs by one letter; None if there is none, or it is one."""
    if name in NAMES:
        return None
    for spelling in without_a_letter(name):
        if spelling in NEARLY:
            return NEARLY[spelling]
    return None


def without_a_letter(name: str) -> set[str]:
    """The name, and the name without one of its letters."""
    return {name, *(name[:at] + name[at + 1 :] for at in range(len(name)))}


NEARLY = {spelling: name for name in NAMES for spelling in without_a_letter(name)}


class Support:
    """Mixin for a family's base class: what transformers may do with the family's models."""

    supports_gradient_checkpointing = True
    _supports_attention_backend = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike | None,
        *args: Any,
        config: Any = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' method, which may be given a config of another class, such as ``BertConfig``.

        The base model keeps where its files are, for ``encode``.
        """
        config_class = cls.config_class
        if hasattr(config, "to_dict") and not isinstance(config, config_class):
            values = {**config.to_dict(), "model_type": config_class.model_type}
            attention = config._attn_implementation  # which to_dict leaves out
            config = config_class.from_dict(values, attn_implementation=attention)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)
        model = loaded
        if isinstance(loaded, tuple):  # with output_loading_info
            model = loaded[0]
        model.base_model.file_arguments = {name: kwargs[name] for name in FILE_ARGUMENTS if name in kwargs}
        return loaded

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
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("vllm."):
            raise ValueError(
                f"{cls.__name__}: vLLM cannot run this code; leave out --trust-remote-code and --model-impl, "
                "and install the plugin beside vLLM: pip install . in a clone of ntk-convert"
            )
        return bool(cls._supports_attention_backend)


class Head:
    """Mixin for a backbone with a head; ``backbone_class`` is the family's backbone.

    A head adds its modules and computes its scores. ``forward`` names the inputs of a tokenizer, because the
    Trainer drops columns that it does not name.
    """

    backbone_class: type
    output_class: type = SequenceClassifierOutput

    def __init__(self, config: Any):
        super().__init__(config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.backbone_class(config, **self.backbone_options(config)))
        self.add_head(config)
        self.post_init()

    def backbone_options(self, config: Any) -> dict[str, Any]:
        return {}

    def named(self, scores: Any) -> dict[str, torch.Tensor]:
        return {"logits": scores}

    def loss(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """That of the scores [B, labels] of rows.

        ``labels`` [B] are class indices or, for regression or several labels, float targets. If
        ``config.problem_type`` is not set, they decide the kind of loss.
        """
        return self.loss_function(labels, scores, self.config)

    def run_backbone(
        self, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, **inputs: Any
    ) -> Any:
        """The backbone's output; other inputs are passed on."""
        return self.base_model(input_ids, attention_mask=attention_mask, return_dict=True, **inputs)

    def add_dropout(self, config: Any) -> None:
        """Adds the dropout before a classifier; the config's name for its rate depends on the family."""
        names = ("classifier_dropout", "hidden_dropout", "hidden_dropout_prob")
        rates = (getattr(config, name, None) for name in names)
        self.dropout = nn.Dropout(next((rate for rate in rates if rate is not None), 0.1))

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs backbone and head. Arguments: the backbone's, and those of the head or its ``loss``."""
        kwargs |= {"token_type_ids": token_type_ids, "inputs_embeds": inputs_embeds}
        backbone = self.run_backbone(input_ids, attention_mask, **kwargs)
        scores = self.scores(backbone, input_ids)
        if start_positions is not None and end_positions is not None:
            labels = (start_positions, end_positions)
        loss = None if labels is None else self.loss(scores, labels)
        kept = {name: backbone[name] for name in backbone if name in self.output_class.__dataclass_fields__}
        return self.output_class(loss=loss, **self.named(scores), **kept)


class TokenClassificationHead(Head):
    """Scores [B, tokens, labels] of every token; ``labels`` [B, tokens] are class indices."""

    def add_head(self, config: Any) -> None:
        self.add_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def scores(self, backbone: Any, input_ids: torch.Tensor | None) -> torch.Tensor:
        return self.classifier(self.dropout(backbone.last_hidden_state))

    def loss(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss_function(scores, labels, self.config)


class QuestionAnsweringHead(Head):
    """Scores [B, tokens] of every token as the answer's start and as its end.

    ``start_positions`` and ``end_positions`` [B] are token indices of the answer. An index beyond the
    sequence means that the row has no answer; it adds nothing to the loss.
    """

    output_class = QuestionAnsweringModelOutput

    def add_head(self, config: Any) -> None:
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    def scores(self, backbone: Any, input_ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.qa_outputs(backbone.last_hidden_state).unbind(-1)

    def named(self, scores: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"start_logits": scores[0], "end_logits": scores[1]}

    def loss(self, scores: tuple[torch.Tensor, torch.Tensor], labels: Any) -> torch.Tensor:
        return self.loss_function(*scores, *labels)
