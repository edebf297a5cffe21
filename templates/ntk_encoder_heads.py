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
from transformers.modeling_outputs import MaskedLMOutput

from .ntk_heads import Head


class EncoderHead(Head):
    """Mixin for the heads of encoders."""

    pools = False
    """Whether the backbone has a pooler."""

    def backbone_options(self, config: Any) -> dict[str, Any]:
        return {"add_pooling_layer": self.pools or bool(config.add_pooling_layer)}


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
    """Logits [B, L, vocabulary] for each position from one linear layer, tied if configured.

    ``labels`` [B, L] are token ids or -100.
    """

    output_class = MaskedLMOutput

    def add_head(self, config: Any) -> None:
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

    def predict(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [B, L, vocabulary] from the backbone's output [B, L, hidden]."""
        return self.lm_head(hidden_states)

    def scores(self, backbone: Any, input_ids: torch.Tensor | None) -> torch.Tensor:
        return self.predict(backbone.last_hidden_state)

    def loss(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss_function(scores, labels, vocab_size=self.config.vocab_size)


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


class FirstTokenHead(EncoderHead):
    """Classifies rows by their first tokens: pooled, or else their hidden states."""

    pools = True

    def add_head(self, config: Any) -> None:
        self.add_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def scores(self, backbone: Any, input_ids: torch.Tensor | None) -> torch.Tensor:
        first = backbone.pooler_output if self.pools else backbone.last_hidden_state[:, 0]
        return self.classifier(self.dropout(first))
