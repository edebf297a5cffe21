"""AlBERTurin: RMSNorm before each block and after the last, SwiGLU, no biases but the head's, no pooler.

Facts: mrinaldi97/matformer, ``matformer/transformer_blocks`` and ``modules/kernels/pytorch_modules.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from tests.reference.alibi import press_slopes, symmetric_attention
from tests.reference.layers import (
    ACTIVATIONS,
    Array,
    Attention,
    Config,
    Ints,
    Network,
    Tensors,
    rms_norm,
)

PREFIX = "encoder."


def _row(config: Config, weights: Tensors, ids: Ints, mask: Ints) -> tuple[Array, list[Array]]:
    width, heads, epsilon = config["hidden_size"], config["num_attention_heads"], config["rms_norm_eps"]
    size = width // heads
    attend = Attention(config, mask, press_slopes(heads), 1 / math.sqrt(size), of=symmetric_attention)

    def norm(x: Array, name: str) -> Array:
        return rms_norm(x, weights[f"{name}.weight"], epsilon)

    x = weights["embed_tokens.weight"][ids]
    for n in range(config["num_hidden_layers"]):
        name = f"blocks.layers.{n}"
        fused = weights.linear(norm(x, f"{name}.attn_norm"), f"{name}.attn.qkv_proj", bias=False)
        q, k, v = fused.reshape(-1, 3, heads, size).transpose(1, 2, 0, 3)
        x = x + weights.linear(attend(q, k, v), f"{name}.attn.o_proj", bias=False)
        y = norm(x, f"{name}.mlp_norm")
        gate = ACTIVATIONS["silu"](weights.linear(y, f"{name}.mlp.gate_proj", bias=False))
        up = weights.linear(y, f"{name}.mlp.up_proj", bias=False)
        x = x + weights.linear(gate * up, f"{name}.mlp.down_proj", bias=False)
    return norm(x, "blocks.norm"), attend.probabilities


trunk = Network(_row, embedding="embed_tokens", prefix=PREFIX).trunk


def logits(
    config: Config,
    tensors: Mapping[str, NDArray[Any]],
    input_ids: NDArray[Any],
    attention_mask: NDArray[Any] | None = None,
    head: str = "MaskedLM",
) -> Array:
    """What a head gives; see ``bert.Encoder.logits``."""
    x = trunk(config, tensors, input_ids, attention_mask).hidden
    weights = Tensors(tensors, PREFIX)
    if head == "MaskedLM":
        matrix = "lm_head.weight" if "lm_head.weight" in weights else "embed_tokens.weight"
        return x @ weights[matrix].T + weights["lm_head.bias"]
    if head == "SequenceClassification":
        return weights.linear(x[:, 0], "classifier", bias=True)
    if head == "TokenClassification":
        return weights.linear(x, "classifier", bias=True)
    if head == "QuestionAnswering":
        return weights.linear(x, "qa_outputs", bias=True)
    return x
