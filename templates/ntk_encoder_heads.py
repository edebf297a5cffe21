# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""The heads of ALiBi encoders that decoders do not share.

A family's heads are its own classes. They name these mixins first and keep ``PreTrainedModel`` among their
direct bases.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput
from transformers.utils import can_return_tuple

from .ntk_heads import Head


class EncoderHead(Head):
    """Mixin for a backbone with a head; ``backbone_class`` is the family's backbone."""

    backbone_class: type
    pools = False

    def __init__(self, config: Any):
        super().__init__(config)
        self.num_labels = config.num_labels
        backbone = self.backbone_class(config, add_pooling_layer=self.pools or bool(config.add_pooling_layer))
        setattr(self, self.base_model_prefix, backbone)
        self.add_head(config)
        self.post_init()


class PredictionTransform(nn.Module):
    def __init__(self, config: Any, epsilon: float):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_act_fn = ACT2FN[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=epsilon)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))


class Predictions(nn.Module):
    """Token logits. The bias belongs to the decoder or, as in BERT's checkpoints, is a tensor beside it."""

    def __init__(self, config: Any, epsilon: float, decoder_bias: bool):
        super().__init__()
        self.transform = PredictionTransform(config, epsilon)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=decoder_bias)
        self.bias = None if decoder_bias else nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = self.decoder(self.transform(hidden_states))
        return logits if self.bias is None else logits + self.bias


class MaskedLMModule(nn.Module):
    """Holds the prediction head, under BERT's name for it."""

    def __init__(self, predictions: Predictions):
        super().__init__()
        self.predictions = predictions

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.predictions(hidden_states)


class MaskedLMHead(EncoderHead):
    """Logits [B, L, vocabulary] for each position from one linear layer, tied if configured."""

    def add_head(self, config: Any) -> None:
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

    def predict(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [B, L, vocabulary] from the backbone's output [B, L, hidden]."""
        return self.lm_head(hidden_states)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Runs backbone and head. Arguments: the backbone's, and ``labels`` [B, L], token ids or -100."""
        backbone = self.run_backbone(input_ids, attention_mask, inputs_embeds, token_type_ids, **kwargs)
        logits = self.predict(backbone.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=backbone.hidden_states, attentions=backbone.attentions
        )


class BertMaskedLMHead(MaskedLMHead):
    """The same from BERT's prediction head."""

    prediction_epsilon: float | None = None
    """Epsilon of the head's norm; None means the config's."""
    decoder_bias = False
    """Whether the bias belongs to the decoder."""

    def add_head(self, config: Any) -> None:
        epsilon = config.layer_norm_eps if self.prediction_epsilon is None else self.prediction_epsilon
        self.cls = MaskedLMModule(Predictions(config, epsilon, self.decoder_bias))

    def predict(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.cls(hidden_states)  # BiRNA-BERT's users put an identity here, to read hidden states

    def get_output_embeddings(self) -> nn.Module:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.cls.predictions.decoder = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Like transformers' own method, which does not resize a bias beside the decoder."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        bias = self.cls.predictions.bias
        if bias is not None:
            added = embeddings.num_embeddings - len(bias)
            self.cls.predictions.bias = nn.Parameter(F.pad(bias.data, (0, added)), bias.requires_grad)
        return embeddings


class SequenceClassificationHead(EncoderHead):
    """Scores [B, labels] from the pooled first token of each row."""

    pools = True
    """Whether the backbone has a pooler; the scores are otherwise those of the token itself."""

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
    ) -> SequenceClassifierOutput:
        """Runs backbone and head; the arguments are the backbone's, and:

        Args:
            labels: [B] class indices or, for regression or several labels, float targets. If
                ``config.problem_type`` is not set, the labels decide the kind of loss.
        """
        backbone = self.run_backbone(input_ids, attention_mask, inputs_embeds, token_type_ids, **kwargs)
        first = backbone.pooler_output if self.pools else backbone.last_hidden_state[:, 0]
        scores = self.classifier(self.dropout(first))
        return SequenceClassifierOutput(
            loss=None if labels is None else self.loss_function(labels, scores, self.config),
            logits=scores,
            hidden_states=backbone.hidden_states,
            attentions=backbone.attentions,
        )
