"""A decoder-only model as a graph; a family says how its layers are put together.

Hidden states are [N, hidden] throughout, N = rows times new tokens, so that every linear layer is one
Gemm, which reads a weight as PyTorch stores it ([out, in]).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from converter.errors import UnsupportedModel
from converter.families import Config, Family, Geometry
from converter.families.base import count
from converter.onnx.alibi import Alibi, Tokens
from converter.onnx.attention import Cache, MakeAttention
from converter.onnx.graph import EMBEDDINGS, HEAD, ORT, Dimension, Graph, Value
from converter.onnx.weights import Weights
from converter.scaling import Scaling

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")

Attend = Callable[[Value, Value, Value], Value]
"""A layer's attention: query, key and value, as in ``Attention``, to the heads' outputs."""


class Decoder(ABC):
    """Base of the families' graphs.

    Args:
        graph: empty.
        attention: the form of attention.
        fused: use onnxruntime's fused norms and activations.
        config: of the converted repository.
        family, geometry: what it is.
        weights: its tensors.
        convert_weights: turn weights into the graph's dtype when they are written, not when loaded.
    """

    token_embedding: ClassVar[str] = "word_embeddings"
    final_norm: ClassVar[str] = "ln_f"

    def __init__(
        self,
        graph: Graph,
        attention: MakeAttention,
        *,
        fused: bool,
        config: Config,
        family: Family,
        geometry: Geometry,
        weights: Weights,
        convert_weights: bool,
    ):
        self.graph = graph
        self.fused = fused
        self.config = config
        self.family = family
        self.geometry = geometry
        self.weights = weights
        self.convert_weights = convert_weights
        self.hidden = geometry.num_heads * geometry.head_dim
        self.attention_form = attention
        self._parameters: dict[str, Value] = {}

    # What a family says, ``layer`` above all.

    @property
    def epsilon(self) -> float:
        """Of the norms."""
        return float(self.config.get("layer_norm_epsilon", 1e-5))

    @property
    def norm_bias(self) -> bool:
        """Whether norms have a bias."""
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
        """One layer, whose tensors' names start with ``prefix``; ``attend(q, k, v)`` is its attention."""

    def project(self, logits: Value) -> Value:
        """The last step to the logits."""
        return logits

    # The whole.

    def build(self, scaling: Scaling, *, last_logits: bool) -> None:
        """Builds the graph of the causal language model.

        Args:
            scaling: what its config's ``alibi_scaling`` says.
            last_logits: logits [B, 1, vocabulary] of each row's last token only.
        """
        graph, geometry = self.graph, self.geometry
        ids = graph.input("input_ids", ir.DataType.INT64, ["batch_size", "sequence_length"])
        mask = graph.input("attention_mask", ir.DataType.INT64, ["batch_size", "total_sequence_length"])
        tokens = Tokens(graph, ids, mask)
        factor = self.family.bias_scale(geometry.head_dim)
        slopes = tuple(slope * factor for slope in self.family.stock_slopes(self.config))
        attention = self.attention_form(tokens, Alibi(slopes, scaling), geometry, self.softmax_scale)

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
                prefix = f"{self.family.layers_prefix.removeprefix('transformer.')}.{index}"

                def attend(query: Value, key: Value, value: Value, past: Cache = past) -> Value:
                    output, present = attention(query, key, value, past)
                    presents.append(present)
                    return output

                self.layer(residual, prefix, attend)
        with graph.scope(HEAD):
            if last_logits:
                residual.keep_last(tokens)
            hidden = residual.norm(self.final_norm)
            tied = self.config.get("tie_word_embeddings", True)
            head = self.parameter(table if tied else "lm_head.weight", vocabulary, self.hidden)
            per_row = graph.constant([1]) if last_logits else tokens.new
            shape = graph.op("Concat", tokens.rows, per_row, graph.constant([-1]), axis=0)
            if self.fused:
                # The product has its final shape: to reshape all logits at the graph's end is to copy them.
                hidden = graph.op("Reshape", hidden, shape)
                logits = self.project(graph.op("FusedMatMul", hidden, head, domain=ORT, transB=1))
            else:
                logits = self.project(graph.op("Gemm", hidden, head, transB=1))
                logits = graph.op("Reshape", logits, shape)
            # Neither NumPy nor samplers know bfloat16.
            dtype = ir.DataType.FLOAT if graph.dtype == ir.DataType.BFLOAT16 else graph.dtype
            if dtype != graph.dtype:
                logits = graph.cast(logits, dtype)
        length: Any = 1 if last_logits else "sequence_length"
        graph.output(logits, "logits", dtype, ["batch_size", length, vocabulary])
        shape_of_present = cache_shape("total_sequence_length")
        for index, present in enumerate(presents):
            for end, value in zip(Cache._fields, present, strict=True):
                graph.output(value, f"present.{index}.{end}", graph.dtype, shape_of_present)

    # Building stones.

    def parameter(self, name: str, *shape: int) -> Value:
        """A weight in the graph's dtype."""
        if name not in self._parameters:
            stored = self.stored(name, shape)
            same = stored.dtype == self.graph.dtype
            self._parameters[name] = stored if same else self.graph.cast(stored)
        return self._parameters[name]

    def rows(self, name: str, indices: Value, count: int) -> Value:
        """Rows [N, hidden] of a table; only they are cast, if need be, and not all of it."""
        stored = self.stored(name, (count, self.hidden))
        rows = self.graph.op("Gather", stored, indices)
        return rows if stored.dtype == self.graph.dtype else self.graph.cast(rows)

    def stored(self, name: str, shape: tuple[int, ...]) -> Value:
        """A weight as it is stored, or in the graph's dtype if ``convert_weights`` says so."""
        graph, tensor = self.graph, self.weights.external(name, shape)
        if tensor.dtype == graph.dtype or not self.convert_weights:
            return graph.initialiser(tensor)

        def convert() -> ir.TensorProtocol:
            values = tensor.numpy().astype(graph.dtype.numpy())
            tensor.release()
            return ir.tensor(values, dtype=graph.dtype, name=tensor.name)

        return graph.initialiser(
            ir.LazyTensor(convert, dtype=graph.dtype, shape=tensor.shape, name=tensor.name)
        )

    def linear(self, states: Value, name: str, inputs: int, outputs: int, *, bias: bool = True) -> Value:
        """[N, inputs] to [N, outputs] by the weight [outputs, inputs] called ``name``."""
        weight = self.parameter(f"{name}.weight", outputs, inputs)
        added = self.parameter(f"{name}.bias", outputs) if bias else None
        return self.graph.op("Gemm", states, weight, added, transB=1, name=last_part(name))

    def norm_parameters(self, name: str) -> tuple[Value, Value | None]:
        """Weight and bias of a norm over the hidden size."""
        weight = self.parameter(f"{name}.weight", self.hidden)
        return weight, self.parameter(f"{name}.bias", self.hidden) if self.norm_bias else None

    def layer_norm(self, states: Value, name: str) -> Value:
        """LayerNorm over the hidden size."""
        weight, bias = self.norm_parameters(name)
        return self.graph.op(
            "LayerNormalization", states, weight, bias, name=last_part(name), epsilon=self.epsilon
        )

    def heads(self, states: Value, sizes: Sequence[int]) -> list[Value]:
        """Splits the channels of fused heads.

        Args:
            states: [N, groups, sum of sizes, head_dim].
            sizes: how many heads of a group make each part.

        Returns:
            For each part, [N, groups * its size, head_dim].
        """
        graph = self.graph
        names = [f"part_{number}" for number in range(len(sizes))]
        parts = graph.ops("Split", states, graph.constant(list(sizes)), outputs=names, axis=2)
        groups = self.geometry.num_kv_heads
        return [
            graph.reshape(part, -1, groups * size, self.geometry.head_dim)
            for part, size in zip(parts, sizes, strict=True)
        ]

    def activation(self, states: Value, kind: str) -> Value:
        """One of ``ACTIVATIONS``; gelu is the exact one."""
        graph = self.graph
        if kind == "gelu":
            return graph.op("Gelu", states, domain=ORT) if self.fused else self._gelu(states, "none")
        if kind == "gelu_tanh":
            # In float32, the CPU's kernel of the standard operator is three times as fast.
            if self.fused and graph.dtype != ir.DataType.FLOAT:
                return graph.op("FastGelu", states, domain=ORT)
            return self._gelu(states, "tanh")
        if kind == "relu":
            return graph.op("Relu", states)
        if kind == "silu":
            return graph.op("Mul", states, graph.op("Sigmoid", states))
        raise UnsupportedModel(f"no graph for the activation {kind!r}; only for {', '.join(ACTIVATIONS)}")

    def clamp(self, states: Value, limit: float) -> Value:
        """``states`` between -limit and limit; not by Clip, which CUDA does not have for bfloat16."""
        low, high = (self.graph.constant(np.asarray(value)) for value in (-limit, limit))
        return self.graph.op("Min", self.graph.op("Max", states, low), high)

    def _gelu(self, states: Value, approximate: str) -> Value:
        """The standard operator, in float32 for bfloat16, which few runtimes have it for."""
        graph = self.graph
        if graph.dtype != ir.DataType.BFLOAT16:
            return graph.op("Gelu", states, approximate=approximate)
        wide = graph.op("Gelu", graph.cast(states, ir.DataType.FLOAT), approximate=approximate)
        return graph.cast(wide)

    def factor(self, states: Value, factor: float) -> Value:
        """``states`` times a number."""
        return self.graph.op("Mul", states, self.graph.constant(np.asarray(factor)))


def last_part(name: str) -> str:
    """``a.b.c`` -> ``c``, a node's name."""
    return name.split(".")[-1]


class Residual:
    """The residual stream; an addition waits for the norm after it, so that one operator does both."""

    def __init__(self, decoder: Decoder, value: Value):
        self.decoder = decoder
        self._value = value
        self._pending: Value | None = None

    @property
    def value(self) -> Value:
        """[N, hidden], with everything added."""
        if self._pending is not None:
            self._value = self.decoder.graph.op("Add", self._value, self._pending)
            self._pending = None
        return self._value

    def restart(self, value: Value) -> None:
        """Makes ``value`` the stream."""
        self._value, self._pending = value, None

    def add(self, output: Value) -> None:
        """Adds a layer's output [N, hidden]."""
        self._value, self._pending = self.value, output

    def norm(self, name: str) -> Value:
        """LayerNorm of the stream, which stays as it is."""
        decoder = self.decoder
        if self._pending is None or not decoder.fused:
            return decoder.layer_norm(self.value, name)
        normed, self._value = decoder.graph.ops(
            "SkipLayerNormalization",
            self._pending,
            self._value,
            *decoder.norm_parameters(name),
            domain=ORT,
            name=last_part(name),
            outputs=("output", None, None, "sum"),
            epsilon=decoder.epsilon,
        )
        self._pending = None
        return normed

    def keep_last(self, tokens: Tokens) -> None:
        """Keeps only each row's last real token: [B, hidden]."""
        graph = self.decoder.graph
        last = tokens.last_real()
        self._value = graph.op("Gather", self._value, last)
        if self._pending is not None:
            self._pending = graph.op("Gather", self._pending, last)
