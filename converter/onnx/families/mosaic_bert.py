"""MosaicBERT and DNABERT-2: fused query, key and value; a gated feed forward layer."""

from __future__ import annotations

from converter.onnx.encoder import Attend, Encoder
from converter.onnx.graph import Value


class MosaicBert(Encoder):
    @property
    def prediction_epsilon(self) -> float:
        return 1e-12

    @property
    def prediction_bias(self) -> str:
        return "cls.predictions.decoder.bias"

    @property
    def zero_padding(self) -> bool:
        return True

    def layer(self, states: Value, prefix: str, attend: Attend) -> Value:
        hidden, attention = self.hidden, f"{prefix}.attention"
        fused = self.linear(states, f"{attention}.self.Wqkv", hidden, 3 * hidden)
        output = attend(*self.by_heads(*self.split(fused, hidden, hidden, hidden)))
        output = self.linear(output, f"{attention}.output.dense", hidden, hidden)
        attended = self.after(states, output, f"{attention}.output.LayerNorm")
        return self.gated_mlp(attended, f"{prefix}.mlp", "gelu")
