"""Falcon-RW: BLOOM's layers, with or without biases."""

from __future__ import annotations

from converter.config import count
from converter.exports.onnx.decoder import Attend, Decoder
from converter.exports.onnx.graph import Value
from converter.exports.onnx.network import Residual

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""transformers' names -> ours."""


class Falcon(Decoder):
    @property
    def biases(self) -> bool:
        return bool(self.config.get("bias", False))

    def layer(self, residual: Residual, prefix: str, attend: Attend) -> None:
        residual.add(self.attention(residual.norm(f"{prefix}.input_layernorm"), prefix, attend))
        residual.add(self.mlp(residual.norm(f"{prefix}.post_attention_layernorm"), prefix))

    def attention(self, states: Value, prefix: str, attend: Attend) -> Value:
        hidden, geometry, prefix = self.hidden, self.geometry, f"{prefix}.self_attention"
        fused = self.linear(states, f"{prefix}.query_key_value", hidden, 3 * hidden, bias=self.biases)
        fused = self.graph.reshape(fused, -1, geometry.num_heads, 3, geometry.head_dim)
        output = attend(*self.heads(fused, (1, 1, 1)))
        return self.linear(output, f"{prefix}.dense", hidden, hidden, bias=self.biases)

    def mlp(self, states: Value, prefix: str) -> Value:
        hidden = self.hidden
        width = count(self.config, "ffn_hidden_size", default=4 * hidden)
        inner = self.linear(states, f"{prefix}.mlp.dense_h_to_4h", hidden, width, bias=self.biases)
        kind = str(self.config.get("activation", "gelu"))
        inner = self.activation(inner, ACTIVATIONS.get(kind, kind))
        return self.linear(inner, f"{prefix}.mlp.dense_4h_to_h", width, hidden, bias=self.biases)
