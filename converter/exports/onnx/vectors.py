"""Vectors of texts and tokens, as nodes of a graph."""

from __future__ import annotations

import onnx_ir as ir

from converter.exports.onnx.alibi import Tokens
from converter.exports.onnx.graph import Graph, Value
from converter.source.pooling import Pooling

SHORTEST = 1e-12
"""torch's normalize divides a vector by its length, but not by less than this."""
FEWEST = 1e-9
"""sentence-transformers divides a sum by the number of its tokens, but not by less than this."""


def unit_length(graph: Graph, vectors: Value) -> Value:
    """Float32 vectors [..., any] scaled to unit length."""
    length = graph.op("ReduceL2", vectors, graph.constant([-1]), keepdims=1)
    return graph.op("Div", vectors, graph.op("Max", length, graph.float32(SHORTEST)))


def sentence_vectors(tokens: Tokens, states: Value, pooling: Pooling) -> Value:
    """One vector of each text, float32 [B, modes * hidden].

    Args:
        tokens: of the graph; none is cached, and padding may be on either side.
        states: float32 [B, S, hidden].
        pooling: how.
    """
    graph = tokens.graph
    vectors = [
        _largest(tokens, states) if mode == "max" else _sum(tokens, states, mode) for mode in pooling.modes
    ]
    vector = vectors[0] if len(vectors) == 1 else graph.op("Concat", *vectors, axis=1)
    return unit_length(graph, vector) if pooling.normalised else vector


def _largest(tokens: Tokens, states: Value) -> Value:
    graph = tokens.graph
    real = graph.op("Unsqueeze", graph.cast(tokens.mask, ir.DataType.BOOL), graph.constant([2]))
    shown = graph.op("Where", real, states, graph.float32(float("-inf")))
    return graph.op("ReduceMax", shown, graph.constant([1]), keepdims=0)


def _sum(tokens: Tokens, states: Value, mode: str) -> Value:
    """Every mode but ``max`` is a weighted sum of the states."""
    graph, position = tokens.graph, tokens.all_positions
    weights = graph.cast(tokens.mask, ir.DataType.FLOAT)
    single = mode in ("cls", "lasttoken")
    if mode == "weightedmean":
        weights = graph.op("Mul", weights, graph.op("Add", position, graph.float32(1)))
    elif single:
        at = graph.float32(0) if mode == "cls" else graph.op("Sub", tokens.lengths, graph.float32(1))
        chosen = graph.cast(graph.op("Equal", position, at), ir.DataType.FLOAT)
        weights = graph.op("Mul", weights, chosen)
    row = graph.op("Unsqueeze", weights, graph.constant([1]))
    total = graph.op("Squeeze", graph.op("MatMul", row, states), graph.constant([1]))
    if single:
        return total
    count = graph.op("ReduceSum", weights, graph.constant([1]), keepdims=1)
    count = graph.op("Max", count, graph.float32(FEWEST))
    return graph.op("Div", total, graph.op("Sqrt", count) if mode == "mean_sqrt_len_tokens" else count)
