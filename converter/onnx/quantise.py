"""Weight-only quantisation of a decoder's graph to 4 or 8 bits, with onnxruntime's round-to-nearest kernels.

Each ``BLOCK`` numbers along a weight's inputs share a scale and a zero point. A weight is read, quantised
and let go in pieces, so that whole only the quantised ones are ever held.

The head and the embedding table have 8 bits always, for no later layer evens out an error of the logits;
a tied head and its table read the same stored bytes.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from converter.onnx.graph import ORT, OUTER, Value
from converter.progress import Advance, byte_bar

Bits = Literal[4, 8]

BLOCK = 32
INT8_ACTIVATIONS = 4
"""``accuracy_level`` of MatMulNBits: the kernel rounds activations to 8 bits, block by block.

That costs about what 8-bit weights do and far less than 4-bit ones. On the CPU every other level is
several times slower; for 8 bits it unpacks the whole weight at each step. It is also what onnxruntime
chooses where it fuses the standard operators.
"""
PIECE = 1 << 24
"""How many numbers of a weight are quantised at a time."""


def quantise(graph: ir.Graph, bits: Bits, *, fused: bool, progress: bool = False) -> None:
    """Quantises the linear layers, the head and the embedding table of a decoder that computes in float32.

    Args:
        graph: as ``Decoder`` builds it, where linear layers are Gemm or FusedMatMul over initialisers or
            casts of them: with ``transB`` [outputs, inputs], without [inputs, outputs]. Its weights are read.
        bits: of the layers' weights.
        fused: use onnxruntime's MatMulNBits; without, DequantizeLinear and MatMul, which onnxruntime
            turns into that as it loads them.
        progress: draw a bar.
    """
    found: list[tuple[ir.Node, Value, Bits]] = []
    for node in graph:
        outer = (node.name or "").startswith(OUTER)
        if node.op_type in ("Gemm", "FusedMatMul"):
            found.append((node, _initialiser(node.inputs[1]), 8 if outer else bits))
        elif node.op_type == "Gather" and outer:
            found.append((node, _initialiser(node.inputs[0]), 8))
    form = _Fused(graph) if fused else _Standard(graph)
    total = sum({stored.name: _tensor(stored).nbytes for _, stored, _ in found}.values())
    with byte_bar("quantising", total, show=progress) as advance:
        for node, stored, bits_here in found:
            by_column = node.op_type == "Gemm" and "transB" not in node.attributes
            weight = form.weight(stored, bits_here, advance, by_column=by_column)
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
    """A quantised weight [outputs, inputs] in the graph."""

    outputs: int
    inputs: int
    bits: Bits
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
    """[outputs, bytes of as many zero points as there are blocks]."""


class _Form(ABC):
    """How quantised weights are stored, each once, and used."""

    def __init__(self, graph: ir.Graph):
        self.graph = graph
        self._weights: dict[str | None, _Weight] = {}
        self._used: Counter[str] = Counter()

    def weight(self, stored: Value, bits: Bits, advance: Advance, *, by_column: bool) -> _Weight:
        """An initialiser, quantised; one stored [inputs, outputs] is ``by_column``."""
        tensor = _tensor(stored)
        if tensor.name not in self._weights:
            outputs, inputs = tensor.shape.numpy()[:: -1 if by_column else 1]
            parts = self.store(_quantised(tensor, bits, by_column=by_column), inputs, bits)
            values = [self.keep(f"{tensor.name}_{part}", content) for part, content in parts.items()]
            self._weights[tensor.name] = _Weight(outputs, inputs, bits, *values)
            advance(tensor.nbytes)
        return self._weights[tensor.name]

    @abstractmethod
    def store(self, blocks: _Blocks, inputs: int, bits: Bits) -> dict[str, ir.TensorProtocol]:
        """What a graph keeps of a weight: its numbers, scales and zero points, in this order."""

    @abstractmethod
    def product(self, node: ir.Node, weight: _Weight) -> Value:
        """What ``node``, a Gemm, multiplies."""

    @abstractmethod
    def rows(self, node: ir.Node, weight: _Weight) -> Value:
        """What ``node``, a Gather of rows, looks up, in float32."""

    def op(
        self, before: ir.Node, op_type: str, *inputs: Value | None, domain: str = "", **attributes: Any
    ) -> Value:
        """Inserts a node of one output, which is returned, ahead of another and named after it."""
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
        """The initialiser of that name, made if need be."""
        if name not in self.graph.initializers:
            self.graph.register_initializer(ir.val(name, const_value=tensor))
        return self.graph.initializers[name]


class _Fused(_Form):
    """MatMulNBits."""

    def store(self, blocks: _Blocks, inputs: int, bits: Bits) -> dict[str, ir.TensorProtocol]:
        del inputs  # padded
        return {
            f"Q{bits}": ir.tensor(blocks.packed),
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
            K=weight.inputs,
            N=weight.outputs,
            bits=weight.bits,
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
        if weight.inputs % BLOCK == 0:
            return rows
        ends = (self.keep(f"quantised_{end}", ir.tensor([end])) for end in (0, weight.inputs, 1))
        return self.op(node, "Slice", rows, *ends)


class _Standard(_Form):
    """DequantizeLinear, with the weight [inputs, outputs], which is what onnxruntime can fuse."""

    def store(self, blocks: _Blocks, inputs: int, bits: Bits) -> dict[str, ir.TensorProtocol]:
        count = blocks.scales.shape[1]
        return {
            f"Q{bits}": _columns(blocks.packed, inputs, bits),
            "scales": ir.tensor(np.ascontiguousarray(blocks.scales.T)),
            "zero_points": _columns(blocks.zeros, count, bits),
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


def _initialiser(value: Value | None) -> Value:
    """What ``value`` is or is a cast of."""
    while value is not None and value.const_value is None:
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type == "Cast" else None
    if value is None:
        raise ValueError("a weight that is no initialiser of the graph")
    return value


def _tensor(stored: Value) -> ir.TensorProtocol:
    assert stored.const_value is not None
    return stored.const_value


def _quantised(tensor: ir.TensorProtocol, bits: Bits, *, by_column: bool) -> _Blocks:
    """A weight [outputs, inputs], or [inputs, outputs] ``by_column``, of any float dtype, quantised."""
    with _quiet_root_logger():
        from onnxruntime.quantization.matmul_nbits_quantizer import (
            DefaultWeightOnlyQuantConfig,
            DefaultWeightOnlyQuantizer,
        )
    kernel = DefaultWeightOnlyQuantizer(DefaultWeightOnlyQuantConfig(block_size=BLOCK, bits=bits))
    weight = tensor.numpy().T if by_column else tensor.numpy()
    step = max(1, PIECE // weight.shape[1])
    pieces = []
    for start in range(0, len(weight), step):
        piece = weight[start : start + step].astype(np.float32)
        pieces.append(kernel.qbits_block_quant(np.ascontiguousarray(piece.T)))
    if isinstance(tensor, ir.ExternalTensor):
        del weight  # a view of the file, which cannot be closed before
        tensor.release()
    packed, scales, zeros = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    # Old releases of onnxruntime leave scales and zero points flat.
    return _Blocks(packed, scales.reshape(len(packed), -1), zeros.reshape(len(packed), -1))


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
    """Keeps the quantiser's module from setting logging up for the whole program as it is imported."""
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _drop_unused(graph: ir.Graph) -> None:
    """Removes the casts and the weights that nothing reads any more."""
    for node in reversed(list(graph)):
        if node.op_type == "Cast" and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
