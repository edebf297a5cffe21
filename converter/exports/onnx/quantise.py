"""Quantisation of a graph: its weights have 4 or 8 bits, and with ``w8a8`` its activations 8 bits too.

Weights are read and quantised piece by piece while the graph is saved. So memory holds the scales and zero
points of one weight, and no weight as a whole.

The head and the embedding table have 8 bits always, and float activations, for no later layer evens out an
error of the logits; a tied head and its table read the same stored bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from converter.exports.onnx.choices import INTEGER, QUANTISED
from converter.exports.onnx.forms import Blocks, Form, Fused, Standard
from converter.exports.onnx.graph import METADATA, OUTER, Value
from converter.exports.onnx.integers import Integers, rounded_by_output
from converter.exports.onnx.rounding import Bits, Calibrated, dequantised, rounded, unpack


def quantise(
    graph: ir.Graph, dtype: str, *, fused: bool, calibrated: Mapping[str, Calibrated] | None = None
) -> None:
    """Quantises the linear layers, the head and the embedding tables of a model that computes in float32.

    The weights are read when the graph is saved.

    Args:
        graph: as ``Decoder`` and ``Encoder`` build it. Linear layers are Gemm or FusedMatMul over
            initialisers or casts of them, [outputs, inputs] with ``transB`` and [inputs, outputs] without.
        dtype: a key of ``QUANTISED``.
        fused: use onnxruntime's own operators; otherwise standard ones, of which onnxruntime fuses
            DequantizeLinear and MatMul into MatMulNBits when it loads them.
        calibrated: name of a layer's weight -> its numbers; the others are rounded to the nearest.
    """
    found: list[tuple[ir.Node, ir.TensorProtocol, bool]] = []
    for node in graph:
        outer = (node.name or "").startswith(OUTER)
        if node.op_type in ("Gemm", "FusedMatMul"):
            matrix = _initialiser(node.inputs[1])
            if matrix is None:
                raise ValueError(f"the weight of {node.name} is not an initialiser of the graph")
            found.append((node, matrix, outer))
        elif node.op_type == "Gather" and outer:
            table = _initialiser(node.inputs[0])
            if table is not None:  # else it picks the first token's hidden states, for a pooler
                found.append((node, table, outer))
    blocks: Blocks = (Fused if fused else Standard)(graph, calibrated or {})
    layers: Form = Integers(graph, fused=fused) if dtype == INTEGER else blocks
    for node, tensor, outer in found:
        if node.op_type == "Gather":
            result = blocks.rows(node, tensor)
        else:
            form = blocks if outer else layers
            result = form.product(node, tensor, 8 if outer else QUANTISED[dtype])
            if len(node.inputs) > 2:
                result = form.op(node, "Add", result, node.inputs[2])
        _replace(node.outputs[0], result)
        graph.remove(node, safe=True)
    _drop_unused(graph)


def _replace(old: Value, new: Value) -> None:
    """Puts a value in another's place, as an output of the graph too."""
    name = old.name
    is_output = old.is_graph_output()
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if is_output:
        old.name = f"{name}_before"
        new.name, new.type, new.shape = name, old.type, old.shape


class QuantisedGraph:
    """What the weights of a quantised graph stand for.

    Args:
        path: of the graph. No weight is read yet.
    """

    def __init__(self, path: Path):
        model = ir.load(path)
        self.calibrated = bool(json.loads(model.metadata_props.get(METADATA, "{}")).get("calibrated"))
        """Whether the layers' weights of 4 bits were rounded by what the layers compute on a text."""
        self._initialisers = model.graph.initializers
        found = (name.rpartition("_Q") for name in self._initialisers)
        self.bits: dict[str, Bits] = {
            weight: 4 if bits == "4" else 8 for weight, _, bits in found if weight and bits in ("4", "8")
        }
        """Stored name of each quantised weight -> its bits."""

    def values(self, name: str, outputs: int, inputs: int) -> NDArray[np.float32]:
        """A weight's values [outputs, inputs]: the first outputs of those that are stored."""
        bits = self.bits[name]
        numbers, scales = self._array(f"{name}_Q{bits}"), self._array(f"{name}_scales")
        if self._by_output(name):
            values: NDArray[np.float32] = numbers.T[:outputs, :inputs] * scales[:outputs, None]
            return values
        zeros = self._array(f"{name}_zero_points")
        if numbers.ndim == 3:  # MatMulNBits: packed, and [outputs, blocks, bytes]
            numbers = unpack(numbers[:outputs].reshape(outputs, -1), bits)
            zeros, scales = unpack(zeros[:outputs].reshape(outputs, -1), bits), scales[:outputs]
        else:
            numbers, zeros, scales = (part[:, :outputs].T for part in (numbers, zeros, scales))
        return dequantised(numbers[:, :inputs], scales.reshape(outputs, -1), zeros)

    def rounded(self, name: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """The values that the graph must store for a weight [outputs, inputs], if not calibrated."""
        return rounded_by_output(weight) if self._by_output(name) else rounded(weight, self.bits[name])

    def _by_output(self, name: str) -> bool:
        """Whether a weight is for products of integers."""
        return f"{name}_zero_points" not in self._initialisers

    def _array(self, name: str) -> NDArray[Any]:
        tensor = self._initialisers[name].const_value
        assert tensor is not None
        return tensor.numpy()


def _initialiser(value: Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initialiser, which may be cast before it is used; None for a computed value."""
    while value is not None and value.const_value is None:
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type == "Cast" else None
    return None if value is None else value.const_value


def _drop_unused(graph: ir.Graph) -> None:
    """Removes casts and weights that are no longer used."""
    for node in reversed(list(graph)):
        if node.op_type == "Cast" and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
