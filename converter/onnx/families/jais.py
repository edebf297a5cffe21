"""JAIS and BTLM: GPT-2's layout with weights [inputs, outputs], SwiGLU, muP's factors."""

from __future__ import annotations

from typing import ClassVar

from converter.config import count
from converter.onnx.decoder import Decoder
from converter.onnx.graph import Value
from converter.onnx.network import Attend, Residual


class Jais(Decoder):
    token_embedding: ClassVar[str] = "wte"

    @property
    def softmax_scale(self) -> float:
        return float(self.geometry.head_dim ** (-1.0 if self.config.get("mup_scale_qk_dot_by_d") else -0.5))

    def enter(self, hidden: Value) -> Value:
        return self.factor(hidden, float(self.config.get("mup_embeddings_scale", 1.0)))

    def layer(self, residual: Residual, prefix: str, attend: Attend) -> None:
        hidden, width = self.hidden, count(self.config, "n_inner", default=4 * self.hidden)

        fused = self.conv1d(residual.norm(f"{prefix}.ln_1"), f"{prefix}.attn.c_attn", hidden, 3 * hidden)
        output = attend(*self.by_heads(*self.split(fused, hidden, hidden, hidden)))
        residual.add(self.conv1d(output, f"{prefix}.attn.c_proj", hidden, hidden))

        normed = residual.norm(f"{prefix}.ln_2")
        up = self.conv1d(normed, f"{prefix}.mlp.c_fc", hidden, width)
        gate = self.conv1d(normed, f"{prefix}.mlp.c_fc2", hidden, width)
        inner = self.graph.op("Mul", up, self.activation(gate, "silu"))
        residual.add(self.conv1d(inner, f"{prefix}.mlp.c_proj", width, hidden))

    def project(self, logits: Value) -> Value:
        config = self.config
        return self.factor(logits, config.get("mup_output_alpha", 1.0) * config.get("mup_width_scale", 1.0))
