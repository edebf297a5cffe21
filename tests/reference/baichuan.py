"""Baichuan-13B and Baichuan2-13B: pre-norm layers with RMSNorm, SwiGLU, no biases, an untied head.

Baichuan2's head takes only the direction of its rows: they are brought to unit length first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.alibi import attention, press_slopes, query_slopes, tempered
from tests.reference.layers import Array, Config, Ints, Network, Tensors, setting


def _rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """x over the root of its mean square (Zhang and Sennrich 2019, arXiv 1910.07467), times a weight."""
    y: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * weight
    return y


def _row(config: Config, weights: Tensors, ids: Ints, mask: Ints) -> tuple[Array, list[Array]]:
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"no such activation here: {config['hidden_act']!r}")
    heads = setting(config, "num_attention_heads")
    epsilon = setting(config, "rms_norm_eps", default=1e-6)
    attentions = []

    x = weights["embed_tokens.weight"][ids]
    length, width = x.shape
    for n in range(setting(config, "num_hidden_layers")):
        normed = _rms_norm(x, weights[f"layers.{n}.input_layernorm.weight"], epsilon)
        packed = weights.linear(normed, f"layers.{n}.self_attn.W_pack", bias=False)
        # All of q, then all of k, then all of v; each head by head.
        q, k, v = packed.reshape(length, 3, heads, width // heads).transpose(1, 2, 0, 3)
        slopes = query_slopes(config, press_slopes(heads), mask, n)
        q = tempered(config, q, mask, n)
        context, probabilities = attention(q, k, v, slopes, mask, 1 / math.sqrt(width // heads))
        attentions.append(probabilities)
        x = x + weights.linear(context, f"layers.{n}.self_attn.o_proj", bias=False)

        normed = _rms_norm(x, weights[f"layers.{n}.post_attention_layernorm.weight"], epsilon)
        gate = weights.linear(normed, f"layers.{n}.mlp.gate_proj", bias=False)
        inner = gate / (1 + np.exp(-gate)) * weights.linear(normed, f"layers.{n}.mlp.up_proj", bias=False)
        x = x + weights.linear(inner, f"layers.{n}.mlp.down_proj", bias=False)
    return _rms_norm(x, weights["norm.weight"], epsilon), attentions


_network = Network(_row, embedding="embed_tokens", prefix="model.")
trunk = _network.trunk


def logits(
    config: Config,
    tensors: Mapping[str, NDArray[Any]],
    input_ids: NDArray[Any],
    attention_mask: NDArray[Any] | None = None,
) -> Array:
    """Next-token logits, float64 [B, L, vocabulary]; Baichuan2's unless ``norm_head`` is false."""
    rows: Array = np.asarray(tensors["lm_head.weight"], dtype=np.float64)
    if config.get("norm_head", True):
        rows = rows / np.sqrt((rows**2).sum(axis=1, keepdims=True))
    return trunk(config, tensors, input_ids, attention_mask).hidden @ rows.T
