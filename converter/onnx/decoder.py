"""A decoder-only model as a graph; a family defines its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import onnx_ir as ir

from converter.onnx.alibi import Alibi, Cache, Tokens
from converter.onnx.attention_ort import OrtAttention
from converter.onnx.attention_portable import PortableAttention
from converter.onnx.graph import EMBEDDINGS, HEAD, ORT, Dimension, Value
from converter.onnx.network import Attend, Network, Residual
from converter.scaling.scaling import Scaling
from converter.source.sentence_transformers import Pooling


class Decoder(Network, ABC):
    token_embedding: ClassVar[str] = "word_embeddings"
    final_norm: ClassVar[str] = "ln_f"

    # Defined by families, ``layer`` by each.

    @property
    def softmax_scale(self) -> float:
        """The factor on q.k."""
        return float(self.geometry.head_dim**-0.5)

    def enter(self, hidden: Value) -> Value:
        """From token embeddings to the first layer's input."""
        return hidden

    @abstractmethod
    def layer(self, residual: Residual, prefix: str, attend: Attend) -> None:
        """One layer; the names of its tensors start with ``prefix``, ``attend(q, k, v)`` is its attention."""

    def project(self, logits: Value) -> Value:
        """The last step to the logits."""
        return logits

    def final(self, residual: Residual, head: str) -> Value:
        """What a head sees, [any, hidden], or what a backbone computes (``head`` is ``Model``)."""
        del head
        return residual.norm(self.final_norm)

    # The whole model.

    def build(self, scaling: Scaling, head: str, pooling: Pooling | None) -> None:
        """Builds the graph; that of a causal language model has a cache.

        ``head`` is the end of its class's name: ``ForCausalLM``, ``Model``, ... With ``pooling``, the hidden
        states of a backbone also become one vector of each text.
        """
        graph, geometry = self.graph, self.geometry
        cached = head == "ForCausalLM"
        total = "total_sequence_length" if cached else "sequence_length"
        ids = graph.input("input_ids", ir.DataType.INT64, ["batch_size", "sequence_length"])
        mask = graph.input("attention_mask", ir.DataType.INT64, ["batch_size", total])
        tokens = Tokens(graph, ids, mask)
        factor = self.family.bias_scale(geometry.head_dim)
        slopes = tuple(slope * factor for slope in self.family.stock_slopes(self.config))
        form = OrtAttention if self.fused else PortableAttention
        attention = form(tokens, Alibi(slopes, scaling), geometry, self.softmax_scale)

        def cache_shape(length: str) -> tuple[Dimension, ...]:
            return ("batch_size", geometry.num_kv_heads, length, attention.head_size)

        def past(name: str) -> Value:
            return graph.input(f"past_key_values.{name}", graph.dtype, cache_shape("past_sequence_length"))

        pasts = [
            Cache(past(f"{n}.key"), past(f"{n}.value")) if cached else None
            for n in range(geometry.num_layers)
        ]
        with graph.scope(EMBEDDINGS):
            table = f"{self.token_embedding}.weight"
            rows = self.rows(table, graph.reshape(ids, -1), self.vocabulary)
            residual = Residual(self, self.enter(rows))
        presents = []
        for index, own in enumerate(pasts):
            with graph.scope(f"layers.{index}"):
                prefix = f"{self.family.layers}.{index}"

                def attend(
                    query: Value, key: Value, value: Value, own: Cache | None = own, index: int = index
                ) -> Value:
                    output, present = attention(query, key, value, own, index)
                    presents.append(present)
                    return output

                self.layer(residual, prefix, attend)
        with graph.scope(HEAD):
            if cached:
                self.language_model(residual, tokens)
            elif head == "ForSequenceClassification":
                residual.keep(tokens.last_unlike(int(self.config["pad_token_id"])))
                states = self.final(residual, head)
                scores = self.linear(states, "score", self.hidden, self.labels, bias=False)
                self.row_output(scores, self.labels)
            else:
                self.finish(head, self.final(residual, head), tokens, pooling)
        for index, present in enumerate(presents if cached else ()):
            for end, value in zip(Cache._fields, present, strict=True):
                graph.output(value, f"present.{index}.{end}", graph.dtype, cache_shape(total))

    def language_model(self, residual: Residual, tokens: Tokens) -> None:
        """From the residual stream to the logits."""
        graph = self.graph
        if self.last_logits:
            residual.keep(tokens.last_real())
        hidden = self.final(residual, "ForCausalLM")
        table = self.head_table
        size = self.vocabulary, self.hidden
        per_row = graph.constant([1]) if self.last_logits else tokens.new
        shape = graph.op("Concat", tokens.rows, per_row, graph.constant([-1]), axis=0)
        if self.fused:
            # The product has its final shape: reshaping all logits at the graph's end would copy them.
            hidden = graph.op("Reshape", hidden, shape)
        if self.fused and self.quantiser is None:
            logits = graph.op("FusedMatMul", hidden, self.parameter(table, *size), domain=ORT, transB=1)
        else:
            logits = self.product(hidden, table, size)
        logits = self.project(logits)
        if not self.fused:
            logits = graph.op("Reshape", logits, shape)
        bfloat16 = graph.dtype == ir.DataType.BFLOAT16  # which NumPy and samplers do not have
        logits = graph.wide(logits) if bfloat16 else logits
        dtype = ir.DataType.FLOAT if bfloat16 else graph.dtype
        length: Dimension = 1 if self.last_logits else "sequence_length"
        graph.output(logits, "logits", dtype, ["batch_size", length, self.vocabulary])

    # Building blocks.

    def heads(self, fused: Value) -> list[Value]:
        """Query, key and value [N, heads, head_dim] of [N, 3 * hidden], which is stored head by head."""
        graph, heads, size = self.graph, self.geometry.num_heads, self.geometry.head_dim
        names = [f"part_{number}" for number in range(3)]
        fused = graph.reshape(fused, -1, heads, 3, size)
        parts = graph.ops("Split", fused, graph.constant([1, 1, 1]), outputs=names, axis=2)
        return [graph.reshape(part, -1, heads, size) for part in parts]
