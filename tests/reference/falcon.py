"""Falcon with ALiBi (TII's Falcon-RW, Penedo et al. 2023, arXiv 2306.01116), in its four layouts.

    sequential               attention, then MLP, each with a norm of its own (Falcon-RW)
    parallel_attn            attention and MLP read the same norm; both are added to the residual
    multi_query              one key and one value head for all queries, in either of the two above
    new_decoder_architecture parallel, queries in ``num_kv_heads`` groups with a key and a value
                             each, and one norm for attention and one for the MLP (or one for both)

Falcon divides the bias by sqrt(head_dim) together with the scores.
"""

from __future__ import annotations

import math

import numpy as np

from tests.reference.alibi import attention, press_slopes, query_slopes, tempered
from tests.reference.layers import ACTIVATIONS, Array, Config, Ints, Network, Tensors, setting


def _split(fused: Array, heads: int, kv_heads: int) -> tuple[Array, Array, Array]:
    """[L, ...] -> q, k, v, each [heads, L, head_dim].

    All layouts are one: the outputs go group by group, each group with its queries, then one key,
    then one value. Falcon-RW has as many groups as heads, multi-query a single group.
    """
    queries = heads // kv_heads
    length = len(fused)
    groups = fused.reshape(length, kv_heads, queries + 2, -1)
    q = [groups[:, h // queries, h % queries] for h in range(heads)]
    k = [groups[:, h // queries, queries] for h in range(heads)]
    v = [groups[:, h // queries, queries + 1] for h in range(heads)]
    return np.stack(q), np.stack(k), np.stack(v)


def _row(config: Config, weights: Tensors, ids: Ints, mask: Ints) -> tuple[Array, list[Array]]:
    if not config.get("alibi", False):
        raise ValueError("this Falcon has no ALiBi")
    activation = ACTIVATIONS[config.get("activation", "gelu")]
    heads = setting(config, "num_attention_heads", "n_head")
    layers = setting(config, "num_hidden_layers", "n_layer")
    epsilon = setting(config, "layer_norm_epsilon", default=1e-5)
    bias = config.get("bias", False)
    grouped = config.get("new_decoder_architecture", False)
    parallel = grouped or config.get("parallel_attn", True)
    two_norms = grouped and setting(config, "num_ln_in_parallel_attn", default=2) == 2
    if grouped:
        kv_heads = setting(config, "num_kv_heads", default=heads)
    else:
        kv_heads = 1 if config.get("multi_query", True) else heads
    attentions = []

    x = weights["word_embeddings.weight"][ids]
    shrink = 1 / math.sqrt(x.shape[1] // heads)
    for n in range(layers):
        normed = weights.layer_norm(x, f"h.{n}.ln_attn" if two_norms else f"h.{n}.input_layernorm", epsilon)
        fused = weights.linear(normed, f"h.{n}.self_attention.query_key_value", bias)
        q, k, v = _split(fused, heads, kv_heads)
        slopes = query_slopes(config, press_slopes(heads), mask, n, bias_scale=shrink)
        q = tempered(config, q, mask, n)
        context, probabilities = attention(q, k, v, slopes, mask, score_scale=shrink, bias_scale=shrink)
        attentions.append(probabilities)
        attended = weights.linear(context, f"h.{n}.self_attention.dense", bias)

        if two_norms:
            mlp_input = weights.layer_norm(x, f"h.{n}.ln_mlp", epsilon)
        elif parallel:
            mlp_input = normed
        else:
            mlp_input = weights.layer_norm(x + attended, f"h.{n}.post_attention_layernorm", epsilon)
        inner = activation(weights.linear(mlp_input, f"h.{n}.mlp.dense_h_to_4h", bias))
        x = x + attended + weights.linear(inner, f"h.{n}.mlp.dense_4h_to_h", bias)
    return weights.layer_norm(x, "ln_f", epsilon), attentions


_network = Network(_row, embedding="word_embeddings")
trunk = _network.trunk
logits = _network.logits
