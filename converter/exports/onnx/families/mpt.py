"""MPT: query, key and value are stored one after the other; options in ``attn_config``, usually no biases."""

from __future__ import annotations

from typing import ClassVar

from converter.exports.onnx.decoder import Attend, Decoder
from converter.exports.onnx.graph import Value
from converter.exports.onnx.network import Norm, Residual
from converter.families.mpt import attention, ffn


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

    @property
    def norm_kind(self) -> Norm:
        return "rms" if str(self.config.get("norm_type")).endswith("rmsnorm") else "layer"

    def layer(self, residual: Residual, prefix: str, attend: Attend) -> None:
        hidden, biases = self.hidden, self.biases

        output = self.attention(residual.norm(f"{prefix}.norm_1"), f"{prefix}.attn", attend)
        residual.add(self.linear(output, f"{prefix}.attn.out_proj", hidden, hidden, bias=biases))

        options = ffn(self.config)
        width = options.get("ffn_hidden_size") or int(self.config.get("expansion_ratio", 4) * hidden)
        activation = (options.get("ffn_act_fn") or {}).get("name", "gelu")
        normed = residual.norm(f"{prefix}.norm_2")
        inner = self.linear(normed, f"{prefix}.ffn.up_proj", hidden, width, bias=biases)
        if options.get("ffn_type") == "mptglu":
            gate = self.linear(normed, f"{prefix}.ffn.gate_proj", hidden, width, bias=biases)
            inner = self.graph.op("Mul", self.activation(gate, activation), inner)
        else:
            inner = self.activation(inner, activation)
        residual.add(self.linear(inner, f"{prefix}.ffn.down_proj", width, hidden, bias=biases))

    def attention(self, states: Value, prefix: str, attend: Attend) -> Value:
        hidden, geometry, options = self.hidden, self.geometry, attention(self.config)
        kv_width = geometry.num_kv_heads * geometry.head_dim
        fused = self.linear(states, f"{prefix}.Wqkv", hidden, hidden + 2 * kv_width, bias=self.biases)
        clip = options.get("clip_qkv")
        if clip:
            fused = self.clamp(fused, float(clip))
        query, key, value = self.split(fused, hidden, kv_width, kv_width)
        if options.get("qk_ln"):
            query = self.norm(query, f"{prefix}.q_ln", kind="layer")
            key = self.norm(key, f"{prefix}.k_ln", width=kv_width, kind="layer")
        query, key, value = (
            self.graph.reshape(part, -1, heads, geometry.head_dim)
            for part, heads in (
                (query, geometry.num_heads),
                (key, geometry.num_kv_heads),
                (value, geometry.num_kv_heads),
            )
        )
        return attend(query, key, value)

    def project(self, logits: Value, head: Value) -> Value:
        del head
        return self.scaled(logits, self.config.get("logit_scale"))
