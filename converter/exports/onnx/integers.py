"""Products of 8-bit integers (W8A8), which processors compute several times faster than those of floats.

The numbers of a weight that lead to one output share a scale. Activations are rounded while the graph runs:
those of one token share a scale, so what is computed for a token does not depend on other tokens and rows,
as it would with onnxruntime's DynamicQuantizeLinear, which rounds the whole batch with one scale.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from converter.exports.onnx.forms import BAND, Form, Streamed, by_column
from converter.exports.onnx.graph import ORT, Value
from converter.exports.onnx.rounding import PIECE, Bits

LARGEST_WEIGHT = 64
"""Of a weight's numbers. On x86 processors without instructions for products of 8 bits (VNNI), onnxruntime
adds two products in 16 bits and would cut off larger sums; 2 * 255 * 64 is below 2**15."""
LARGEST_ACTIVATION, MIDDLE = 127, 128
"""Of an activation's numbers, and what stands for 0: onnxruntime is slow unless they are unsigned."""
TILE = 16
"""A weight is stored with a multiple of this many outputs. On processors with AMX, onnxruntime 1.22 computes
wrong sums for the outputs of a tile that is not full; 1.31 does not."""
SMALLEST = 1e-30
"""Least largest activation of a token, for there must be a scale if all are 0."""


class Integers(Form):
    """MatMulInteger.

    Args:
        graph: the graph.
        fused: use onnxruntime's MatMulIntegerToFloat, which also multiplies with the scales of outputs.
    """

    def __init__(self, graph: ir.Graph, *, fused: bool):
        super().__init__(graph)
        self.fused = fused
        self._activations: dict[Value, tuple[Value, Value]] = {}
        """Activations -> their numbers, and the scale of each token."""

    def product(self, node: ir.Node, tensor: ir.TensorProtocol, bits: Bits) -> Value:  # noqa: ARG002
        """See ``Form.product``; the numbers are [inputs, outputs], for the operator takes no others."""
        inputs, outputs = (int(size) for size in tensor.shape.numpy())
        columns = by_column(node)
        if not columns:
            inputs, outputs = outputs, inputs
        width = outputs + -outputs % TILE
        scales = functools.cache(lambda: output_scales(tensor, columns))
        name = tensor.name
        stored = Streamed(
            lambda: stored_numbers(tensor, scales(), by_column=columns), ir.DataType.INT8, (inputs, width)
        )
        packed = self.keep(f"{name}_Q8", stored)
        factors = ir.LazyTensor(
            lambda: ir.tensor(np.pad(scales(), (0, width - outputs))), ir.DataType.FLOAT, ir.Shape((width,))
        )
        by_output = self.keep(f"{name}_scales", factors)
        activations = node.inputs[0]
        assert activations is not None
        numbers, by_token = self.rounded(node, activations)
        if self.fused:
            parts = (numbers, packed, self.number("one", 1.0), by_output, self.middle)
            product = self.op(node, "MatMulIntegerToFloat", *parts, domain=ORT)
        else:
            product = self.op(node, "MatMulInteger", numbers, packed, self.middle)
            product = self.op(node, "Cast", product, to=int(ir.DataType.FLOAT))
            product = self.op(node, "Mul", product, by_output)
        product = self.op(node, "Mul", product, by_token)
        if width == outputs:
            return product
        ends = (self.keep(f"integer_{end}", ir.tensor([end])) for end in (0, outputs, 1))
        return self.op(node, "Slice", product, *ends)

    def rounded(self, node: ir.Node, values: Value) -> tuple[Value, Value]:
        """Activations as numbers, uint8 [..., inputs], and the scale of each token, float32 [..., 1]."""
        if values not in self._activations:
            last = self.keep("integer_axis", ir.tensor([-1]))
            largest = self.op(node, "ReduceMax", self.op(node, "Abs", values), last, keepdims=1)
            largest = self.op(node, "Max", largest, self.number("smallest", SMALLEST))
            scales = self.op(node, "Mul", largest, self.number("step", 1 / LARGEST_ACTIVATION))
            parts = self.op(node, "Div", values, scales)
            numbers = self.op(node, "QuantizeLinear", parts, self.number("one", 1.0), self.middle)
            self._activations[values] = numbers, scales
        return self._activations[values]

    def number(self, name: str, value: float) -> Value:
        """A constant."""
        return self.keep(f"integer_{name}", ir.tensor(np.float32(value)))

    @property
    def middle(self) -> Value:
        """What stands for 0."""
        return self.keep("integer_middle", ir.tensor(np.uint8(MIDDLE)))


def output_scales(tensor: ir.TensorProtocol, by_column: bool) -> NDArray[np.float32]:
    """The scale of each output of a weight, float32 [outputs], read piece by piece."""
    weight = tensor.numpy().T if by_column else tensor.numpy()
    height = max(1, PIECE // weight.shape[1])
    pieces = (weight[start : start + height] for start in range(0, len(weight), height))
    largest = np.concatenate([np.abs(piece.astype(np.float32)).max(axis=1) for piece in pieces])
    scales: NDArray[np.float32] = np.where(largest > 0, largest, 1) / np.float32(LARGEST_WEIGHT)
    return scales


def stored_numbers(
    tensor: ir.TensorProtocol, scales: NDArray[np.float32], *, by_column: bool
) -> Iterator[NDArray[np.int8]]:
    """See ``bands``; the file that the weight is read from is closed at the end."""
    yield from bands(tensor, scales, by_column=by_column)
    if isinstance(tensor, ir.ExternalTensor):
        tensor.release()


def bands(
    tensor: ir.TensorProtocol, scales: NDArray[np.float32], *, by_column: bool
) -> Iterator[NDArray[np.int8]]:
    """The numbers of a weight as they are stored, int8 [some inputs, outputs and padding] at a time."""
    weight = tensor.numpy() if by_column else tensor.numpy().T
    height = max(1, BAND // weight.shape[1])
    for start in range(0, len(weight), height):
        numbers = np.rint(weight[start : start + height].astype(np.float32) / scales).astype(np.int8)
        yield np.pad(numbers, ((0, 0), (0, -len(scales) % TILE)))


def rounded_by_output(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """A weight [outputs, inputs] rounded to the nearest values that the numbers of ``Integers`` stand for."""
    scales = output_scales(ir.tensor(weight), by_column=False)[:, None]
    values: NDArray[np.float32] = np.rint(weight / scales) * scales
    return values
