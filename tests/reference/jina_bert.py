"""JinaBERT: queries, keys and values apart; a gated, or plain, feed forward layer; two layouts.

Facts: see bert.py, and for qk-post-norm joelpaulkoch/transformers, branch add_jina_bert, which was made
from jinaai/jina-bert-v2-qk-post-norm; ggml-org/llama.cpp (``JinaBertV2Model``) for both.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.reference.bert import Encoder
from tests.reference.layers import ACTIVATIONS, Array, Config, Tensors, setting

GATES = {"geglu": "gelu", "reglu": "relu"}


def _layer(
    config: Config, weights: Tensors, name: str, x: Array, attend: Callable[[Array, Array, Array], Array]
) -> Array:
    epsilon = setting(config, "layer_norm_eps", default=1e-12)
    inner = config["intermediate_size"]
    # A converted config says which layout it is, the original's only where the code is.
    qk = config.get("qk_post_norm", "qk-post-norm" in config.get("_name_or_path", ""))
    gate = GATES.get(setting(config, "feed_forward_type", default="geglu" if qk else "original"))
    act = ACTIVATIONS[gate or setting(config, "hidden_act", default="gelu")]

    q, k, v = (weights.linear(x, f"{name}.attention.self.{part}", True) for part in ("query", "key", "value"))
    if qk:
        q = weights.layer_norm(q, f"{name}.attention.self.layer_norm_q", epsilon)
        k = weights.layer_norm(k, f"{name}.attention.self.layer_norm_k", epsilon)
    attended = weights.linear(attend(q, k, v), f"{name}.attention.output.dense", True)
    attended = weights.layer_norm(attended + x, f"{name}.attention.output.LayerNorm", epsilon)

    if qk:
        # x is in ``attended`` already, and is added once more.
        middle = weights.layer_norm(x + attended, f"{name}.layer_norm_1", epsilon)
        if gate is None:
            states = act(weights.linear(middle, f"{name}.mlp.up_layer", False))
        else:
            both = weights.linear(middle, f"{name}.mlp.up_gated_layer", False)
            states = both[:, :inner] * act(both[:, inner:])
        down = weights.linear(states, f"{name}.mlp.down_layer", True)
        return weights.layer_norm(middle + down, f"{name}.layer_norm_2", epsilon)
    if gate is None:
        states = act(weights.linear(attended, f"{name}.intermediate.dense", True))
        down = weights.linear(states, f"{name}.output.dense", True)
        return weights.layer_norm(down + attended, f"{name}.output.LayerNorm", epsilon)
    both = weights.linear(attended, f"{name}.mlp.gated_layers", False)
    down = weights.linear(act(both[:, :inner]) * both[:, inner:], f"{name}.mlp.wo", True)
    return weights.layer_norm(down + attended, f"{name}.mlp.layernorm", epsilon)


_encoder = Encoder(_layer)
trunk = _encoder.trunk
logits = _encoder.logits
