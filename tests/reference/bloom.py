"""BLOOM (BigScience 2022, arXiv 2211.05100): a norm after the embedding, pre-norm layers, biases."""

from __future__ import annotations

import math

from tests.reference.alibi import press_slopes
from tests.reference.layers import Array, Attention, Config, Ints, Network, Tensors, gelu_bloom, setting


def _row(config: Config, weights: Tensors, ids: Ints, mask: Ints) -> tuple[Array, list[Array]]:
    heads = setting(config, "n_head", "num_attention_heads")
    layers = setting(config, "n_layer", "num_hidden_layers")
    epsilon = setting(config, "layer_norm_epsilon", default=1e-5)
    residual_after_norm = config.get("apply_residual_connection_post_layernorm", False)

    x = weights.layer_norm(weights["word_embeddings.weight"][ids], "word_embeddings_layernorm", epsilon)
    length, width = x.shape
    head_dim = width // heads
    attend = Attention(config, mask, press_slopes(heads), 1 / math.sqrt(head_dim))
    for n in range(layers):
        normed = weights.layer_norm(x, f"h.{n}.input_layernorm", epsilon)
        residual = normed if residual_after_norm else x
        fused = weights.linear(normed, f"h.{n}.self_attention.query_key_value", bias=True)
        # The fused outputs go head by head, each with its q, its k and its v.
        q, k, v = fused.reshape(length, heads, 3, head_dim).transpose(2, 1, 0, 3)
        x = residual + weights.linear(attend(q, k, v), f"h.{n}.self_attention.dense", bias=True)

        normed = weights.layer_norm(x, f"h.{n}.post_attention_layernorm", epsilon)
        residual = normed if residual_after_norm else x
        inner = gelu_bloom(weights.linear(normed, f"h.{n}.mlp.dense_h_to_4h", bias=True))
        x = residual + weights.linear(inner, f"h.{n}.mlp.dense_4h_to_h", bias=True)
    return weights.layer_norm(x, "ln_f", epsilon), attend.probabilities


_network = Network(_row, embedding="word_embeddings")
trunk = _network.trunk
logits = _network.logits
