"""MosaicGPT (mosaicml/examples v0.0.4): MPT's predecessor, options at the config's top level.

Its slopes are one geometric series over all heads, 2^(-alibi_bias_max * h / H), for every H.
"""

from __future__ import annotations

import math

import numpy as np

from tests.reference.layers import (
    Array,
    Attention,
    Config,
    Ints,
    Network,
    Tensors,
    gelu_exact,
    scaled_head,
    setting,
)

EPSILON = 1e-5


def _row(config: Config, weights: Tensors, ids: Ints, mask: Ints) -> tuple[Array, list[Array]]:
    if not config.get("alibi", False):
        raise ValueError("this MosaicGPT has no ALiBi")
    heads = config["n_heads"]
    steepness = setting(config, "alibi_bias_max", default=8)
    bias = not config.get("no_bias", False)
    stock = np.array([2.0 ** (-steepness * h / heads) for h in range(1, heads + 1)])

    x = weights["wte.weight"][ids]
    length, width = x.shape
    head_dim = width // heads
    score_scale = setting(config, "softmax_scale", default=1 / math.sqrt(head_dim))
    attend = Attention(config, mask, stock, score_scale)
    for n in range(config["n_layers"]):
        normed = weights.layer_norm(x, f"blocks.{n}.ln_1", EPSILON, bias)
        fused = weights.linear(normed, f"blocks.{n}.attn.Wqkv", bias)
        if config.get("attn_clip_qkv"):
            fused = np.clip(fused, -config["attn_clip_qkv"], config["attn_clip_qkv"])
        q, k, v = fused[:, :width], fused[:, width : 2 * width], fused[:, 2 * width :]
        if config.get("attn_qk_ln", False):
            # Over the whole vector, before it is cut into heads.
            q = weights.layer_norm(q, f"blocks.{n}.attn.q_ln", EPSILON, bias)
            k = weights.layer_norm(k, f"blocks.{n}.attn.k_ln", EPSILON, bias)
        q, k, v = (part.reshape(length, heads, head_dim).transpose(1, 0, 2) for part in (q, k, v))
        x = x + weights.linear(attend(q, k, v), f"blocks.{n}.attn.out_proj", bias)

        normed = weights.layer_norm(x, f"blocks.{n}.ln_2", EPSILON, bias)
        inner = gelu_exact(weights.linear(normed, f"blocks.{n}.mlp.mlp_up", bias))
        x = x + weights.linear(inner, f"blocks.{n}.mlp.mlp_down", bias)
    return weights.layer_norm(x, "ln_f", EPSILON, bias), attend.probabilities


_network = Network(_row, embedding="wte", head=scaled_head)
trunk = _network.trunk
logits = _network.logits
