"""Falcon-RW: BLOOM's layers, with or without biases."""

from __future__ import annotations

from converter.config import count
from converter.onnx.decoder import Decoder
from converter.onnx.graph import Value
from converter.onnx.network import Attend, Residual


class Falcon(Decoder):
    @property
    def biases(self) -> bool:
        return bool(self.config.get("bias", False))

    def layer(self, residual: Residual, prefix: str, attend: Attend) -> None:
        residual.add(self.attention(residual.norm(f"{prefix}.input_layernorm"), prefix, attend))
        residual.add(self.mlp(residual.norm(f"{prefix}.post_attention_layernorm"), prefix))

    def attention(self, states: Value, prefix: str, attend: Attend) -> Value:
        hidden, prefix = self.hidden, f"{prefix}.self_attention"
        fused = self.linear(states, f"{prefix}.query_key_value", hidden, 3 * hidden, bias=self.biases)
        output = attend(*self.heads(fused))
        return self.linear(output, f"{prefix}.dense", hidden, hidden, bias=self.biases)

    def mlp(self, states: Value, prefix: str) -> Value:
        hidden = self.hidden
        width = count(self.config, "ffn_hidden_size", default=4 * hidden)
        inner = self.linear(states, f"{prefix}.mlp.dense_h_to_4h", hidden, width, bias=self.biases)
        inner = self.activation(inner, str(self.config.get("activation", "gelu")))
        return self.linear(inner, f"{prefix}.mlp.dense_4h_to_h", width, hidden, bias=self.biases)
