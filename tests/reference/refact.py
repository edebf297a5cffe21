"""Refact-1.6B: pre-norm layers, no biases, one key and value head, SwiGLU, the last norm beside the head."""

from __future__ import annotations

import math

import numpy as np

from tests.reference.alibi import press_slopes
from tests.reference.layers import Array, Attention, Config, Ints, Network, Tensors, setting


def _row(config: Config, weights: Tensors, ids: Ints, mask: Ints) -> tuple[Array, list[Array]]:
    heads = setting(config, "n_head", "num_attention_heads")
    epsilon = setting(config, "layer_norm_epsilon", default=1e-5)
    packed = config.get("packed_projections", True)

    x = weights["wte.weight"][ids]
    length, width = x.shape
    head_dim = width // heads
    attend = Attention(config, mask, press_slopes(heads), 1 / math.sqrt(head_dim))
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
        x = x + weights.linear(attend(q, k, v), f"h.{n}.attn.c_proj", bias=False)

        normed = weights.layer_norm(x, f"h.{n}.ln_2", epsilon, bias=False)
        if packed:
            both = weights.linear(normed, f"h.{n}.mlp.gate_up_proj", bias=False)
            gate, up = np.split(both, 2, axis=1)
        else:
            gate = weights.linear(normed, f"h.{n}.mlp.linear_1", bias=False)
            up = weights.linear(normed, f"h.{n}.mlp.linear_3", bias=False)
        x = x + weights.linear(gate / (1 + np.exp(-gate)) * up, f"h.{n}.mlp.c_proj", bias=False)
    if "ln_f.weight" in weights:  # it belongs to the models with a head, and has a bias in the first revision
        x = weights.layer_norm(x, "ln_f", epsilon, bias="ln_f.bias" in weights)
    return x, attend.probabilities


_network = Network(_row, embedding="wte", tied=False)
trunk = _network.trunk
logits = _network.logits
