"""JinaBERT in both layouts, which ``converter/families/jina_bert.py`` describes."""

from __future__ import annotations

from converter.config import count
from converter.onnx.encoder import Encoder
from converter.onnx.graph import Value
from converter.onnx.network import Attend

GATES = {"geglu": "gelu", "reglu": "relu"}


class JinaBert(Encoder):
    @property
    def gate(self) -> str | None:
        """Activation of the gate; None without a gate."""
        return GATES.get(str(self.config.get("feed_forward_type")))

    def layer(self, states: Value, prefix: str, attend: Attend) -> Value:
        attended = self.attention(states, f"{prefix}.attention", attend)
        if self.config.get("qk_post_norm"):
            # The attention's output has the residual in it already; the original adds it twice.
            states = self.after(states, attended, f"{prefix}.layer_norm_1")
            return self.after(states, self.second_mlp(states, f"{prefix}.mlp"), f"{prefix}.layer_norm_2")
        if self.gate is not None:
            return self.gated_mlp(attended, f"{prefix}.mlp", self.gate)
        width = count(self.config, "intermediate_size")
        inner = self.linear(attended, f"{prefix}.intermediate.dense", self.hidden, width)
        inner = self.activation(inner, self.hidden_activation)
        output = self.linear(inner, f"{prefix}.output.dense", width, self.hidden)
        return self.after(attended, output, f"{prefix}.output.LayerNorm")

    def attention(self, states: Value, prefix: str, attend: Attend) -> Value:
        hidden = self.hidden
        query, key, value = (
            self.linear(states, f"{prefix}.self.{part}", hidden, hidden) for part in ("query", "key", "value")
        )
        if self.config.get("qk_post_norm"):
            query = self.norm(query, f"{prefix}.self.layer_norm_q")
            key = self.norm(key, f"{prefix}.self.layer_norm_k")
        output = self.linear(
            attend(*self.by_heads(query, key, value)), f"{prefix}.output.dense", hidden, hidden
        )
        return self.after(states, output, f"{prefix}.output.LayerNorm")

    def second_mlp(self, states: Value, prefix: str) -> Value:
        """The feed forward layer beside normalised queries and keys: here the gate is the second half."""
        width = count(self.config, "intermediate_size")
        if self.gate is None:
            inner = self.linear(states, f"{prefix}.up_layer", self.hidden, width, bias=False)
            inner = self.activation(inner, self.hidden_activation)
        else:
            up, gate = self.halves(states, f"{prefix}.up_gated_layer", width)
            inner = self.graph.op("Mul", up, self.activation(gate, self.gate))
        return self.linear(inner, f"{prefix}.down_layer", width, self.hidden)
