"""MosaicBERT and DNABERT-2: fused queries, keys and values, GELU-gated; padded tokens end as zeros.

Facts: mosaicml/examples, ``examples/benchmarks/bert/src/bert_layers.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.reference.bert import Encoder
from tests.reference.layers import Array, Config, Tensors, gelu_exact, setting


def _layer(
    config: Config, weights: Tensors, name: str, x: Array, attend: Callable[[Array, Array, Array], Array]
) -> Array:
    epsilon = setting(config, "layer_norm_eps", default=1e-12)
    width, inner = config["hidden_size"], config["intermediate_size"]
    fused = weights.linear(x, f"{name}.attention.self.Wqkv", True)
    attended = attend(fused[:, :width], fused[:, width : 2 * width], fused[:, 2 * width :])
    attended = weights.linear(attended, f"{name}.attention.output.dense", True)
    attended = weights.layer_norm(attended + x, f"{name}.attention.output.LayerNorm", epsilon)
    both = weights.linear(attended, f"{name}.mlp.gated_layers", False)
    down = weights.linear(gelu_exact(both[:, :inner]) * both[:, inner:], f"{name}.mlp.wo", True)
    return weights.layer_norm(down + attended, f"{name}.mlp.layernorm", epsilon)


_encoder = Encoder(
    _layer, zero_padding=True, decoder_bias="cls.predictions.decoder.bias", prediction_epsilon=1e-12
)
trunk = _encoder.trunk
logits = _encoder.logits
