"""MosaicGPT: MPT's layer under other names, with its options at the top level of the config."""

from __future__ import annotations

from typing import ClassVar

from converter.exports.onnx.decoder import Attend, Decoder
from converter.exports.onnx.graph import Value
from converter.exports.onnx.network import Residual


class MosaicGpt(Decoder):
    token_embedding: ClassVar[str] = "wte"

    @property
    def biases(self) -> bool:
        return not self.config.get("no_bias", False)

    @property
    def norm_bias(self) -> bool:
        return self.biases

    @property
    def softmax_scale(self) -> float:
        given = self.config.get("softmax_scale")
        return super().softmax_scale if given is None else float(given)

    def layer(self, residual: Residual, prefix: str, attend: Attend) -> None:
        hidden, biases = self.hidden, self.biases
        width = self.config.get("mlp_ratio", 4) * hidden

        output = self.attention(residual.norm(f"{prefix}.ln_1"), f"{prefix}.attn", attend)
        residual.add(self.linear(output, f"{prefix}.attn.out_proj", hidden, hidden, bias=biases))

        inner = self.linear(
            residual.norm(f"{prefix}.ln_2"), f"{prefix}.mlp.mlp_up", hidden, width, bias=biases
        )
        inner = self.activation(inner, "gelu")
        residual.add(self.linear(inner, f"{prefix}.mlp.mlp_down", width, hidden, bias=biases))

    def attention(self, states: Value, prefix: str, attend: Attend) -> Value:
        hidden = self.hidden
        fused = self.linear(states, f"{prefix}.Wqkv", hidden, 3 * hidden, bias=self.biases)
        clip = self.config.get("attn_clip_qkv")
        if clip:
            fused = self.clamp(fused, float(clip))
        query, key, value = self.split(fused, *[hidden] * 3)
        if self.config.get("attn_qk_ln"):
            query, key = self.norm(query, f"{prefix}.q_ln"), self.norm(key, f"{prefix}.k_ln")
        sizes = (-1, self.geometry.num_heads, self.geometry.head_dim)
        query, key, value = (self.graph.reshape(part, *sizes) for part in (query, key, value))
        return attend(query, key, value)

    def project(self, logits: Value, head: Value) -> Value:
        del head
        return self.scaled(logits, self.config.get("logit_scale"))
