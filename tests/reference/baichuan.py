"""Baichuan-13B and Baichuan2-13B: pre-norm layers with RMSNorm, SwiGLU, no biases, an untied head.

Baichuan2's head takes only the direction of its rows: they are brought to unit length first.
"""

from __future__ import annotations

import math

import numpy as np

from tests.reference.alibi import press_slopes
from tests.reference.layers import Array, Attention, Config, Ints, Network, Tensors, rms_norm, setting


def _row(config: Config, weights: Tensors, ids: Ints, mask: Ints) -> tuple[Array, list[Array]]:
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"no such activation here: {config['hidden_act']!r}")
    heads = setting(config, "num_attention_heads")
    epsilon = setting(config, "rms_norm_eps", default=1e-6)

    x = weights["embed_tokens.weight"][ids]
    length, width = x.shape
    attend = Attention(config, mask, press_slopes(heads), 1 / math.sqrt(width // heads))
    for n in range(setting(config, "num_hidden_layers")):
        normed = rms_norm(x, weights[f"layers.{n}.input_layernorm.weight"], epsilon)
        packed = weights.linear(normed, f"layers.{n}.self_attn.W_pack", bias=False)
        # All of q, then all of k, then all of v; each head by head.
        q, k, v = packed.reshape(length, 3, heads, width // heads).transpose(1, 2, 0, 3)
        x = x + weights.linear(attend(q, k, v), f"layers.{n}.self_attn.o_proj", bias=False)

        normed = rms_norm(x, weights[f"layers.{n}.post_attention_layernorm.weight"], epsilon)
        gate = weights.linear(normed, f"layers.{n}.mlp.gate_proj", bias=False)
        inner = gate / (1 + np.exp(-gate)) * weights.linear(normed, f"layers.{n}.mlp.up_proj", bias=False)
        x = x + weights.linear(inner, f"layers.{n}.mlp.down_proj", bias=False)
    return rms_norm(x, weights["norm.weight"], epsilon), attend.probabilities


def _head(config: Config, matrix: Array) -> Array:
    """Baichuan2's rows of unit length, unless ``norm_head`` is false."""
    rows: Array = matrix
    if config.get("norm_head", True):
        rows = rows / np.sqrt((rows**2).sum(axis=1, keepdims=True))
    return rows


_network = Network(_row, embedding="embed_tokens", prefix="model.", head=_head, tied=False)
trunk = _network.trunk
logits = _network.logits
