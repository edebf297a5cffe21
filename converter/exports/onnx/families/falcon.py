"""Falcon-RW: sequential or parallel layers; groups of queries with one key and one value each."""

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
        config = self.config
        new = config.get("new_decoder_architecture", False)
        norms = config.get("num_ln_in_parallel_attn")
        if new and norms in (None, 2):
            output = self.attention(residual.norm(f"{prefix}.ln_attn"), prefix, attend)
            inner = self.mlp(residual.norm(f"{prefix}.ln_mlp"), prefix)
            residual.add(self.graph.op("Add", output, inner))
            return
        normed = residual.norm(f"{prefix}.input_layernorm")
        output = self.attention(normed, prefix, attend)
        if new or config.get("parallel_attn", True):
            residual.add(self.graph.op("Add", output, self.mlp(normed, prefix)))
            return
        residual.add(output)
        residual.add(self.mlp(residual.norm(f"{prefix}.post_attention_layernorm"), prefix))

    def attention(self, states: Value, prefix: str, attend: Attend) -> Value:
        hidden, geometry, prefix = self.hidden, self.geometry, f"{prefix}.self_attention"
        per_group = geometry.num_heads // geometry.num_kv_heads
        width = geometry.num_kv_heads * (per_group + 2) * geometry.head_dim
        fused = self.linear(states, f"{prefix}.query_key_value", hidden, width, bias=self.biases)
        fused = self.graph.reshape(fused, -1, geometry.num_kv_heads, per_group + 2, geometry.head_dim)
        output = attend(*self.heads(fused, (per_group, 1, 1)))
        return self.linear(output, f"{prefix}.dense", hidden, hidden, bias=self.biases)

    def mlp(self, states: Value, prefix: str) -> Value:
        hidden = self.hidden
        width = count(self.config, "ffn_hidden_size", default=4 * hidden)
        inner = self.linear(states, f"{prefix}.mlp.dense_h_to_4h", hidden, width, bias=self.biases)
        kind = str(self.config.get("activation", "gelu"))
        inner = self.activation(inner, ACTIVATIONS.get(kind, kind))
        return self.linear(inner, f"{prefix}.mlp.dense_4h_to_h", width, hidden, bias=self.biases)
