"""Refact: one key and value head, SwiGLU, LayerNorm without bias, a separate head."""

from __future__ import annotations

from typing import ClassVar

from converter.config import count
from converter.onnx.decoder import Decoder
from converter.onnx.graph import Value
from converter.onnx.network import Attend, Norm, Residual

MULTIPLE = 256
"""The width of the MLP is a multiple of this."""


class Refact(Decoder):
    token_embedding: ClassVar[str] = "wte"
    norm_bias = False

    def norm_parameters(self, name: str, width: int, kind: Norm) -> tuple[Value, Value | None]:
        weight, bias = super().norm_parameters(name, width, kind)
        if name == self.final_norm and self.config.get("final_norm_bias"):
            bias = self.parameter(f"{name}.bias", width)
        return weight, bias

    def final(self, residual: Residual, head: str) -> Value:
        """The final norm belongs to the heads: a backbone has none."""
        return residual.value if head == "Model" else super().final(residual, head)

    @property
    def width(self) -> int:
        """Width of the MLP: two thirds of the nominal width, rounded up."""
        nominal = count(self.config, "n_inner", default=4 * self.hidden)
        return -(-(2 * nominal // 3) // MULTIPLE) * MULTIPLE

    @property
    def packed(self) -> bool:
        return bool(self.config.get("packed_projections", True))

    def layer(self, residual: Residual, prefix: str, attend: Attend) -> None:
        hidden = self.hidden
        output = self.attention(residual.norm(f"{prefix}.ln_1"), f"{prefix}.attn", attend)
        residual.add(self.linear(output, f"{prefix}.attn.c_proj", hidden, hidden, bias=False))
        inner = self.inner(residual.norm(f"{prefix}.ln_2"), f"{prefix}.mlp")
        width = self.width
        residual.add(self.linear(inner, f"{prefix}.mlp.c_proj", width, hidden, bias=False))

    def attention(self, states: Value, prefix: str, attend: Attend) -> Value:
        hidden, size = self.hidden, self.geometry.head_dim
        query = self.linear(states, f"{prefix}.q", hidden, hidden, bias=False)
        if self.packed:
            key, value = self.split(
                self.linear(states, f"{prefix}.kv", hidden, 2 * size, bias=False), size, size
            )
        else:
            key, value = (
                self.linear(states, f"{prefix}.{part}", hidden, size, bias=False) for part in ("k", "v")
            )
        return attend(*self.by_heads(query, key, value))

    def inner(self, states: Value, prefix: str) -> Value:
        hidden, width = self.hidden, self.width
        if self.packed:
            both = self.linear(states, f"{prefix}.gate_up_proj", hidden, 2 * width, bias=False)
            gate, up = self.split(both, width, width)
        else:
            gate, up = (
                self.linear(states, f"{prefix}.{part}", hidden, width, bias=False)
                for part in ("linear_1", "linear_3")
            )
        return self.graph.op("Mul", self.activation(gate, "silu"), up)
