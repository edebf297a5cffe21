"""Positions, lengths, scaled slopes and temperatures, computed inside the graph from its inputs.

Shapes: B rows, S new tokens a row, T tokens a row with the cached ones, N = B * S, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from converter.onnx.graph import Graph, Value
from converter.scaling.scaling import Scaling, exponents_of, query_factors, rows, temperatures_of
from converter.scaling.slopes import Slopes


class Cache(NamedTuple):
    """Keys and values of one layer, each [B, key-value heads, tokens, ``head_size``]."""

    key: Value
    value: Value


class Tokens:
    """The graph's tokens: their number and their positions.

    Positions and lengths come from the attention mask, as in the templates: padding may be on either
    side, and a cache buffer may be longer than its content. ``ids`` is int64 [B, S], and ``mask`` int64
    [B, T], 1 for real and 0 for padded tokens.

    New tokens are the last S columns. One new token may also stand right behind its row's own tokens, where
    servers that batch requests of different lengths put it (onnxruntime-genai's Engine, and
    ``examples/serve_onnx.py``): then the row's mask is ones and, behind them, zeros.
    """

    def __init__(self, graph: Graph, ids: Value, mask: Value):
        self.graph = graph
        self.ids = ids
        self.mask = mask
        shape = graph.op("Shape", ids)
        self.rows = self._dimension(shape, 0)
        """int64 [1]: B."""
        self.new = self._dimension(shape, 1)
        """int64 [1]: S."""
        self.total = self._dimension(graph.op("Shape", mask), 1)
        """int64 [1]: T."""
        self.first_new = graph.op("Sub", self.total, self.new)
        """int64 [1]: T - S, the cached tokens."""

    @cached_property
    def all_positions(self) -> Value:
        """float32 [B, T]: each token's position among the real ones of its row; 0 before the first."""
        graph = self.graph
        running = graph.op("CumSum", self.mask, graph.constant(1))
        position = graph.op("Max", graph.op("Sub", running, graph.constant(1)), graph.constant(0))
        return graph.cast(position, ir.DataType.FLOAT)

    @cached_property
    def positions(self) -> Value:
        """float32 [B, S]: the positions of the new tokens.

        A new token that stands before the last column has its position there, too: zeros of the mask, which
        are all that follows it, do not count on.
        """
        return self.last_columns(self.all_positions)

    @cached_property
    def lengths(self) -> Value:
        """float32 [B, 1]: the number of real tokens in each row."""
        graph = self.graph
        last = graph.op(
            "Slice", self.all_positions, graph.constant([-1]), graph.constant([1 << 31]), graph.constant([1])
        )
        return graph.op("Add", last, graph.float32(1))

    @cached_property
    def last_new(self) -> Value:
        """int64 [B, 1]: the column of each row's last new token.

        From 0 to T - 1 whatever the mask holds: kernels write where this says.
        """
        graph = self.graph
        last = graph.op("Sub", self.total, graph.constant([1]))
        own_last = graph.op("Sub", self.lengths, graph.float32(1))
        behind = graph.op("Sub", last, graph.cast(own_last, ir.DataType.INT64))
        behind = graph.op("Max", graph.op("Mul", behind, self._is_early), graph.constant([0]))
        return graph.op("Sub", last, graph.op("Min", behind, last))

    @cached_property
    def new_mask(self) -> Value:
        """int64 [B, S]: the mask of the new tokens; 1 for one that stands before the last column."""
        return self.graph.op("Max", self.last_columns(self.mask), self._is_early)

    @cached_property
    def _is_early(self) -> Value:
        """int64 [B, 1]: 1 if the row's one new token stands right behind its own tokens, else 0.

        Such a row has n real tokens, and they fill its first n columns. If there are several new tokens, a
        row like that is padded on the right.
        """
        graph = self.graph
        columns = graph.cast(graph.range(self.total), ir.DataType.FLOAT)
        first = graph.cast(graph.op("Less", columns, self.lengths), ir.DataType.FLOAT)
        real = graph.op("Mul", graph.cast(self.mask, ir.DataType.FLOAT), first)
        # onnxruntime's CUDA provider has no Equal of this opset, and no ReduceMax.
        together = graph.op("GreaterOrEqual", graph.op("ReduceSum", real, graph.constant([1])), self.lengths)
        single = graph.op("Equal", self.new, graph.constant([1]))
        return graph.op("Mul", graph.cast(together, ir.DataType.INT64), graph.cast(single, ir.DataType.INT64))

    def last_columns(self, values: Value) -> Value:
        """The last S columns [B, S] of the values of all tokens, [B, T]."""
        return self.graph.op("Slice", values, self.first_new, self.total, self.graph.constant([1]))

    def last_real(self) -> Value:
        """int64 [B]: among the N new tokens, each row's last one that is not padding."""
        graph = self.graph
        mask = graph.cast(self.last_columns(self.mask), ir.DataType.FLOAT)
        return self._among_all(graph.op("ArgMax", mask, axis=1, keepdims=0, select_last_index=1))

    def last_unlike(self, padding: int) -> Value:
        """int64 [B]: among the N new tokens, each row's last one with another id than ``padding``.

        The first one of a row without any, as transformers' classifiers choose.
        """
        graph = self.graph
        same = graph.op("Equal", self.ids, graph.constant(padding))
        real = graph.cast(graph.op("Not", same), ir.DataType.FLOAT)
        columns = graph.range(self.new)
        ordered = graph.op("Mul", real, graph.cast(columns, ir.DataType.FLOAT))
        return self._among_all(graph.op("ArgMax", ordered, axis=1, keepdims=0))

    def _among_all(self, within: Value) -> Value:
        """From a column of each row to the index among the N new tokens."""
        graph = self.graph
        row = graph.range(self.rows)
        return graph.op("Add", graph.op("Mul", row, self.new), within)

    def _dimension(self, shape: Value, axis: int) -> Value:
        return self.graph.op("Gather", shape, self.graph.constant([axis]))


@dataclass(frozen=True)
class Alibi:
    """The stock slopes of a model, including its own factor on the bias, and their scaling."""

    slopes: Slopes
    scaling: Scaling

    @property
    def rows(self) -> int:
        """1 if all layers have the same slopes, else the number of layers."""
        return rows(self.scaling)

    def slopes_at(self, tokens: Tokens, layer: int) -> Value:
        """float32 [1, 1, H], [B, 1, H] or [B, S, H]: the slopes that each new token's query uses."""
        graph, scaling = tokens.graph, self.scaling
        if not scaling.dynamic:
            return graph.float32(np.asarray(scaling.slopes(self.slopes, layer=layer))[None, None])
        power = graph.float32(-np.asarray(exponents_of(scaling, self.slopes, layer)))
        factor = self._factor(tokens, scaling)
        return graph.op("Mul", graph.float32(self.slopes), power_of(graph, factor, power))

    def query_factors(self, tokens: Tokens, layer: int) -> Value | None:
        """float32 [1 or N, H, 1]: what to multiply the queries by; None without temperatures."""
        graph, scaling, heads = tokens.graph, self.scaling, len(self.slopes)
        temperatures = temperatures_of(scaling, layer)
        if temperatures is None:
            return None
        if not scaling.dynamic:
            static = query_factors(scaling, heads, layer=layer)
            return graph.float32(np.reshape(static, (1, heads, 1)))
        factors = power_of(graph, self._factor(tokens, scaling), graph.float32(temperatures))
        shape = graph.op("Concat", tokens.rows, tokens.new, graph.constant([heads]), axis=0)
        return graph.reshape(graph.op("Expand", factors, shape), -1, heads, 1)

    def _factor(self, tokens: Tokens, scaling: Scaling) -> Value:
        """float32 [B, 1, 1] or [B, S, 1]: the factor a of each new token's query."""
        graph = tokens.graph
        if scaling.dynamic == "position":
            counts = graph.op("Add", tokens.positions, graph.float32(1))
        else:
            counts = tokens.lengths
        rate = graph.float32(scaling.rate / scaling.train_length)
        factor = graph.op("Max", graph.op("Mul", counts, rate), graph.float32(1))
        return graph.op("Unsqueeze", factor, graph.constant([-1]))


def power_of(graph: Graph, factor: Value, power: Value) -> Value:
    """factor ** power, for factors from 1 on. Shapes are broadcast; 1 gives exactly 1.

    onnxruntime's Pow fails on WebGPU if shapes are broadcast (onnxruntime-node 1.24 to 1.30).
    """
    return graph.op("Exp", graph.op("Mul", graph.op("Log", factor), power))
