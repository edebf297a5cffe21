"""Falcon with ALiBi (TII's Falcon-RW, Penedo et al. 2023, arXiv 2306.01116).

Attention, then MLP, each with a norm of its own. Falcon divides the bias by sqrt(head_dim) together with the
scores.
"""

from __future__ import annotations

import math

import numpy as np

from tests.reference.alibi import attention, press_slopes, query_slopes, tempered
from tests.reference.layers import ACTIVATIONS, Array, Config, Ints, Network, Tensors, setting


def _split(fused: Array, heads: int) -> tuple[Array, Array, Array]:
    """[L, ...] -> q, k, v, each [heads, L, head_dim]; the outputs go head by head: query, key, value."""
    parts = fused.reshape(len(fused), heads, 3, -1)
    q, k, v = (np.stack([parts[:, h, which] for h in range(heads)]) for which in range(3))
    return q, k, v


def _row(config: Config, weights: Tensors, ids: Ints, mask: Ints) -> tuple[Array, list[Array]]:
    if not config.get("alibi", False):
        raise ValueError("this Falcon has no ALiBi")
    activation = ACTIVATIONS[config.get("activation", "gelu")]
    heads = setting(config, "num_attention_heads", "n_head")
    layers = setting(config, "num_hidden_layers", "n_layer")
    epsilon = setting(config, "layer_norm_epsilon", default=1e-5)
    bias = config.get("bias", False)
    if any(config.get(key) for key in ("multi_query", "parallel_attn", "new_decoder_architecture")):
        raise ValueError("no such layout here")
    attentions = []

    x = weights["word_embeddings.weight"][ids]
    shrink = 1 / math.sqrt(x.shape[1] // heads)
    for n in range(layers):
        normed = weights.layer_norm(x, f"h.{n}.input_layernorm", epsilon)
        fused = weights.linear(normed, f"h.{n}.self_attention.query_key_value", bias)
        q, k, v = _split(fused, heads)
        slopes = query_slopes(config, press_slopes(heads), mask, n, bias_scale=shrink)
        q = tempered(config, q, mask, n)
        context, probabilities = attention(q, k, v, slopes, mask, score_scale=shrink, bias_scale=shrink)
        attentions.append(probabilities)
        x = x + weights.linear(context, f"h.{n}.self_attention.dense", bias)
        normed = weights.layer_norm(x, f"h.{n}.post_attention_layernorm", epsilon)
        inner = activation(weights.linear(normed, f"h.{n}.mlp.dense_h_to_4h", bias))
        x = x + weights.linear(inner, f"h.{n}.mlp.dense_4h_to_h", bias)
    return weights.layer_norm(x, "ln_f", epsilon), attentions


_network = Network(_row, embedding="word_embeddings")
trunk = _network.trunk
logits = _network.logits
