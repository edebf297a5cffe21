"""MPT (MosaicML's llm-foundry): pre-norm layers, no biases as a rule, options in ``attn_config``.

With grouped-query attention consecutive query heads share a key and value head; ``Wqkv`` then gives the
whole query, followed by the few heads of the key and of the value.
"""

from __future__ import annotations

import math

import numpy as np

from tests.reference.alibi import mpt_slopes
from tests.reference.layers import (
    ACTIVATIONS,
    Array,
    Attention,
    Config,
    Ints,
    Network,
    Tensors,
    rms_norm,
    scaled_head,
    setting,
)


def _row(config: Config, weights: Tensors, ids: Ints, mask: Ints) -> tuple[Array, list[Array]]:
    options = setting(config, "attn_config", default={})
    if not options.get("alibi", True):
        raise ValueError("this MPT has no ALiBi")
    ffn = setting(config, "ffn_config", default={})
    heads = setting(config, "n_heads", "num_attention_heads")
    groups = {"grouped_query_attention": options.get("kv_n_heads"), "multiquery_attention": 1}
    kv_heads = groups.get(options.get("attn_type", ""), heads)
    layers = setting(config, "n_layers", "num_hidden_layers")
    epsilon = setting(config, "norm_eps", "layer_norm_epsilon", default=1e-5)
    bias = not config.get("no_bias", True)
    stock = mpt_slopes(heads, setting(options, "alibi_bias_max", default=8))

    def norm(x: Array, name: str) -> Array:
        if config.get("norm_type") in ("rmsnorm", "low_precision_rmsnorm"):
            return rms_norm(x, weights[f"{name}.weight"], epsilon)
        return weights.layer_norm(x, name, epsilon, bias)

    activation = ACTIVATIONS[(ffn.get("ffn_act_fn") or {}).get("name", "gelu")]
    x = weights["wte.weight"][ids]
    length, width = x.shape
    head_dim = width // heads
    score_scale = setting(options, "softmax_scale", default=1 / math.sqrt(head_dim))
    attend = Attention(config, mask, stock, score_scale)
    for n in range(layers):
        normed = norm(x, f"blocks.{n}.norm_1")
        fused = weights.linear(normed, f"blocks.{n}.attn.Wqkv", bias)
        if options.get("clip_qkv"):
            fused = np.clip(fused, -options["clip_qkv"], options["clip_qkv"])
        last = width + kv_heads * head_dim
        q, k, v = fused[:, :width], fused[:, width:last], fused[:, last:]
        if options.get("qk_ln", False):
            # Over the whole vector, before it is cut into heads.
            q = weights.layer_norm(q, f"blocks.{n}.attn.q_ln", epsilon, bias)
            k = weights.layer_norm(k, f"blocks.{n}.attn.k_ln", epsilon, bias)
        q, k, v = (part.reshape(length, -1, head_dim).transpose(1, 0, 2) for part in (q, k, v))
        k, v = (np.repeat(part, heads // kv_heads, axis=0) for part in (k, v))
        x = x + weights.linear(attend(q, k, v), f"blocks.{n}.attn.out_proj", bias)

        normed = norm(x, f"blocks.{n}.norm_2")
        inner = weights.linear(normed, f"blocks.{n}.ffn.up_proj", bias)
        if ffn.get("ffn_type") == "mptglu":
            inner = inner * activation(weights.linear(normed, f"blocks.{n}.ffn.gate_proj", bias))
        else:
            inner = activation(inner)
        x = x + weights.linear(inner, f"blocks.{n}.ffn.down_proj", bias)
    return norm(x, "norm_f"), attend.probabilities


_network = Network(_row, embedding="wte", head=scaled_head)
trunk = _network.trunk
logits = _network.logits
