"""What the families share: elementary layers, tensors by name, and the loop over a batch's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

from tests.reference.alibi import attention, penalties, tempered

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Config = Mapping[str, Any]


def setting(config: Config, *names: str, default: Any = None) -> Any:
    """The first of ``names`` that ``config`` gives a value, else ``default``."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is None:
        raise KeyError(f"the config has none of {', '.join(names)}")
    return default


def gelu_exact(x: Array) -> Array:
    """x times the normal distribution function at x (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    below: Array = erf(x / math.sqrt(2.0))
    return x * 0.5 * (1.0 + below)


def gelu_bloom(x: Array) -> Array:
    """The tanh approximation of GELU, with sqrt(2/pi) to the eight digits that BLOOM was trained with."""
    return x * 0.5 * (1.0 + np.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)))


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    return x * 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu_exact,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "silu": lambda x: x / (1.0 + np.exp(-x)),
}
"""By the names that transformers has for them."""


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """x over the root of its mean square (Zhang and Sennrich 2019, arXiv 1910.07467), times a weight."""
    y: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * weight
    return y


class Tensors:
    """A checkpoint's tensors in float64, found with or without the trunk's prefix before the name."""

    def __init__(self, tensors: Mapping[str, NDArray[Any]], prefix: str = "transformer.") -> None:
        self._tensors = {
            name.removeprefix(prefix): np.asarray(tensor, dtype=np.float64)
            for name, tensor in tensors.items()
        }

    def __getitem__(self, name: str) -> Array:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def linear(self, x: Array, name: str, bias: bool) -> Array:
        """[L, inputs] -> [L, outputs]; torch stores a linear map as [outputs, inputs]."""
        y: Array = x @ self[f"{name}.weight"].T
        return y + self[f"{name}.bias"] if bias else y

    def layer_norm(self, x: Array, name: str, epsilon: float, bias: bool = True) -> Array:
        """Layer normalisation over the last axis (Ba et al. 2016, arXiv 1607.06450), biased variance."""
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred**2).mean(axis=-1, keepdims=True)
        y: Array = centred / np.sqrt(variance + epsilon) * self[f"{name}.weight"]
        return y + self[f"{name}.bias"] if bias else y


class Attention:
    """Attention with ALiBi in the layers of one row of tokens, which call it in turn.

    Args:
        stock: slopes of the checkpoint, [num_heads].
        score_scale, bias_scale: see ``alibi.attention`` and ``alibi.penalties``.
        of: ``alibi.attention`` or ``alibi.symmetric_attention``.
    """

    def __init__(
        self,
        config: Config,
        mask: Ints,
        stock: Array,
        score_scale: float,
        of: Any = attention,
        **scales: float,
    ) -> None:
        self.config, self.mask, self.stock, self.score_scale = config, mask, stock, score_scale
        self.of, self.scales = of, scales
        self.probabilities: list[Array] = []
        """For each layer so far, [num_heads, L, L]."""

    def __call__(self, q: Array, k: Array, v: Array) -> Array:
        """Queries, keys and values [num_heads, L, head_dim] -> [L, num_heads * head_dim]."""
        layer = len(self.probabilities)
        penalty = partial(self._penalty, layer)
        q = tempered(self.config, q, self.mask, layer)
        output: Array
        output, probabilities = self.of(q, k, v, penalty, self.mask, self.score_scale)
        self.probabilities.append(probabilities)
        return output

    def _penalty(self, layer: int, distance: Array) -> Array:
        return penalties(self.config, self.stock, self.mask, layer, distance, **self.scales)


@dataclass(frozen=True)
class Trunk:
    """What a network gives below its head. Values at padded positions mean nothing."""

    hidden: Array
    """[B, L, hidden_size], after the last norm."""
    attentions: list[Array]
    """For each layer the probabilities [B, num_heads, query, key]; empty if not asked for."""


def scaled_head(config: Config, matrix: Array) -> Array:
    """The head's matrix times llm-foundry's ``logit_scale``, a number or ``"inv_sqrt_d_model"``."""
    scale = setting(config, "logit_scale", default=1.0)
    scaled: Array = matrix * (matrix.shape[1] ** -0.5 if scale == "inv_sqrt_d_model" else float(scale))
    return scaled


Row = Callable[[Config, Tensors, Ints, Ints], tuple[Array, list[Array]]]
"""(config, tensors, ids [L], mask [L]) -> hidden [L, hidden_size], per layer [num_heads, L, L]."""


@dataclass(frozen=True)
class Network:
    """A family's network: what it does to one row of tokens, and where its embedding is."""

    row: Row
    embedding: str
    prefix: str = "transformer."
    """Of the trunk's tensors in a model with a head."""
    head: Callable[[Config, Array], Array] = lambda config, matrix: matrix
    """Config and the head's matrix [vocabulary, hidden_size] -> the one that makes logits."""
    tied: bool | None = None
    """Whether the matrix is the embedding; None if the config says so."""

    def trunk(
        self,
        config: Config,
        tensors: Mapping[str, NDArray[Any]],
        input_ids: NDArray[Any],
        attention_mask: NDArray[Any] | None = None,
        attentions: bool = False,
    ) -> Trunk:
        """Final hidden states and, if asked for, attention probabilities.

        Args:
            config: config.json as a dict, of a converted repository or of a stock one.
            tensors: the checkpoint, name -> array of any float type.
            input_ids: [B, L].
            attention_mask: [B, L], 1 for real tokens and 0 for padding; none if all are real.
            attentions: whether to keep the probabilities.
        """
        ids = np.asarray(input_ids, dtype=np.int64)
        mask = np.ones_like(ids) if attention_mask is None else np.asarray(attention_mask, dtype=np.int64)
        weights = Tensors(tensors, self.prefix)
        hidden: list[Array] = []
        kept: list[list[Array]] = []
        for row_ids, row_mask in zip(ids, mask, strict=True):
            row_hidden, row_attentions = self.row(config, weights, row_ids, row_mask)
            hidden.append(row_hidden)
            if attentions:
                kept.append(row_attentions)
        return Trunk(np.stack(hidden), [np.stack(layer) for layer in zip(*kept, strict=True)])

    def logits(
        self,
        config: Config,
        tensors: Mapping[str, NDArray[Any]],
        input_ids: NDArray[Any],
        attention_mask: NDArray[Any] | None = None,
    ) -> Array:
        """Next-token logits, float64 [B, L, vocabulary]; arguments as for ``trunk``.

        The head is the embedding again, or ``lm_head`` if the config unties them.
        """
        hidden = self.trunk(config, tensors, input_ids, attention_mask).hidden
        tied = config.get("tie_word_embeddings", True) if self.tied is None else self.tied
        matrix = Tensors(tensors, self.prefix)[f"{self.embedding if tied else 'lm_head'}.weight"]
        product: Array = hidden @ self.head(config, matrix).T
        return product
