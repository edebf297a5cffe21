"""A decoder-only model as a graph; a family defines its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import onnx_ir as ir

from converter.config import count
from converter.exports.onnx.alibi import Alibi, Tokens
from converter.exports.onnx.attention import Cache, MakeAttention
from converter.exports.onnx.graph import EMBEDDINGS, HEAD, ORT, Dimension, Value
from converter.exports.onnx.network import Network, Residual
from converter.scaling.scaling import Scaling

Attend = Callable[[Value, Value, Value], Value]
"""A layer's attention: query, key and value, as in ``Attention``, to the heads' outputs."""


class Decoder(Network, ABC):
    """Base of the decoders' graphs."""

    token_embedding: ClassVar[str] = "word_embeddings"
    final_norm: ClassVar[str] = "ln_f"

    # Defined by families, ``layer`` by each.

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding table, if the config does not say."""
        return True

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

    def project(self, logits: Value, head: Value) -> Value:
        """The last step to the logits; ``head`` is the weight [vocabulary, hidden] that gave them."""
        del head
        return logits

    # The whole model.

    def build(self, attention_form: MakeAttention, scaling: Scaling, *, last_logits: bool) -> None:
        """Builds the graph of the causal language model.

        Args:
            attention_form: the form of attention.
            scaling: the model's own.
            last_logits: compute the logits [B, 1, vocabulary] of each row's last token only.
        """
        graph, geometry = self.graph, self.geometry
        ids = graph.input("input_ids", ir.DataType.INT64, ["batch_size", "sequence_length"])
        mask = graph.input("attention_mask", ir.DataType.INT64, ["batch_size", "total_sequence_length"])
        tokens = Tokens(graph, ids, mask)
        factor = self.family.bias_scale(geometry.head_dim)
        slopes = tuple(slope * factor for slope in self.family.stock_slopes(self.config))
        attention = attention_form(tokens, Alibi(slopes, scaling), geometry, self.softmax_scale)

        def cache_shape(length: str) -> tuple[Dimension, ...]:
            return ("batch_size", geometry.num_kv_heads, length, attention.head_size)

        def cached(name: str) -> Value:
            return graph.input(f"past_key_values.{name}", graph.dtype, cache_shape("past_sequence_length"))

        pasts = [Cache(cached(f"{n}.key"), cached(f"{n}.value")) for n in range(geometry.num_layers)]

        with graph.scope(EMBEDDINGS):
            vocabulary = count(self.config, "vocab_size")
            table = f"{self.token_embedding}.weight"
            rows = self.rows(table, graph.reshape(ids, -1), vocabulary)
            residual = Residual(self, self.enter(rows))
        presents = []
        for index, past in enumerate(pasts):
            with graph.scope(f"layers.{index}"):
                prefix = f"{self.family.layers}.{index}"

                def attend(
                    query: Value, key: Value, value: Value, past: Cache = past, index: int = index
                ) -> Value:
                    output, present = attention(query, key, value, past, index)
                    presents.append(present)
                    return output

                self.layer(residual, prefix, attend)
        with graph.scope(HEAD):
            if last_logits:
                residual.keep_last(tokens)
            hidden = residual.norm(self.final_norm)
            tied = self.config.get("tie_word_embeddings", self.tied)
            head = self.parameter(table if tied else "lm_head.weight", vocabulary, self.hidden)
            per_row = graph.constant([1]) if last_logits else tokens.new
            shape = graph.op("Concat", tokens.rows, per_row, graph.constant([-1]), axis=0)
            if self.fused:
                # The product has its final shape: reshaping all logits at the graph's end would copy them.
                hidden = graph.op("Reshape", hidden, shape)
                logits = self.project(graph.op("FusedMatMul", hidden, head, domain=ORT, transB=1), head)
            else:
                logits = self.project(graph.op("Gemm", hidden, head, transB=1), head)
                logits = graph.op("Reshape", logits, shape)
            logits = self.readable(logits)
        length: Any = 1 if last_logits else "sequence_length"
        graph.output(logits, "logits", self.readable_dtype, ["batch_size", length, vocabulary])
        shape_of_present = cache_shape("total_sequence_length")
        for index, present in enumerate(presents):
            for end, value in zip(Cache._fields, present, strict=True):
                graph.output(value, f"present.{index}.{end}", graph.dtype, shape_of_present)

    # Building blocks.

    def heads(self, states: Value, sizes: Sequence[int]) -> list[Value]:
        """Splits the channels of fused heads.

        Args:
            states: [N, groups, sum of sizes, head_dim].
            sizes: heads of a group in each part.

        Returns:
            Each part, [N, groups * its size, head_dim].
        """
        graph = self.graph
        names = [f"part_{number}" for number in range(len(sizes))]
        parts = graph.ops("Split", states, graph.constant(list(sizes)), outputs=names, axis=2)
        groups = self.geometry.num_kv_heads
        return [
            graph.reshape(part, -1, groups * size, self.geometry.head_dim)
            for part, size in zip(parts, sizes, strict=True)
        ]

    def scaled(self, logits: Value, scale: float | str | None) -> Value:
        """Logits scaled by MPT's ``logit_scale``."""
        if scale is None:
            return logits
        return self.factor(logits, self.hidden**-0.5 if scale == "inv_sqrt_d_model" else float(scale))
