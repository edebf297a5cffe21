"""BLOOM: a norm after the embedding; query, key and value are stored head by head."""

from __future__ import annotations

from converter.onnx.decoder import Decoder
from converter.onnx.graph import Value
from converter.onnx.network import Attend, Residual


class Bloom(Decoder):
    def enter(self, hidden: Value) -> Value:
        return self.norm(hidden, "word_embeddings_layernorm")

    def layer(self, residual: Residual, prefix: str, attend: Attend) -> None:
        hidden = self.hidden
        after_norm = self.config.get("apply_residual_connection_post_layernorm", False)

        normed = residual.norm(f"{prefix}.input_layernorm")
        if after_norm:
            residual.restart(normed)
        fused = self.linear(normed, f"{prefix}.self_attention.query_key_value", hidden, 3 * hidden)
        output = attend(*self.heads(fused))
        residual.add(self.linear(output, f"{prefix}.self_attention.dense", hidden, hidden))

        normed = residual.norm(f"{prefix}.post_attention_layernorm")
        if after_norm:
            residual.restart(normed)
        inner = self.linear(normed, f"{prefix}.mlp.dense_h_to_4h", hidden, 4 * hidden)
        inner = self.activation(inner, "gelu_tanh")
        residual.add(self.linear(inner, f"{prefix}.mlp.dense_4h_to_h", 4 * hidden, hidden))
