"""Weight-only quantisation of a decoder's graph to 4 or 8 bits, with onnxruntime's round-to-nearest kernels.

Each ``BLOCK`` numbers along a weight's inputs share a scale and a zero point. Weights are read and quantised
one by one while the graph is saved, so memory does not grow with their number.

The head and the embedding table have 8 bits always, for no later layer evens out an error of the logits;
a tied head and its table read the same stored bytes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from converter.exports.onnx.graph import ORT, OUTER, Value

Bits = Literal[4, 8]

BLOCK = 32
INT8_ACTIVATIONS = 4
"""``accuracy_level`` of MatMulNBits: the kernel rounds activations to 8 bits, block by block.

The error is about that of 8-bit weights and far below that of 4-bit weights. On the CPU every other level is
several times slower; with 8 bits the kernel unpacks the whole weight at each step. onnxruntime chooses the
same level where it fuses the standard operators.
"""
PIECE = 1 << 18
"""Numbers of a weight that are quantised at once. They are transposed first, which is quick if they fit into
the processor's cache."""


def quantise(graph: ir.Graph, bits: Bits, *, fused: bool) -> None:
    """Quantises the linear layers, the head and the embedding table of a decoder that computes in float32.

    The weights are read when the graph is saved.

    Args:
        graph: as ``Decoder`` builds it. Linear layers are Gemm or FusedMatMul over initialisers or casts of
            them, [outputs, inputs] with ``transB`` and [inputs, outputs] without.
        bits: of the layers' weights.
        fused: use onnxruntime's MatMulNBits; otherwise DequantizeLinear and MatMul, which onnxruntime
            fuses into MatMulNBits when it loads them.
    """
    found: list[tuple[ir.Node, ir.TensorProtocol, Bits]] = []
    for node in graph:
        outer = (node.name or "").startswith(OUTER)
        if node.op_type in ("Gemm", "FusedMatMul"):
            found.append((node, _initialiser(node.inputs[1]), 8 if outer else bits))
        elif node.op_type == "Gather" and outer:
            found.append((node, _initialiser(node.inputs[0]), 8))
    form = _Fused(graph) if fused else _Standard(graph)
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
class _Stored:
    """A weight [outputs, inputs] of any float dtype, before it is quantised."""

    tensor: ir.TensorProtocol
    by_column: bool
    """Whether it is stored [inputs, outputs]."""
    bits: Bits

    @property
    def outputs(self) -> int:
        return int(self.tensor.shape.numpy()[1 if self.by_column else 0])

    @property
    def inputs(self) -> int:
        return int(self.tensor.shape.numpy()[0 if self.by_column else 1])

    @property
    def blocks(self) -> int:
        """How many blocks the inputs fill; the last one may be padded."""
        return -(-self.inputs // BLOCK)


@dataclass(frozen=True)
class _Weight:
    """A quantised weight in the graph."""

    stored: _Stored
    packed: Value
    scales: Value
    zeros: Value


@dataclass(frozen=True)
class _Blocks:
    """Numbers of a weight as MatMulNBits stores them: blocks along the inputs, the last one padded."""

    packed: NDArray[np.uint8]
    """[outputs, blocks, bytes of a block]; of two numbers in a byte, the first is in the low half."""
    scales: NDArray[np.float32]
    """[outputs, blocks]."""
    zeros: NDArray[np.uint8]
    """[outputs, bytes of the zero points of all blocks]."""


class _Form(ABC):
    """How quantised weights are stored and used; each is stored once."""

    def __init__(self, graph: ir.Graph):
        self.graph = graph
        self._weights: dict[str | None, _Weight] = {}
        self._used: Counter[str] = Counter()
        self._quantised: tuple[_Stored, Mapping[str, ir.TensorProtocol]] | None = None

    def weight(self, tensor: ir.TensorProtocol, bits: Bits, *, by_column: bool) -> _Weight:
        """A stored weight, quantised; ``by_column`` if it is stored [inputs, outputs]."""
        if tensor.name not in self._weights:
            stored = _Stored(tensor, by_column, bits)
            values = []
            for part, (dtype, shape) in self.parts(stored).items():
                make = functools.partial(self._part, stored, part)
                values.append(self.keep(f"{tensor.name}_{part}", ir.LazyTensor(make, dtype, ir.Shape(shape))))
            self._weights[tensor.name] = _Weight(stored, *values)
        return self._weights[tensor.name]

    def _part(self, stored: _Stored, part: str) -> ir.TensorProtocol:
        """A tensor of a quantised weight. Only the last weight is kept: its tensors are saved together."""
        if self._quantised is None or self._quantised[0] is not stored:
            self._quantised = None
            self._quantised = stored, self.store(_quantised(stored), stored)
        return self._quantised[1][part]

    @abstractmethod
    def parts(self, stored: _Stored) -> dict[str, tuple[ir.DataType, tuple[int, ...]]]:
        """The dtype and shape of the tensors of a weight: numbers, scales and zero points, in this order."""

    @abstractmethod
    def store(self, blocks: _Blocks, stored: _Stored) -> dict[str, ir.TensorProtocol]:
        """The tensors themselves."""

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

    def parts(self, stored: _Stored) -> dict[str, tuple[ir.DataType, tuple[int, ...]]]:
        return {
            f"Q{stored.bits}": (
                ir.DataType.UINT8,
                (stored.outputs, stored.blocks, BLOCK * stored.bits // 8),
            ),
            "scales": (ir.DataType.FLOAT, (stored.outputs, stored.blocks)),
            "zero_points": (ir.DataType.UINT8, (stored.outputs, -(-stored.blocks * stored.bits // 8))),
        }

    def store(self, blocks: _Blocks, stored: _Stored) -> dict[str, ir.TensorProtocol]:
        return {
            f"Q{stored.bits}": ir.tensor(blocks.packed),
            "scales": ir.tensor(blocks.scales),
            "zero_points": ir.tensor(blocks.zeros),
        }

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

    def parts(self, stored: _Stored) -> dict[str, tuple[ir.DataType, tuple[int, ...]]]:
        number = ir.DataType.UINT8 if stored.bits == 8 else ir.DataType.UINT4
        return {
            f"Q{stored.bits}": (number, (stored.inputs, stored.outputs)),
            "scales": (ir.DataType.FLOAT, (stored.blocks, stored.outputs)),
            "zero_points": (number, (stored.blocks, stored.outputs)),
        }

    def store(self, blocks: _Blocks, stored: _Stored) -> dict[str, ir.TensorProtocol]:
        return {
            f"Q{stored.bits}": _columns(blocks.packed, stored.inputs, stored.bits),
            "scales": ir.tensor(np.ascontiguousarray(blocks.scales.T)),
            "zero_points": _columns(blocks.zeros, stored.blocks, stored.bits),
        }

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


def _initialiser(value: Value | None) -> ir.TensorProtocol:
    """The tensor of an initialiser, which may be cast before it is used."""
    while value is not None and value.const_value is None:
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type == "Cast" else None
    if value is None or value.const_value is None:
        raise ValueError("a weight that is not an initialiser of the graph")
    return value.const_value


def _quantised(stored: _Stored) -> _Blocks:
    """Reads a weight and quantises it."""
    with _quiet_root_logger():
        from onnxruntime.quantization.matmul_nbits_quantizer import (
            DefaultWeightOnlyQuantConfig,
            DefaultWeightOnlyQuantizer,
        )
    kernel = DefaultWeightOnlyQuantizer(DefaultWeightOnlyQuantConfig(block_size=BLOCK, bits=stored.bits))
    tensor, bits, outputs, count = stored.tensor, stored.bits, stored.outputs, stored.blocks
    weight = tensor.numpy().T if stored.by_column else tensor.numpy()
    packed = np.empty((outputs, count, BLOCK * bits // 8), np.uint8)
    scales = np.empty((outputs, count), np.float32)
    zeros = np.empty((outputs, -(-count * bits // 8)), np.uint8)
    wholes: tuple[NDArray[Any], ...] = (packed, scales, zeros)
    step = max(1, PIECE // stored.inputs)
    for start in range(0, outputs, step):
        piece = weight[start : start + step].astype(np.float32)
        found = kernel.qbits_block_quant(np.ascontiguousarray(piece.T))
        for whole, part in zip(wholes, found, strict=True):
            rows = whole[start : start + step]
            rows[...] = part.reshape(rows.shape)  # old releases of onnxruntime return some of them flat
    if isinstance(tensor, ir.ExternalTensor):
        del weight  # a view of the file, which keeps it open
        tensor.release()
    return _Blocks(packed, scales, zeros)


def _columns(packed: NDArray[np.uint8], count: int, bits: Bits) -> ir.TensorProtocol:
    """The first ``count`` numbers of each row as a tensor [count, rows]."""
    rows = packed.reshape(len(packed), -1)
    if bits == 8:
        return ir.tensor(np.ascontiguousarray(rows[:, :count].T))
    numbers = np.stack([rows & 15, rows >> 4], axis=-1).reshape(len(rows), -1)[:, :count].T
    flat = np.append(numbers, np.zeros(numbers.size % 2, np.uint8))
    return ir.PackedTensor(flat[::2] | flat[1::2] << 4, ir.DataType.UINT4, shape=numbers.shape)


@contextlib.contextmanager
def _quiet_root_logger() -> Iterator[None]:
    """Keeps the quantiser's module from setting up logging for the whole program when it is imported."""
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _drop_unused(graph: ir.Graph) -> None:
    """Removes casts and weights that are no longer used."""
    for node in reversed(list(graph)):
        if node.op_type == "Cast" and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
