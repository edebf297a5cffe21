"""Products with quantised weights: these have 4 or 8 bits, and with ``w8a8`` the activations 8 bits too.

The head and the embedding table have 8 bits always, and float activations, for no later layer evens out an
error of the logits; a tied head and its table read the same stored bytes.

With ``w8a8`` (products of 8-bit integers) the numbers of a weight that lead to one output share a scale.
Activations are rounded while the graph runs: those of one token share a scale, so what is computed for a
token does not depend on other tokens and rows, as it would with onnxruntime's DynamicQuantizeLinear.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from converter.onnx.graph import ORT, Graph, Value
from converter.onnx.options import INTEGER, QUANTISED
from converter.onnx.rounding import (
    BLOCK,
    TILE,
    Bits,
    Stored,
    dequantised,
    integers,
    output_scales,
    pack,
    quantisation_parameters,
    quantised,
    rounded,
    rounded_by_output,
    unpack,
)

INT8_ACTIVATIONS = 4
"""``accuracy_level`` of MatMulNBits: the kernel rounds activations to 8 bits, block by block.

The error is about that of 8-bit weights and far below that of 4-bit weights. On the CPU every other level is
several times slower; with 8 bits the kernel unpacks the whole weight at each step. Graphs that compute in
float16 are for GPUs, and have none: with it, onnxruntime 1.22 computes wrong numbers or NaN on the CPU.
"""
LARGEST_ACTIVATION, MIDDLE = 127, 128
"""Of an activation's numbers, and what stands for 0: onnxruntime is slow unless they are unsigned."""
SMALLEST = 1e-30
"""Least largest activation of a token, for there must be a scale if all are 0."""


class _Streamed(ir.LazyTensor):
    """The numbers of a quantised weight, which ``pieces`` makes in their order while they are written."""

    def __init__(
        self, name: str, pieces: Callable[[], Iterator[NDArray[Any]]], dtype: ir.DataType, *shape: int
    ):
        def whole() -> ir.TensorProtocol:
            return ir.tensor(np.concatenate([piece.ravel() for piece in pieces()]).reshape(shape))

        super().__init__(whole, dtype, ir.Shape(shape), name=name)
        self._pieces = pieces

    def tofile(self, file: Any) -> None:
        for piece in self._pieces():
            file.write(np.ascontiguousarray(piece).data)


def _lazy(name: str, make: Callable[[], NDArray[Any]], dtype: ir.DataType, *shape: int) -> ir.LazyTensor:
    """A tensor that is made when it is saved."""
    return ir.LazyTensor(lambda: ir.tensor(make()), dtype, ir.Shape(shape), name=name)


class _Blocks(NamedTuple):
    """A weight in blocks, in the graph."""

    stored: Stored
    packed: Value
    scales: Value
    zeros: Value


class Quantiser:
    """Adds products and look-ups of quantised weights to a graph; each weight is stored once.

    ``dtype`` is one of ``QUANTISED``. Scales of blocks have the graph's dtype. ``fused``: use
    MatMulIntegerToFloat, which also multiplies with the scales of outputs. ``calibrated``: name of a layer's
    weight -> file with its numbers.
    """

    def __init__(
        self, graph: Graph, dtype: str, *, fused: bool, calibrated: Mapping[str, Path] | None = None
    ):
        self.graph = graph
        self.dtype = dtype
        self.fused = fused
        self._calibrated = calibrated or {}
        self._blocks: dict[str, _Blocks] = {}
        self._parameters = functools.lru_cache(maxsize=1)(quantisation_parameters)
        """Of the weight that is being saved."""
        self._activations: dict[Value, tuple[Value, Value]] = {}
        """Activations -> their numbers, and the scale of each token."""

    def product(self, states: Value, tensor: ir.TensorProtocol, *, by_column: bool = False) -> Value:
        """[..., outputs] of states [..., inputs]; ``by_column`` if the weight is stored [inputs, outputs]."""
        outer = self.graph.outer
        if self.dtype == INTEGER and not outer:
            return self._integer_product(states, Stored(tensor, by_column))
        bits = 8 if outer else QUANTISED[self.dtype]
        weight = self._in_blocks(tensor, bits, by_column=by_column)
        return self.graph.op(
            "MatMulNBits",
            states,
            weight.packed,
            weight.scales,
            weight.zeros,
            domain=ORT,
            K=weight.stored.inputs,
            N=weight.stored.outputs,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=INT8_ACTIVATIONS if self.graph.dtype == ir.DataType.FLOAT else None,
        )

    def rows(self, tensor: ir.TensorProtocol, indices: Value) -> Value:
        """Rows [N, inputs] of a table, which has 8 bits.

        DequantizeLinear would be one operator, but CUDA has it for other numbers only.
        """
        graph, weight = self.graph, self._in_blocks(tensor, 8, by_column=False)
        packed, scales, zeros = (
            graph.op("Gather", part, indices, axis=0) for part in (weight.packed, weight.scales, weight.zeros)
        )
        scales, zeros = (graph.op("Unsqueeze", part, graph.constant([2])) for part in (scales, zeros))
        values = graph.op("Sub", graph.cast(packed), graph.cast(zeros))
        rows = graph.reshape(graph.op("Mul", values, scales), 0, -1)
        inputs = weight.stored.inputs
        return rows if inputs % BLOCK == 0 else self._first(rows, inputs)

    def _in_blocks(self, tensor: ir.TensorProtocol, bits: Bits, *, by_column: bool) -> _Blocks:
        """A weight as MatMulNBits takes it."""
        name = tensor.name or ""
        if name not in self._blocks:
            dtype, calibrated = self.graph.dtype, self._calibrated.get(name) if bits == 4 else None
            stored = Stored(tensor, by_column, bits, calibrated, dtype.numpy())
            outputs, blocks = stored.outputs, stored.blocks

            def numbers() -> Iterator[NDArray[np.uint8]]:
                for piece in quantised(stored, self._parameters(stored)):
                    yield pack(piece, bits)
                stored.close()

            def scales() -> NDArray[Any]:
                return self._parameters(stored).scales.astype(dtype.numpy())

            def zeros() -> NDArray[np.uint8]:
                return pack(self._parameters(stored).zeros, bits)

            byte = ir.DataType.UINT8
            parts = (
                _Streamed(f"{name}_Q{bits}", numbers, byte, outputs, blocks, BLOCK * bits // 8),
                _lazy(f"{name}_scales", scales, dtype, outputs, blocks),
                _lazy(f"{name}_zero_points", zeros, byte, outputs, -(-blocks * bits // 8)),
            )
            self._blocks[name] = _Blocks(stored, *map(self.graph.initialiser, parts))
        return self._blocks[name]

    def _integer_product(self, states: Value, stored: Stored) -> Value:
        """The same with MatMulInteger, which takes its numbers [inputs, outputs] only."""
        graph, outputs = self.graph, stored.outputs
        width = outputs + -outputs % TILE
        scales = functools.cache(lambda: output_scales(stored))

        def numbers() -> Iterator[NDArray[np.int8]]:
            yield from integers(stored, scales())
            stored.close()

        def padded() -> NDArray[np.float32]:
            return np.pad(scales(), (0, width - outputs))

        streamed = _Streamed(f"{stored.name}_Q8", numbers, ir.DataType.INT8, stored.inputs, width)
        packed = graph.initialiser(streamed)
        by_output = graph.initialiser(_lazy(f"{stored.name}_scales", padded, ir.DataType.FLOAT, width))
        rows, by_token = self._rounded(states)
        middle = graph.constant(MIDDLE, ir.DataType.UINT8)
        if self.fused:
            parts = (rows, packed, graph.float32(1), by_output, middle)
            product = graph.op("MatMulIntegerToFloat", *parts, domain=ORT)
        else:
            product = graph.cast(graph.op("MatMulInteger", rows, packed, middle))
            product = graph.op("Mul", product, by_output)
        product = graph.op("Mul", product, by_token)
        return product if width == outputs else self._first(product, outputs)

    def _rounded(self, values: Value) -> tuple[Value, Value]:
        """Activations as numbers, uint8 [..., inputs], and the scale of each token, float32 [..., 1]."""
        graph = self.graph
        if values not in self._activations:
            largest = graph.op("ReduceMax", graph.op("Abs", values), graph.constant([-1]), keepdims=1)
            largest = graph.op("Max", largest, graph.float32(SMALLEST))
            scales = graph.op("Mul", largest, graph.float32(1 / LARGEST_ACTIVATION))
            middle = graph.constant(MIDDLE, ir.DataType.UINT8)
            numbers = graph.op("QuantizeLinear", graph.op("Div", values, scales), graph.float32(1), middle)
            self._activations[values] = numbers, scales
        return self._activations[values]

    def _first(self, values: Value, count: int) -> Value:
        """The first channels of [N, any]."""
        return self.graph.op("Slice", values, *(self.graph.constant([end]) for end in (0, count, 1)))


class QuantisedGraph:
    """What the weights of a quantised graph stand for; none is read before it is asked for."""

    def __init__(self, initialisers: Mapping[str, Value], *, calibrated: bool):
        self.calibrated = calibrated
        self._initialisers = initialisers
        found = (name.rpartition("_Q") for name in initialisers)
        self.bits: dict[str, Bits] = {
            weight: 4 if bits == "4" else 8 for weight, _, bits in found if weight and bits in ("4", "8")
        }
        """Stored name of each quantised weight -> its bits."""

    def values(self, name: str, outputs: slice, inputs: int) -> NDArray[np.float32]:
        """A weight's values [outputs, inputs], for some of the outputs that are stored."""
        bits = self.bits[name]
        numbers, scales = self._array(f"{name}_Q{bits}"), self._array(f"{name}_scales")[outputs]
        if self._by_output(name):
            values: NDArray[np.float32] = numbers.T[outputs, :inputs] * scales[:, None]
            return values
        packed = numbers[outputs].reshape(len(scales), -1)
        zeros = unpack(self._array(f"{name}_zero_points")[outputs], bits)
        return dequantised(unpack(packed, bits)[:, :inputs], scales, zeros)

    def rounded(self, name: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """The values that the graph must store for a weight [outputs, inputs], if not calibrated."""
        if self._by_output(name):
            return rounded_by_output(weight)
        return rounded(weight, self.bits[name], self._array(f"{name}_scales").dtype)

    def _by_output(self, name: str) -> bool:
        """Whether a weight is for products of integers."""
        return f"{name}_zero_points" not in self._initialisers

    def _array(self, name: str) -> NDArray[Any]:
        tensor = self._initialisers[name].const_value
        assert tensor is not None
        return tensor.numpy()
