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

import numpy as np

from tests.reference.alibi import press_slopes
from tests.reference.layers import Array, Attention, Config, Ints, Network, Tensors, setting


def _conv(weights: Tensors, x: Array, name: str) -> Array:
    """[L, inputs] -> [L, outputs]; GPT-2 stores its linear maps as [inputs, outputs]."""
    y: Array = x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return y


def _row(config: Config, weights: Tensors, ids: Ints, mask: Ints) -> tuple[Array, list[Array]]:
    if config.get("position_embedding_type") != "alibi" or config.get("activation_function") != "swiglu":
        raise ValueError("this network has no ALiBi or no SwiGLU")
    heads = setting(config, "n_head", "num_attention_heads")
    layers = setting(config, "n_layer", "num_hidden_layers")
    epsilon = setting(config, "layer_norm_epsilon", default=1e-5)

    x = weights["wte.weight"][ids]
    x = x * setting(config, "mup_embeddings_scale", "embeddings_scale", default=1.0)
    length, width = x.shape
    head_dim = width // heads
    by_d = setting(config, "mup_scale_qk_dot_by_d", "scale_qk_dot_by_d", default=False)
    divisor = head_dim if by_d else math.sqrt(head_dim)
    stored = "relative_pe.slopes" in weights
    stock = weights["relative_pe.slopes"].reshape(heads) if stored else press_slopes(heads)
    attend = Attention(config, mask, stock, 1 / divisor)
    for n in range(layers):
        normed = weights.layer_norm(x, f"h.{n}.ln_1", epsilon)
        fused = _conv(weights, normed, f"h.{n}.attn.c_attn")
        # Queries of all heads, then keys of all heads, then values.
        q, k, v = fused.reshape(length, 3, heads, head_dim).transpose(1, 2, 0, 3)
        x = x + _conv(weights, attend(q, k, v), f"h.{n}.attn.c_proj")

        normed = weights.layer_norm(x, f"h.{n}.ln_2", epsilon)
        gate = _conv(weights, normed, f"h.{n}.mlp.c_fc2")
        inner = _conv(weights, normed, f"h.{n}.mlp.c_fc") * gate / (1.0 + np.exp(-gate))
        x = x + _conv(weights, inner, f"h.{n}.mlp.c_proj")
    return weights.layer_norm(x, "ln_f", epsilon), attend.probabilities


def _head(config: Config, matrix: Array) -> Array:
    scale = setting(config, "mup_width_scale", "width_scale", default=1.0)
    scaled: Array = scale * setting(config, "mup_output_alpha", default=1.0) * matrix
    return scaled


_network = Network(_row, embedding="wte", head=_head)
trunk = _network.trunk
logits = _network.logits
