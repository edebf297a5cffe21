"""MosaicBERT and DNABERT-2: fused query, key and value; a gated feed forward layer."""

from __future__ import annotations

from typing import ClassVar

from converter.onnx.encoder import Encoder
from converter.onnx.graph import Value
from converter.onnx.network import Attend


class MosaicBert(Encoder):
    prediction_epsilon: ClassVar[float | None] = 1e-12
    prediction_bias: ClassVar[str] = "cls.predictions.decoder.bias"
    zero_padding: ClassVar[bool] = True

    def layer(self, states: Value, prefix: str, attend: Attend) -> Value:
        hidden, attention = self.hidden, f"{prefix}.attention"
        fused = self.linear(states, f"{attention}.self.Wqkv", hidden, 3 * hidden)
        output = attend(*self.by_heads(*self.split(fused, hidden, hidden, hidden)))
        output = self.linear(output, f"{attention}.output.dense", hidden, hidden)
        attended = self.after(states, output, f"{attention}.output.LayerNorm")
        return self.gated_mlp(attended, f"{prefix}.mlp", "gelu")
