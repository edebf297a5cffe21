"""An encoder as a graph: BERT without position embeddings; a family defines its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar

import onnx_ir as ir

from converter.config import count
from converter.onnx.alibi import Alibi, Tokens
from converter.onnx.attention_packed import PackedAttention, PackedTokens
from converter.onnx.attention_portable import SymmetricAttention
from converter.onnx.graph import EMBEDDINGS, HEAD, Dimension, Value
from converter.onnx.network import Attend, Network, Residual
from converter.scaling.scaling import Scaling
from converter.source.sentence_transformers import Pooling


class Encoder(Network, ABC):
    """Base of the encoders' graphs. They have no cache, and one more input, ``token_type_ids``."""

    prediction_epsilon: ClassVar[float | None] = None
    """Epsilon of the norm in the masked language model's head, if it is another one than elsewhere."""
    prediction_bias: ClassVar[str] = "cls.predictions.bias"
    """Name of the bias on its logits."""
    zero_padding: ClassVar[bool] = False
    """Whether the hidden states of padded tokens are set to 0 after the last layer."""

    @property
    def epsilon(self) -> float:
        return float(self.config.get("layer_norm_eps", 1e-12))

    @abstractmethod
    def layer(self, states: Value, prefix: str, attend: Attend) -> Value:
        """One layer, [N, hidden] to [N, hidden]; the names of its tensors start with ``prefix``."""

    def build(self, scaling: Scaling, head: str, pooling: Pooling | None) -> None:
        """Builds the graph; see ``Decoder.build``."""
        graph, geometry = self.graph, self.geometry
        shape: list[Dimension] = ["batch_size", "sequence_length"]
        ids, mask, types = (
            graph.input(name, ir.DataType.INT64, shape)
            for name in ("input_ids", "attention_mask", "token_type_ids")
        )
        tokens = Tokens(graph, ids, mask)
        alibi = Alibi(self.family.stock_slopes(self.config), scaling)
        scale = float(geometry.head_dim**-0.5)
        packed = None
        attention: PackedAttention | SymmetricAttention
        if self.fused and graph.dtype == ir.DataType.FLOAT:
            with graph.scope("packed"):
                packed = PackedTokens(tokens)
                ids, types = packed.take(ids), packed.take(types)
            attention = PackedAttention(packed, alibi, geometry, scale)
        else:
            ids, types = graph.reshape(ids, -1), graph.reshape(types, -1)
            attention = SymmetricAttention(tokens, alibi, geometry, scale)

        with graph.scope(EMBEDDINGS):
            words = self.rows(self.family.embeddings, ids, self.vocabulary)
            states = self.prepare_embeddings(words, types)
        for index in range(geometry.num_layers):
            with graph.scope(f"layers.{index}"):
                attend = partial(attention, layer=index)
                states = self.layer(states, f"{self.family.layers}.{index}", attend)
        with graph.scope(HEAD):
            states = self.final(states)
            if packed is not None:
                states = packed.unpack(states)
            if self.zero_padding:
                real = graph.reshape(graph.cast(mask), -1, 1)
                states = graph.op("Mul", states, real)
            self.finish(head, states, tokens, pooling)

    def finish(self, head: str, states: Value, tokens: Tokens, pooling: Pooling | None) -> None:
        """From the last layer [N, hidden] to the graph's outputs."""
        graph = self.graph
        if head == "ForMaskedLM":
            inner = self.prediction_transform(states)
            size = self.vocabulary, self.hidden
            logits = self.product(inner, self.head_table, size, self.prediction_bias)
            self.token_output(logits, "logits", tokens, self.vocabulary)
        elif head == "ForSequenceClassification":
            shape = graph.op("Concat", tokens.rows, graph.constant([-1, self.hidden]), axis=0)
            first = graph.op("Gather", graph.op("Reshape", states, shape), graph.constant(0), axis=1)
            scores = self.linear(self.pooled(first), "classifier", self.hidden, self.labels)
            self.row_output(scores, self.labels)
        else:
            super().finish(head, states, tokens, pooling)

    # What a family with other modules than BERT's overrides, besides ``layer``.

    def prepare_embeddings(self, words: Value, types: Value) -> Value:
        """The first layer's input from the word embeddings, both [N, hidden], and token types [N]."""
        kinds = count(self.config, "type_vocab_size", default=2)
        added = self.rows("embeddings.token_type_embeddings.weight", types, kinds)
        return self.norm(self.graph.op("Add", words, added), "embeddings.LayerNorm")

    def final(self, states: Value) -> Value:
        """The backbone's output from the last layer's, both [N, hidden]."""
        return states

    def prediction_transform(self, states: Value) -> Value:
        """What the decoder of a masked language model is applied to, [N, hidden]."""
        name = "cls.predictions.transform"
        inner = self.linear(states, f"{name}.dense", self.hidden, self.hidden)
        inner = self.activation(inner, self.hidden_activation)
        return self.norm(inner, f"{name}.LayerNorm", epsilon=self.prediction_epsilon)

    def pooled(self, first: Value) -> Value:
        """What a classifier of rows is applied to, from their first tokens' states, both [B, hidden]."""
        return self.graph.op("Tanh", self.linear(first, "pooler.dense", self.hidden, self.hidden))

    @property
    def hidden_activation(self) -> str:
        return str(self.config.get("hidden_act") or "gelu")

    # Building blocks.

    def after(self, states: Value, output: Value, norm: str) -> Value:
        """The norm of the residual and a block's output."""
        residual = Residual(self, states)
        residual.add(output)
        return residual.norm(norm)

    def halves(self, states: Value, weight: str, width: int) -> tuple[Value, Value]:
        """The two halves of a projection to twice the width, without bias."""
        fused = self.linear(states, weight, self.hidden, 2 * width, bias=False)
        first, second = self.split(fused, width, width)
        return first, second

    def gated_mlp(self, states: Value, prefix: str, activation: str) -> Value:
        """MosaicBERT's feed forward layer, including residual and norm."""
        width = count(self.config, "intermediate_size")
        gate, up = self.halves(states, f"{prefix}.gated_layers", width)
        inner = self.graph.op("Mul", self.activation(gate, activation), up)
        return self.after(
            states, self.linear(inner, f"{prefix}.wo", width, self.hidden), f"{prefix}.layernorm"
        )
