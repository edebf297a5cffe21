"""Falcon with ALiBi (TII's Falcon-RW, Penedo et al. 2023, arXiv 2306.01116).

Attention, then MLP, each with a norm of its own. Falcon divides the bias by sqrt(head_dim) together with the
scores.
"""

from __future__ import annotations

import math

from tests.reference.alibi import press_slopes
from tests.reference.layers import ACTIVATIONS, Array, Attention, Config, Ints, Network, Tensors, setting


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

    x = weights["word_embeddings.weight"][ids]
    shrink = 1 / math.sqrt(x.shape[1] // heads)
    attend = Attention(config, mask, press_slopes(heads), shrink, bias_scale=shrink)
    for n in range(layers):
        normed = weights.layer_norm(x, f"h.{n}.input_layernorm", epsilon)
        fused = weights.linear(normed, f"h.{n}.self_attention.query_key_value", bias)
        # The outputs go head by head: query, key, value.
        q, k, v = fused.reshape(len(fused), heads, 3, -1).transpose(2, 1, 0, 3)
        x = x + weights.linear(attend(q, k, v), f"h.{n}.self_attention.dense", bias)
        normed = weights.layer_norm(x, f"h.{n}.post_attention_layernorm", epsilon)
        inner = activation(weights.linear(normed, f"h.{n}.mlp.dense_h_to_4h", bias))
        x = x + weights.linear(inner, f"h.{n}.mlp.dense_4h_to_h", bias)
    return weights.layer_norm(x, "ln_f", epsilon), attend.probabilities


_network = Network(_row, embedding="word_embeddings")
trunk = _network.trunk
logits = _network.logits
