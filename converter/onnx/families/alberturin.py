"""AlBERTurin: RMSNorm before each block, fused query, key and value, SwiGLU, no biases but the head's."""

from __future__ import annotations

from typing import ClassVar

from converter.onnx.encoder import Encoder
from converter.onnx.graph import Value
from converter.onnx.network import Attend, Norm, Residual


class Alberturin(Encoder):
    norm_kind: Norm = "rms"
    prediction_bias: ClassVar[str] = "lm_head.bias"

    @property
    def epsilon(self) -> float:
        return float(self.config["rms_norm_eps"])

    def prepare_embeddings(self, words: Value, types: Value) -> Value:  # noqa: ARG002 -- it has no token types
        return words

    def final(self, states: Value) -> Value:
        return self.norm(states, "blocks.norm")

    def prediction_transform(self, states: Value) -> Value:
        return states

    def pooled(self, first: Value) -> Value:
        return first

    def layer(self, states: Value, prefix: str, attend: Attend) -> Value:
        hidden, residual = self.hidden, Residual(self, states)
        normed = residual.norm(f"{prefix}.attn_norm")
        fused = self.linear(normed, f"{prefix}.attn.qkv_proj", hidden, 3 * hidden, bias=False)
        output = attend(*self.by_heads(*self.split(fused, hidden, hidden, hidden)))
        residual.add(self.linear(output, f"{prefix}.attn.o_proj", hidden, hidden, bias=False))
        residual.add(self.mlp(residual.norm(f"{prefix}.mlp_norm"), f"{prefix}.mlp"))
        return residual.value

    def mlp(self, states: Value, prefix: str) -> Value:
        hidden, width = self.hidden, int(self.hidden * self.config["ffn_factor"])
        gate, up = (
            self.linear(states, f"{prefix}.{part}", hidden, width, bias=False)
            for part in ("gate_proj", "up_proj")
        )
        inner = self.graph.op("Mul", self.activation(gate, "silu"), up)
        return self.linear(inner, f"{prefix}.down_proj", width, hidden, bias=False)
