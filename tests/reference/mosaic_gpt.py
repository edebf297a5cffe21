"""MosaicGPT (mosaicml/examples v0.0.4): MPT's predecessor, options at the config's top level.

Its slopes are one geometric series over all heads, 2^(-alibi_bias_max * h / H), for every H.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.alibi import attention, query_slopes, tempered
from tests.reference.layers import Array, Config, Ints, Network, Tensors, gelu_exact, setting

EPSILON = 1e-5


def _row(config: Config, weights: Tensors, ids: Ints, mask: Ints) -> tuple[Array, list[Array]]:
    if not config.get("alibi", False):
        raise ValueError("this MosaicGPT has no ALiBi")
    heads = config["n_heads"]
    steepness = setting(config, "alibi_bias_max", default=8)
    bias = not config.get("no_bias", False)
    stock = np.array([2.0 ** (-steepness * h / heads) for h in range(1, heads + 1)])
    attentions = []

    x = weights["wte.weight"][ids]
    length, width = x.shape
    head_dim = width // heads
    score_scale = setting(config, "softmax_scale", default=1 / math.sqrt(head_dim))
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
        slopes = query_slopes(config, stock, mask, n)
        q = tempered(config, q, mask, n)
        context, probabilities = attention(q, k, v, slopes, mask, score_scale)
        attentions.append(probabilities)
        x = x + weights.linear(context, f"blocks.{n}.attn.out_proj", bias)

        normed = weights.layer_norm(x, f"blocks.{n}.ln_2", EPSILON, bias)
        inner = gelu_exact(weights.linear(normed, f"blocks.{n}.mlp.mlp_up", bias))
        x = x + weights.linear(inner, f"blocks.{n}.mlp.mlp_down", bias)
    return weights.layer_norm(x, "ln_f", EPSILON, bias), attentions


_network = Network(_row, embedding="wte")
trunk = _network.trunk


def logits(
    config: Config,
    tensors: Mapping[str, NDArray[Any]],
    input_ids: NDArray[Any],
    attention_mask: NDArray[Any] | None = None,
) -> Array:
    """Next-token logits, float64 [B, L, vocabulary], times the config's ``logit_scale``."""
    scale = setting(config, "logit_scale", default=1.0)
    if scale == "inv_sqrt_d_model":
        scale = 1 / math.sqrt(config["d_model"])
    return float(scale) * _network.logits(config, tensors, input_ids, attention_mask)
