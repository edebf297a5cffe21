"""JAIS (Sengupta et al. 2023, arXiv 2308.16149) and BTLM (Dey et al. 2023, arXiv 2309.11568).

GPT-2's pre-norm layers with ALiBi, SwiGLU and the scales of the maximal update parametrisation:

    x      = embeddings_scale * E[token]
    scores = q.k / d - m * distance        d the head size, or its square root if scale_qk_dot_by_d is false
    MLP    = c_proj(c_fc(y) * silu(c_fc2(y)))
    logits = output_alpha * width_scale * (x . E)

The config spells these keys with ``mup_`` before them, or without in jais-13b, whose ``width_scale`` is
the whole factor on the logits. The slopes are those of the tensor ``relative_pe.slopes``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.alibi import attention, press_slopes, query_slopes, tempered
from tests.reference.layers import Array, Config, Ints, Network, Tensors, setting


def _conv(weights: Tensors, x: Array, name: str) -> Array:
    """[L, inputs] -> [L, outputs]; GPT-2 stores its linear maps as [inputs, outputs]."""
    y: Array = x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return y


def _stock_slopes(weights: Tensors, heads: int) -> Array:
    try:
        return weights["relative_pe.slopes"].reshape(heads)
    except KeyError:
        return press_slopes(heads)


def _row(config: Config, weights: Tensors, ids: Ints, mask: Ints) -> tuple[Array, list[Array]]:
    if config.get("position_embedding_type") != "alibi" or config.get("activation_function") != "swiglu":
        raise ValueError("this network has no ALiBi or no SwiGLU")
    heads = setting(config, "n_head", "num_attention_heads")
    layers = setting(config, "n_layer", "num_hidden_layers")
    epsilon = setting(config, "layer_norm_epsilon", default=1e-5)
    attentions = []

    x = weights["wte.weight"][ids]
    x = x * setting(config, "mup_embeddings_scale", "embeddings_scale", default=1.0)
    length, width = x.shape
    head_dim = width // heads
    by_d = setting(config, "mup_scale_qk_dot_by_d", "scale_qk_dot_by_d", default=False)
    divisor = head_dim if by_d else math.sqrt(head_dim)
    for n in range(layers):
        normed = weights.layer_norm(x, f"h.{n}.ln_1", epsilon)
        fused = _conv(weights, normed, f"h.{n}.attn.c_attn")
        # Queries of all heads, then keys of all heads, then values.
        q, k, v = fused.reshape(length, 3, heads, head_dim).transpose(1, 2, 0, 3)
        slopes = query_slopes(config, _stock_slopes(weights, heads), mask, n)
        q = tempered(config, q, mask, n)
        context, probabilities = attention(q, k, v, slopes, mask, 1 / divisor)
        attentions.append(probabilities)
        x = x + _conv(weights, context, f"h.{n}.attn.c_proj")

        normed = weights.layer_norm(x, f"h.{n}.ln_2", epsilon)
        gate = _conv(weights, normed, f"h.{n}.mlp.c_fc2")
        inner = _conv(weights, normed, f"h.{n}.mlp.c_fc") * gate / (1.0 + np.exp(-gate))
        x = x + _conv(weights, inner, f"h.{n}.mlp.c_proj")
    return weights.layer_norm(x, "ln_f", epsilon), attentions


_network = Network(_row, embedding="wte")
trunk = _network.trunk


def logits(
    config: Config,
    tensors: Mapping[str, NDArray[Any]],
    input_ids: NDArray[Any],
    attention_mask: NDArray[Any] | None = None,
) -> Array:
    """Next-token logits, float64 [B, L, vocabulary], times the config's scale."""
    scale = setting(config, "mup_width_scale", "width_scale", default=1.0)
    scale *= setting(config, "mup_output_alpha", default=1.0)
    return float(scale) * _network.logits(config, tensors, input_ids, attention_mask)
