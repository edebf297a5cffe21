"""MPT: query, key and value are stored one after the other; options in ``attn_config``, usually no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from converter.families.mpt import attention, ffn
from converter.onnx.decoder import Decoder
from converter.onnx.graph import Value
from converter.onnx.network import Attend, Residual


class Mpt(Decoder):
    token_embedding: ClassVar[str] = "wte"
    final_norm: ClassVar[str] = "norm_f"
    norms: ClassVar[tuple[str, str]] = ("norm_1", "norm_2")

    no_bias: ClassVar[bool] = True
    """Whether there are no biases if the config does not say."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.biases = self.norm_bias = not self.config.get("no_bias", self.no_bias)
        self.norm_kind = "rms" if str(self.config.get("norm_type")).endswith("rmsnorm") else "layer"

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of attention: ``softmax_scale``, ``clip_qkv`` and ``qk_ln``."""
        return attention(self.config)

    @property
    def softmax_scale(self) -> float:
        given = self.options.get("softmax_scale")
        return super().softmax_scale if given is None else float(given)

    def layer(self, residual: Residual, prefix: str, attend: Attend) -> None:
        hidden = self.hidden
        first, second = self.norms
        output = self.attention(residual.norm(f"{prefix}.{first}"), f"{prefix}.attn", attend)
        residual.add(self.linear(output, f"{prefix}.attn.out_proj", hidden, hidden, bias=self.biases))
        residual.add(self.mlp(residual.norm(f"{prefix}.{second}"), prefix))

    def mlp(self, normed: Value, prefix: str) -> Value:
        hidden, biases, options = self.hidden, self.biases, ffn(self.config)
        width = options.get("ffn_hidden_size") or int(self.config.get("expansion_ratio", 4) * hidden)
        activation = (options.get("ffn_act_fn") or {}).get("name", "gelu")
        inner = self.linear(normed, f"{prefix}.ffn.up_proj", hidden, width, bias=biases)
        if options.get("ffn_type") == "mptglu":
            gate = self.linear(normed, f"{prefix}.ffn.gate_proj", hidden, width, bias=biases)
            inner = self.graph.op("Mul", self.activation(gate, activation), inner)
        else:
            inner = self.activation(inner, activation)
        return self.linear(inner, f"{prefix}.ffn.down_proj", width, hidden, bias=biases)

    def attention(self, states: Value, prefix: str, attend: Attend) -> Value:
        hidden, geometry = self.hidden, self.geometry
        kv_width = geometry.num_kv_heads * geometry.head_dim
        fused = self.linear(states, f"{prefix}.Wqkv", hidden, hidden + 2 * kv_width, bias=self.biases)
        if clip := self.options.get("clip_qkv"):
            fused = self.clamp(fused, float(clip))
        query, key, value = self.split(fused, hidden, kv_width, kv_width)
        if self.options.get("qk_ln"):
            query = self.norm(query, f"{prefix}.q_ln", kind="layer")
            key = self.norm(key, f"{prefix}.k_ln", width=kv_width, kind="layer")
        return attend(*self.by_heads(query, key, value))

    def project(self, logits: Value) -> Value:
        scale = self.config.get("logit_scale")
        if scale is None:
            return logits
        return self.factor(logits, self.hidden**-0.5 if scale == "inv_sqrt_d_model" else float(scale))
