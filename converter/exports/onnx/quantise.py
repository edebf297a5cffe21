"""Weight-only quantisation of a graph to 4 or 8 bits.

Each ``BLOCK`` numbers along a weight's inputs share a scale and a zero point. Weights are read and quantised
piece by piece while the graph is saved. So memory holds the scales and zero points of one weight, and no
weight as a whole.

The head and the embedding table have 8 bits always, for no later layer evens out an error of the logits;
a tied head and its table read the same stored bytes.
"""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from converter.exports.onnx.graph import METADATA, ORT, OUTER, Value
from converter.exports.onnx.rounding import (
    BLOCK,
    Bits,
    Calibrated,
    Steps,
    Stored,
    dequantised,
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


def quantise(
    graph: ir.Graph, bits: Bits, *, fused: bool, calibrated: Mapping[str, Calibrated] | None = None
) -> None:
    """Quantises the linear layers, the head and the embedding tables of a model that computes in float32.

    The weights are read when the graph is saved.

    Args:
        graph: as ``Decoder`` and ``Encoder`` build it. Linear layers are Gemm or FusedMatMul over
            initialisers or casts of them, [outputs, inputs] with ``transB`` and [inputs, outputs] without.
        bits: of the layers' weights.
        fused: use onnxruntime's MatMulNBits; otherwise DequantizeLinear and MatMul, which onnxruntime
            fuses into MatMulNBits when it loads them.
        calibrated: name of a layer's weight -> its numbers; the others are rounded to the nearest.
    """
    found: list[tuple[ir.Node, ir.TensorProtocol, Bits]] = []
    for node in graph:
        outer = (node.name or "").startswith(OUTER)
        if node.op_type in ("Gemm", "FusedMatMul"):
            matrix = _initialiser(node.inputs[1])
            if matrix is None:
                raise ValueError(f"the weight of {node.name} is not an initialiser of the graph")
            found.append((node, matrix, 8 if outer else bits))
        elif node.op_type == "Gather" and outer:
            table = _initialiser(node.inputs[0])
            if table is not None:  # else it picks the first token's hidden states, for a pooler
                found.append((node, table, 8))
    form = (_Fused if fused else _Standard)(graph, calibrated or {})
    for node, tensor, bits_here in found:
        by_column = node.op_type == "Gemm" and "transB" not in node.attributes
        weight = form.weight(tensor, bits_here, by_column=by_column)
        if node.op_type == "Gather":
            result = form.rows(node, weight)
        else:
            result = form.product(node, weight)
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


@dataclass(frozen=True)
class _Weight:
    """A quantised weight in the graph."""

    stored: Stored
    packed: Value
    scales: Value
    zeros: Value


class _Streamed(ir.LazyTensor):
    """The numbers of a quantised weight, made while they are written.

    Args:
        pieces: makes their bytes, in the order of the file.
        dtype, shape: of the tensor.
    """

    def __init__(
        self, pieces: Callable[[], Iterator[NDArray[np.uint8]]], dtype: ir.DataType, shape: tuple[int, ...]
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


class _Form(ABC):
    """How quantised weights are stored and used; each is stored once."""

    def __init__(self, graph: ir.Graph, calibrated: Mapping[str, Calibrated]):
        self.graph = graph
        self._calibrated = calibrated
        self._weights: dict[str | None, _Weight] = {}
        self._used: Counter[str] = Counter()
        self._steps: tuple[Stored, Steps] | None = None

    def weight(self, tensor: ir.TensorProtocol, bits: Bits, *, by_column: bool) -> _Weight:
        """A stored weight, quantised; ``by_column`` if it is stored [inputs, outputs]."""
        if tensor.name not in self._weights:
            known = self._calibrated.get(tensor.name or "") if bits == 4 else None
            stored = Stored(tensor, by_column, bits, known)
            numbers, scales, zeros = self.shapes(stored)
            name, number = tensor.name, self.number(bits)
            tensors = {
                f"{name}_Q{bits}": _Streamed(functools.partial(self._numbers, stored), number, numbers),
                f"{name}_scales": ir.LazyTensor(
                    lambda: self.scales(self._steps_of(stored)), ir.DataType.FLOAT, ir.Shape(scales)
                ),
                f"{name}_zero_points": ir.LazyTensor(
                    lambda: self.zeros(self._steps_of(stored), stored), number, ir.Shape(zeros)
                ),
            }
            values = [self.keep(key, made) for key, made in tensors.items()]
            self._weights[tensor.name] = _Weight(stored, *values)
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
    def product(self, node: ir.Node, weight: _Weight) -> Value:
        """The product that ``node``, a Gemm, computes."""

    @abstractmethod
    def rows(self, node: ir.Node, weight: _Weight) -> Value:
        """The rows that ``node``, a Gather, looks up, in float32."""

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


class _Fused(_Form):
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

    def product(self, node: ir.Node, weight: _Weight) -> Value:
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

    def rows(self, node: ir.Node, weight: _Weight) -> Value:
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


class _Standard(_Form):
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

    def product(self, node: ir.Node, weight: _Weight) -> Value:
        parts = (weight.packed, weight.scales, weight.zeros)
        table = self.op(node, "DequantizeLinear", *parts, axis=0, block_size=BLOCK)
        return self.op(node, "MatMul", node.inputs[0], table)

    def rows(self, node: ir.Node, weight: _Weight) -> Value:
        # onnxruntime transposes constants once, as it loads them. It fuses a head only where the
        # table, if that is the same, is a constant of its own by then.
        parts = (
            self.op(node, "Gather", self.op(node, "Transpose", part, perm=[1, 0]), node.inputs[1], axis=0)
            for part in (weight.packed, weight.scales, weight.zeros)
        )
        return self.op(node, "DequantizeLinear", *parts, axis=1, block_size=BLOCK)


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
        parts = (f"{name}_Q{bits}", f"{name}_scales", f"{name}_zero_points")
        numbers, scales, zeros = (self._array(part) for part in parts)
        if numbers.ndim == 3:  # MatMulNBits: packed, and [outputs, blocks, bytes]
            numbers = unpack(numbers[:outputs].reshape(outputs, -1), bits)
            zeros, scales = unpack(zeros[:outputs].reshape(outputs, -1), bits), scales[:outputs]
        else:
            numbers, zeros, scales = (part[:, :outputs].T for part in (numbers, zeros, scales))
        return dequantised(numbers[:, :inputs], scales.reshape(outputs, -1), zeros)

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
