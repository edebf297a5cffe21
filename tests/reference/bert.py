"""What JinaBERT and MosaicBERT share: the embeddings, the norm after each residual, BERT's heads.

Facts: mosaicml/examples (``examples/benchmarks/bert/src/bert_layers.py``) and the first code of
jinaai/jina-embeddings-v2-base-en (``modeling_jbert.py``), which descends from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.alibi import press_slopes, symmetric_attention
from tests.reference.layers import ACTIVATIONS, Array, Attention, Config, Ints, Network, Tensors, setting

PREFIX = "bert."
Layer = Callable[[Config, Tensors, str, Array, Callable[[Array, Array, Array], Array]], Array]
"""(config, tensors, layer's name, hidden [L, width], attend) -> hidden [L, width]; ``attend`` takes the
projected queries, keys and values, each [L, width], and keeps the probabilities."""


@dataclass(frozen=True)
class Encoder:
    """An encoder: its layer, and how its heads differ from BERT's."""

    layer: Layer
    zero_padding: bool = False
    """Whether padded tokens leave the trunk as zeros."""
    decoder_bias: str = "cls.predictions.bias"
    prediction_epsilon: float | None = None
    """Of the prediction head's norm, if it is not the config's."""

    @property
    def trunk(self) -> Callable[..., Any]:
        return Network(self._row, embedding="embeddings.word_embeddings", prefix=PREFIX).trunk

    def _row(self, config: Config, weights: Tensors, ids: Ints, mask: Ints) -> tuple[Array, list[Array]]:
        heads = config["num_attention_heads"]
        epsilon = setting(config, "layer_norm_eps", default=1e-12)
        width = config["hidden_size"]
        row = Attention(
            config, mask, press_slopes(heads), 1 / math.sqrt(width // heads), of=symmetric_attention
        )

        def attend(*states: Array) -> Array:
            by_head = (part.reshape(-1, heads, width // heads).transpose(1, 0, 2) for part in states)
            return row(*by_head)

        types = weights["embeddings.token_type_embeddings.weight"][0]
        x = weights["embeddings.word_embeddings.weight"][ids] + types
        x = weights.layer_norm(x, "embeddings.LayerNorm", epsilon)
        for n in range(config["num_hidden_layers"]):
            x = self.layer(config, weights, f"encoder.layer.{n}", x, attend)
        return x * mask[:, None] if self.zero_padding else x, row.probabilities

    def logits(
        self,
        config: Config,
        tensors: Mapping[str, NDArray[Any]],
        input_ids: NDArray[Any],
        attention_mask: NDArray[Any] | None = None,
        head: str = "MaskedLM",
    ) -> Array:
        """What a head gives, float64.

        [B, L, vocabulary] (MaskedLM), [B, labels] (SequenceClassification), [B, L, labels]
        (TokenClassification), [B, L, 2] (QuestionAnswering) or [B, L, width] (Model).
        """
        x: Array = self.trunk(config, tensors, input_ids, attention_mask).hidden
        weights = Tensors(tensors, PREFIX)
        if head == "MaskedLM":
            x = weights.linear(x, "cls.predictions.transform.dense", bias=True)
            x = ACTIVATIONS[setting(config, "hidden_act", default="gelu")](x)
            epsilon = self.prediction_epsilon or setting(config, "layer_norm_eps", default=1e-12)
            x = weights.layer_norm(x, "cls.predictions.transform.LayerNorm", epsilon)
            tied = config.get("tie_word_embeddings", True)
            matrix = "embeddings.word_embeddings" if tied else "cls.predictions.decoder"
            logits: Array = x @ weights[f"{matrix}.weight"].T + weights[self.decoder_bias]
            return logits
        if head == "SequenceClassification":
            pooled = np.tanh(weights.linear(x[:, 0], "pooler.dense", bias=True))
            return weights.linear(pooled, "classifier", bias=True)
        if head == "TokenClassification":
            return weights.linear(x, "classifier", bias=True)
        if head == "QuestionAnswering":
            return weights.linear(x, "qa_outputs", bias=True)
        return x
