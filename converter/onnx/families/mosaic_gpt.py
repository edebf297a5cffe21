"""MosaicGPT: MPT's layer under other names, with its options at the top level of the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from converter.onnx.families.mpt import Mpt
from converter.onnx.graph import Value


class MosaicGpt(Mpt):
    final_norm: ClassVar[str] = "ln_f"
    norms: ClassVar[tuple[str, str]] = ("ln_1", "ln_2")
    no_bias: ClassVar[bool] = False

    @property
    def options(self) -> Mapping[str, Any]:
        names = {"softmax_scale": "softmax_scale", "clip_qkv": "attn_clip_qkv", "qk_ln": "attn_qk_ln"}
        return {option: self.config.get(name) for option, name in names.items()}

    def mlp(self, normed: Value, prefix: str) -> Value:
        hidden, biases = self.hidden, self.biases
        width = self.config.get("mlp_ratio", 4) * hidden
        inner = self.linear(normed, f"{prefix}.mlp.mlp_up", hidden, width, bias=biases)
        inner = self.activation(inner, "gelu")
        return self.linear(inner, f"{prefix}.mlp.mlp_down", width, hidden, bias=biases)
