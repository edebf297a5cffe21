"""Baichuan-13B and Baichuan2-13B: RMSNorm, SwiGLU, no biases; Baichuan2's head has rows of unit length."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from converter.config import count
from converter.onnx.decoder import Decoder
from converter.onnx.graph import Value
from converter.onnx.network import Attend, Norm, Residual

PIECE = 256
"""Rows of the head whose lengths are computed at once."""


class Baichuan(Decoder):
    token_embedding: ClassVar[str] = "embed_tokens"
    final_norm: ClassVar[str] = "norm"
    norm_kind: Norm = "rms"

    @property
    def epsilon(self) -> float:
        return float(self.config.get("rms_norm_eps", 1e-6))

    def layer(self, residual: Residual, prefix: str, attend: Attend) -> None:
        hidden, width = self.hidden, count(self.config, "intermediate_size")

        normed = residual.norm(f"{prefix}.input_layernorm")
        fused = self.linear(normed, f"{prefix}.self_attn.W_pack", hidden, 3 * hidden, bias=False)
        output = attend(*self.by_heads(*self.split(fused, hidden, hidden, hidden)))
        residual.add(self.linear(output, f"{prefix}.self_attn.o_proj", hidden, hidden, bias=False))

        normed = residual.norm(f"{prefix}.post_attention_layernorm")
        gate = self.linear(normed, f"{prefix}.mlp.gate_proj", hidden, width, bias=False)
        up = self.linear(normed, f"{prefix}.mlp.up_proj", hidden, width, bias=False)
        inner = self.graph.op("Mul", self.activation(gate, "silu"), up)
        residual.add(self.linear(inner, f"{prefix}.mlp.down_proj", width, hidden, bias=False))

    def project(self, logits: Value) -> Value:
        """With Baichuan2's head, divides each token's logits by the length of its row."""
        if not self.config.get("norm_head", False):
            return logits
        vocabulary = count(self.config, "vocab_size")
        weight = self.weights.external("lm_head.weight", (vocabulary, self.hidden))

        def lengths() -> ir.TensorProtocol:
            rows = weight.numpy()
            pieces: list[NDArray[np.float64]] = [
                np.linalg.norm(rows[start : start + PIECE].astype(np.float64), axis=1)
                for start in range(0, len(rows), PIECE)
            ]
            del rows  # a view of the file, which keeps it open
            weight.release()
            values = np.maximum(np.concatenate(pieces), 1e-12).astype(np.float32)
            return ir.tensor(values, name=name)

        name = f"{weight.name}_lengths"
        tensor = ir.LazyTensor(lengths, dtype=ir.DataType.FLOAT, shape=ir.Shape([vocabulary]), name=name)
        return self.graph.op("Div", logits, self.graph.narrow(self.graph.initialiser(tensor)))
