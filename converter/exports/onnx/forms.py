"""How the quantised weights of a graph are stored and used: MatMulNBits, or standard operators."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from converter.exports.onnx.graph import ORT, Value
from converter.exports.onnx.rounding import (
    BLOCK,
    Bits,
    Calibrated,
    Steps,
    Stored,
    pack,
    quantised,
    unpack,
)

INT8_ACTIVATIONS = 4
"""``accuracy_level`` of MatMulNBits: the kernel rounds activations to 8 bits, block by block.

The error is about that of 8-bit weights and far below that of 4-bit weights. On the CPU every other level is
several times slower; with 8 bits the kernel unpacks the whole weight at each step. onnxruntime chooses the
same level where it fuses the standard operators.
"""
BAND = 1 << 22
"""Numbers of a weight that are in memory at once when it is stored [inputs, outputs]: then each of its rows
has numbers of every output."""


@dataclass(frozen=True)
class Weight:
    """A quantised weight in the graph."""

    stored: Stored
    packed: Value
    scales: Value
    zeros: Value


class Streamed(ir.LazyTensor):
    """The numbers of a quantised weight, made while they are written.

    Args:
        pieces: makes their bytes, in the order of the file.
        dtype, shape: of the tensor.
    """

    def __init__(
        self, pieces: Callable[[], Iterator[NDArray[Any]]], dtype: ir.DataType, shape: tuple[int, ...]
    ):
        def whole() -> ir.TensorProtocol:
            flat = np.concatenate([piece.ravel() for piece in pieces()])
            if dtype == ir.DataType.UINT4:
                return ir.PackedTensor(flat, dtype, shape=ir.Shape(shape))
            return ir.tensor(flat.reshape(shape))

        super().__init__(whole, dtype, ir.Shape(shape))
        self._pieces = pieces

    def tofile(self, file: Any) -> None:
        """Writes the numbers."""
        for piece in self._pieces():
            file.write(np.ascontiguousarray(piece).data)


class Form(ABC):
    """How quantised weights are stored and used; each is stored once."""

    def __init__(self, graph: ir.Graph):
        self.graph = graph
        self._used: Counter[str] = Counter()

    @abstractmethod
    def product(self, node: ir.Node, tensor: ir.TensorProtocol, bits: Bits) -> Value:
        """The product that ``node``, a Gemm with this weight, computes, without its bias."""

    def op(
        self, before: ir.Node, op_type: str, *inputs: Value | None, domain: str = "", **attributes: Any
    ) -> Value:
        """Inserts a node before another one, named after it; returns its only output."""
        name = f"{before.name}/{op_type}"
        self._used[name] += 1
        if self._used[name] > 1:
            name += f"_{self._used[name] - 1}"
        output = ir.val(f"{name}_output")
        self.graph.insert_before(
            before, ir.node(op_type, inputs, attributes, domain=domain, outputs=[output], name=name)
        )
        return output

    def keep(self, name: str, tensor: ir.TensorProtocol) -> Value:
        """The initialiser of that name, made when it is first asked for."""
        if name not in self.graph.initializers:
            self.graph.register_initializer(ir.val(name, const_value=tensor))
        return self.graph.initializers[name]


class Blocks(Form):
    """Every ``BLOCK`` numbers along a weight's inputs share a scale and a zero point.

    Args:
        graph: the graph.
        calibrated: name of a weight -> its numbers, if they are not to be rounded to the nearest.
    """

    def __init__(self, graph: ir.Graph, calibrated: Mapping[str, Calibrated]):
        super().__init__(graph)
        self._calibrated = calibrated
        self._weights: dict[str | None, Weight] = {}
        self._steps: tuple[Stored, Steps] | None = None

    def product(self, node: ir.Node, tensor: ir.TensorProtocol, bits: Bits) -> Value:
        """See ``Form.product``."""
        return self.multiplied(node, self.weight(tensor, bits, by_column=by_column(node)))

    def rows(self, node: ir.Node, tensor: ir.TensorProtocol) -> Value:
        """The rows of 8 bits that ``node``, a Gather, looks up, in float32."""
        return self.looked_up(node, self.weight(tensor, 8, by_column=False))

    def weight(self, tensor: ir.TensorProtocol, bits: Bits, *, by_column: bool) -> Weight:
        """A stored weight, quantised; ``by_column`` if it is stored [inputs, outputs]."""
        if tensor.name not in self._weights:
            known = self._calibrated.get(tensor.name or "") if bits == 4 else None
            stored = Stored(tensor, by_column, bits, known)
            numbers, scales, zeros = self.shapes(stored)
            name, number = tensor.name, self.number(bits)
            tensors = {
                f"{name}_Q{bits}": Streamed(functools.partial(self._numbers, stored), number, numbers),
                f"{name}_scales": ir.LazyTensor(
                    lambda: self.scales(self._steps_of(stored)), ir.DataType.FLOAT, ir.Shape(scales)
                ),
                f"{name}_zero_points": ir.LazyTensor(
                    lambda: self.zeros(self._steps_of(stored), stored), number, ir.Shape(zeros)
                ),
            }
            values = [self.keep(key, made) for key, made in tensors.items()]
            self._weights[tensor.name] = Weight(stored, *values)
        return self._weights[tensor.name]

    def _numbers(self, stored: Stored) -> Iterator[NDArray[np.uint8]]:
        """The bytes of a weight's numbers. Its scales and zero points are kept, for they are saved next."""
        self._steps = None  # of the weight before
        steps = Steps.empty(stored)
        yield from self.pieces(stored, steps)
        if isinstance(stored.tensor, ir.ExternalTensor):
            stored.tensor.release()  # the file, which it keeps open
        self._steps = stored, steps

    def _steps_of(self, stored: Stored) -> Steps:
        if self._steps is None or self._steps[0] is not stored:
            for _ in self._numbers(stored):
                pass
        assert self._steps is not None
        return self._steps[1]

    @abstractmethod
    def number(self, bits: Bits) -> ir.DataType:
        """The dtype of the tensors of numbers and of zero points."""

    @abstractmethod
    def shapes(self, stored: Stored) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The shapes of the tensors of numbers, scales and zero points."""

    @abstractmethod
    def pieces(self, stored: Stored, steps: Steps) -> Iterator[NDArray[np.uint8]]:
        """Quantises a weight: makes the bytes of its numbers in the order of the file, fills ``steps``."""

    @abstractmethod
    def scales(self, steps: Steps) -> ir.TensorProtocol:
        """The tensor of scales."""

    @abstractmethod
    def zeros(self, steps: Steps, stored: Stored) -> ir.TensorProtocol:
        """The tensor of zero points."""

    @abstractmethod
    def multiplied(self, node: ir.Node, weight: Weight) -> Value:
        """See ``product``."""

    @abstractmethod
    def looked_up(self, node: ir.Node, weight: Weight) -> Value:
        """See ``rows``."""


class Fused(Blocks):
    """MatMulNBits."""

    def number(self, bits: Bits) -> ir.DataType:  # noqa: ARG002
        return ir.DataType.UINT8

    def shapes(self, stored: Stored) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        outputs, blocks, bits = stored.outputs, stored.blocks, stored.bits
        return (outputs, blocks, BLOCK * bits // 8), (outputs, blocks), (outputs, -(-blocks * bits // 8))

    def pieces(self, stored: Stored, steps: Steps) -> Iterator[NDArray[np.uint8]]:
        for _, packed in quantised(stored, steps, range(stored.blocks)):
            yield packed

    def scales(self, steps: Steps) -> ir.TensorProtocol:
        return ir.tensor(steps.scales)

    def zeros(self, steps: Steps, stored: Stored) -> ir.TensorProtocol:  # noqa: ARG002
        return ir.tensor(steps.zeros)

    def multiplied(self, node: ir.Node, weight: Weight) -> Value:
        return self.op(
            node,
            "MatMulNBits",
            node.inputs[0],
            weight.packed,
            weight.scales,
            weight.zeros,
            domain=ORT,
            K=weight.stored.inputs,
            N=weight.stored.outputs,
            bits=weight.stored.bits,
            block_size=BLOCK,
            accuracy_level=INT8_ACTIVATIONS,
        )

    def looked_up(self, node: ir.Node, weight: Weight) -> Value:
        packed, scales, zeros = (
            self.op(node, "Gather", part, node.inputs[1], axis=0)
            for part in (weight.packed, weight.scales, weight.zeros)
        )
        width = self.keep("quantised_width", ir.tensor([0, -1]))
        flat = self.op(node, "Reshape", packed, width)
        rows = self.op(node, "DequantizeLinear", flat, scales, zeros, axis=1, block_size=BLOCK)
        if weight.stored.inputs % BLOCK == 0:
            return rows
        ends = (self.keep(f"quantised_{end}", ir.tensor([end])) for end in (0, weight.stored.inputs, 1))
        return self.op(node, "Slice", rows, *ends)


class Standard(Blocks):
    """DequantizeLinear, with the weight [inputs, outputs], the layout that onnxruntime fuses."""

    def number(self, bits: Bits) -> ir.DataType:
        return ir.DataType.UINT8 if bits == 8 else ir.DataType.UINT4

    def shapes(self, stored: Stored) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        of_blocks = (stored.blocks, stored.outputs)
        return (stored.inputs, stored.outputs), of_blocks, of_blocks

    def pieces(self, stored: Stored, steps: Steps) -> Iterator[NDArray[np.uint8]]:
        # Two blocks fill whole bytes, and so do their zero points.
        count = 2 * max(1, BAND // (2 * BLOCK * stored.outputs))
        for first in range(0, stored.blocks, count):
            blocks = range(first, min(first + count, stored.blocks))
            inputs = min(BLOCK * blocks.stop, stored.inputs) - BLOCK * first
            band = np.empty((inputs, stored.outputs), np.uint8)
            for outputs, packed in quantised(stored, steps, blocks):
                band[:, outputs] = unpack(packed, stored.bits)[:, :inputs].T
            yield pack(band, stored.bits)

    def scales(self, steps: Steps) -> ir.TensorProtocol:
        return ir.tensor(np.ascontiguousarray(steps.scales.T))

    def zeros(self, steps: Steps, stored: Stored) -> ir.TensorProtocol:
        zeros = unpack(steps.zeros, stored.bits)[:, : stored.blocks].T
        packed = pack(zeros, stored.bits)
        if stored.bits == 8:
            return ir.tensor(packed)
        return ir.PackedTensor(packed, ir.DataType.UINT4, shape=ir.Shape(zeros.shape))

    def multiplied(self, node: ir.Node, weight: Weight) -> Value:
        parts = (weight.packed, weight.scales, weight.zeros)
        table = self.op(node, "DequantizeLinear", *parts, axis=0, block_size=BLOCK)
        return self.op(node, "MatMul", node.inputs[0], table)

    def looked_up(self, node: ir.Node, weight: Weight) -> Value:
        # onnxruntime transposes constants once, as it loads them. It fuses a head only where the
        # table, if that is the same, is a constant of its own by then.
        parts = (
            self.op(node, "Gather", self.op(node, "Transpose", part, perm=[1, 0]), node.inputs[1], axis=0)
            for part in (weight.packed, weight.scales, weight.zeros)
        )
        return self.op(node, "DequantizeLinear", *parts, axis=1, block_size=BLOCK)


def by_column(node: ir.Node) -> bool:
    """Whether the weight of a Gemm or a FusedMatMul is stored [inputs, outputs]."""
    return node.op_type == "Gemm" and "transB" not in node.attributes
