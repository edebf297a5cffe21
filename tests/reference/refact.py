"""Refact-1.6B: pre-norm layers, no biases, one key and value head, SwiGLU, the last norm beside the head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.alibi import attention, press_slopes, query_slopes, tempered
from tests.reference.layers import Array, Config, Ints, Network, Tensors, Trunk, setting


def _row(config: Config, weights: Tensors, ids: Ints, mask: Ints) -> tuple[Array, list[Array]]:
    heads = setting(config, "n_head", "num_attention_heads")
    epsilon = setting(config, "layer_norm_epsilon", default=1e-5)
    packed = config.get("packed_projections", True)
    attentions = []

    x = weights["wte.weight"][ids]
    length, width = x.shape
    head_dim = width // heads
    for n in range(setting(config, "n_layer", "num_hidden_layers")):
        normed = weights.layer_norm(x, f"h.{n}.ln_1", epsilon, bias=False)
        q = weights.linear(normed, f"h.{n}.attn.q", bias=False)
        q = q.reshape(length, heads, head_dim).transpose(1, 0, 2)
        if packed:
            both = weights.linear(normed, f"h.{n}.attn.kv", bias=False)
            k, v = both[:, :head_dim], both[:, head_dim:]
        else:
            k = weights.linear(normed, f"h.{n}.attn.k", bias=False)
            v = weights.linear(normed, f"h.{n}.attn.v", bias=False)
        k, v = np.stack([k] * heads), np.stack([v] * heads)
        slopes = query_slopes(config, press_slopes(heads), mask, n)
        q = tempered(config, q, mask, n)
        context, probabilities = attention(q, k, v, slopes, mask, 1 / math.sqrt(head_dim))
        attentions.append(probabilities)
        x = x + weights.linear(context, f"h.{n}.attn.c_proj", bias=False)

        normed = weights.layer_norm(x, f"h.{n}.ln_2", epsilon, bias=False)
        if packed:
            both = weights.linear(normed, f"h.{n}.mlp.gate_up_proj", bias=False)
            gate, up = np.split(both, 2, axis=1)
        else:
            gate = weights.linear(normed, f"h.{n}.mlp.linear_1", bias=False)
            up = weights.linear(normed, f"h.{n}.mlp.linear_3", bias=False)
        x = x + weights.linear(gate / (1 + np.exp(-gate)) * up, f"h.{n}.mlp.c_proj", bias=False)
    return x, attentions


_network = Network(_row, embedding="wte")


def trunk(
    config: Config,
    tensors: Mapping[str, NDArray[Any]],
    input_ids: NDArray[Any],
    attention_mask: NDArray[Any] | None = None,
    attentions: bool = False,
) -> Trunk:
    """What a head reads: after ``ln_f``, which belongs to the models with a head and not to the trunk."""
    result = _network.trunk(config, tensors, input_ids, attention_mask, attentions)
    if "ln_f.weight" not in tensors:
        return result
    epsilon = setting(config, "layer_norm_epsilon", default=1e-5)
    bias = "ln_f.bias" in tensors  # the first revision's
    return Trunk(Tensors(tensors).layer_norm(result.hidden, "ln_f", epsilon, bias=bias), result.attentions)


def logits(
    config: Config,
    tensors: Mapping[str, NDArray[Any]],
    input_ids: NDArray[Any],
    attention_mask: NDArray[Any] | None = None,
) -> Array:
    """Next-token logits, float64 [B, L, vocabulary]; the head is never the embedding."""
    hidden = trunk(config, tensors, input_ids, attention_mask).hidden
    return Tensors(tensors).linear(hidden, "lm_head", bias=False)
