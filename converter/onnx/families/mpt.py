"""MPT: query, key and value one after the other, options in ``attn_config``, usually no biases."""

from __future__ import annotations

from typing import ClassVar

from converter.families.mpt import attention
from converter.onnx.decoder import Attend, Decoder, Residual
from converter.onnx.graph import Value


class Mpt(Decoder):
    token_embedding: ClassVar[str] = "wte"
    final_norm: ClassVar[str] = "norm_f"

    @property
    def biases(self) -> bool:
        return not self.config.get("no_bias", True)

    @property
    def norm_bias(self) -> bool:
        return self.biases

    @property
    def softmax_scale(self) -> float:
        given = attention(self.config).get("softmax_scale")
        return super().softmax_scale if given is None else float(given)

    def layer(self, residual: Residual, prefix: str, attend: Attend) -> None:
        hidden, biases = self.hidden, self.biases
        inner_width = int(self.config.get("expansion_ratio", 4) * hidden)

        output = self.attention(residual.norm(f"{prefix}.norm_1"), f"{prefix}.attn", attend)
        residual.add(self.linear(output, f"{prefix}.attn.out_proj", hidden, hidden, bias=biases))

        normed = residual.norm(f"{prefix}.norm_2")
        inner = self.linear(normed, f"{prefix}.ffn.up_proj", hidden, inner_width, bias=biases)
        inner = self.activation(inner, "gelu")
        residual.add(self.linear(inner, f"{prefix}.ffn.down_proj", inner_width, hidden, bias=biases))

    def attention(self, states: Value, prefix: str, attend: Attend) -> Value:
        graph, hidden, options = self.graph, self.hidden, attention(self.config)
        fused = self.linear(states, f"{prefix}.Wqkv", hidden, 3 * hidden, bias=self.biases)
        clip = options.get("clip_qkv")
        if clip:
            fused = self.clamp(fused, float(clip))
        names = ("query", "key", "value")
        query, key, value = graph.ops("Split", fused, graph.constant([hidden] * 3), outputs=names, axis=1)
        if options.get("qk_ln"):
            query, key = (
                self.layer_norm(part, f"{prefix}.{name}") for part, name in ((query, "q_ln"), (key, "k_ln"))
            )
        sizes = (-1, self.geometry.num_heads, self.geometry.head_dim)
        query, key, value = (graph.reshape(part, *sizes) for part in (query, key, value))
        return attend(query, key, value)

    def project(self, logits: Value) -> Value:
        scale = self.config.get("logit_scale")
        if scale is None:
            return logits
        return self.factor(logits, self.hidden**-0.5 if scale == "inv_sqrt_d_model" else float(scale))
