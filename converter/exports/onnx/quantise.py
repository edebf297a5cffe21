"""Quantisation of a graph: its weights have 4 or 8 bits, and with ``w8a8`` its activations 8 bits too.

The head and the embedding table have 8 bits always, and float activations, for no later layer evens out an
error of the logits; a tied head and its table read the same stored bytes.

With ``w8a8`` (products of 8-bit integers) the numbers of a weight that lead to one output share a scale.
Activations are rounded while the graph runs: those of one token share a scale, so what is computed for a
token does not depend on other tokens and rows, as it would with onnxruntime's DynamicQuantizeLinear.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from converter.exports.onnx.choices import INTEGER, QUANTISED, computes_in
from converter.exports.onnx.graph import COMPUTE, IR_VERSION, ORT, OUTER, Value
from converter.exports.onnx.rounding import (
    BLOCK,
    TILE,
    Bits,
    Stored,
    dequantised,
    integers,
    output_scales,
    pack,
    quantised,
    rounded,
    rounded_by_output,
    steps_of,
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


def quantise(
    graph: ir.Graph, dtype: str, *, fused: bool, calibrated: Mapping[str, Path] | None = None
) -> None:
    """Quantises the linear layers, the head and the embedding tables of a model.

    The model computes in what ``computes_in`` says of ``dtype``, and scales of blocks are stored in that.

    Linear layers are Gemm or FusedMatMul over initialisers or casts of them, [outputs, inputs] if there is
    ``transB`` and else [inputs, outputs]. ``fused``: MatMulIntegerToFloat, which also multiplies with the
    scales of outputs. ``calibrated``: name of a layer's weight -> file with its numbers.
    """
    weights = _Weights(graph, COMPUTE[computes_in(dtype)], calibrated or {})
    for node in list(graph):
        outer = (node.name or "").startswith(OUTER)
        if node.op_type in ("Gemm", "FusedMatMul"):
            tensor = _initialiser(node.inputs[1])
            if tensor is None:
                raise ValueError(f"the weight of {node.name} is not an initialiser of the graph")
            by_column = node.op_type == "Gemm" and "transB" not in node.attributes
            if dtype == INTEGER and not outer:
                result = weights.integer_product(node, Stored(tensor, by_column), fused=fused)
            else:
                result = weights.product(node, tensor, 8 if outer else QUANTISED[dtype], by_column=by_column)
            if len(node.inputs) > 2:
                # An operator of its own: some onnxruntimes for CUDA refuse MatMulNBits with a bias.
                result = weights.op(node, "Add", result, node.inputs[2])
        elif node.op_type == "Gather" and outer and (tensor := _initialiser(node.inputs[0])) is not None:
            result = weights.rows(node, tensor)
        else:
            continue  # other Gathers pick the first token's hidden states, for a pooler
        _replace(node.outputs[0], result)
        graph.remove(node, safe=True)
    RemoveUnusedNodesPass()(ir.Model(graph, ir_version=IR_VERSION))


def _replace(old: Value, new: Value) -> None:
    """Puts a value in another's place, as an output of the graph too."""
    name, is_output = old.name, old.is_graph_output()
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if is_output:
        old.name = f"{name}_before"
        new.name, new.type, new.shape = name, old.type, old.shape


def _initialiser(value: Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initialiser, which may be cast before it is used; None for a computed value."""
    while value is not None and value.const_value is None:
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type == "Cast" else None
    return None if value is None else value.const_value


class _Streamed(ir.LazyTensor):
    """The numbers of a quantised weight, which ``pieces`` makes in their order while they are written."""

    def __init__(
        self, pieces: Callable[[], Iterator[NDArray[Any]]], dtype: ir.DataType, shape: tuple[int, ...]
    ):
        def whole() -> ir.TensorProtocol:
            return ir.tensor(np.concatenate([piece.ravel() for piece in pieces()]).reshape(shape))

        super().__init__(whole, dtype, ir.Shape(shape))
        self._pieces = pieces

    def tofile(self, file: Any) -> None:
        """Writes the numbers."""
        for piece in self._pieces():
            file.write(np.ascontiguousarray(piece).data)


def _lazy(
    make: Callable[[], NDArray[Any]], shape: tuple[int, ...], dtype: ir.DataType = ir.DataType.FLOAT
) -> ir.LazyTensor:
    """A tensor that is made when it is saved."""
    return ir.LazyTensor(lambda: ir.tensor(make()), dtype, ir.Shape(shape))


class _Blocks(NamedTuple):
    """A weight in blocks, in the graph."""

    stored: Stored
    packed: Value
    scales: Value
    zeros: Value


class _Weights:
    """The quantised weights of a graph, each stored once, and the nodes that use them."""

    def __init__(self, graph: ir.Graph, dtype: ir.DataType, calibrated: Mapping[str, Path]):
        self.graph = graph
        self.dtype = dtype
        self._calibrated = calibrated
        self._names: Counter[str] = Counter()
        self._blocks: dict[str, _Blocks] = {}
        self._steps = functools.lru_cache(maxsize=1)(steps_of)
        """Of the weight that is being saved."""
        self._activations: dict[Value, tuple[Value, Value]] = {}
        """Activations -> their numbers, and the scale of each token."""

    def op(
        self, before: ir.Node, op_type: str, *inputs: Value | None, domain: str = "", **attributes: Any
    ) -> Value:
        """Inserts a node before another one, named after it; returns its only output."""
        name = f"{before.name}/{op_type}"
        self._names[name] += 1
        if self._names[name] > 1:
            name += f"_{self._names[name] - 1}"
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

    def constant(self, content: Any, dtype: type = np.int64) -> Value:
        """An initialiser of numbers."""
        name = "_".join(str(number) for number in np.ravel(content))
        return self.keep(f"quantised_{np.dtype(dtype).name}_{name}", ir.tensor(np.array(content, dtype)))

    # Weights in blocks.

    def product(self, node: ir.Node, tensor: ir.TensorProtocol, bits: Bits, *, by_column: bool) -> Value:
        """The product that ``node`` computes, without its bias."""
        weight = self.blocks(tensor, bits, by_column=by_column)
        level = {"accuracy_level": INT8_ACTIVATIONS} if self.dtype == ir.DataType.FLOAT else {}
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
            bits=bits,
            block_size=BLOCK,
            **level,
        )

    def rows(self, node: ir.Node, tensor: ir.TensorProtocol) -> Value:
        """The rows of 8 bits that ``node``, a Gather, looks up, [any, inputs].

        DequantizeLinear would be one operator, but CUDA has it for other numbers only.
        """
        weight = self.blocks(tensor, 8, by_column=False)
        packed, scales, zeros = (
            self.op(node, "Gather", part, node.inputs[1], axis=0)
            for part in (weight.packed, weight.scales, weight.zeros)
        )
        scales, zeros = (self.op(node, "Unsqueeze", part, self.constant([2])) for part in (scales, zeros))
        packed, zeros = (self.op(node, "Cast", part, to=int(self.dtype)) for part in (packed, zeros))
        values = self.op(node, "Mul", self.op(node, "Sub", packed, zeros), scales)
        rows = self.op(node, "Reshape", values, self.constant([0, -1]))
        if weight.stored.inputs % BLOCK == 0:
            return rows
        ends = (self.constant([end]) for end in (0, weight.stored.inputs, 1))
        return self.op(node, "Slice", rows, *ends)

    def blocks(self, tensor: ir.TensorProtocol, bits: Bits, *, by_column: bool) -> _Blocks:
        """A weight as MatMulNBits takes it; ``by_column`` if it is stored [inputs, outputs]."""
        name = tensor.name or ""
        if name not in self._blocks:
            kind, calibrated = self.dtype.numpy(), self._calibrated.get(name) if bits == 4 else None
            stored = Stored(tensor, by_column, bits, calibrated, kind)
            outputs, blocks = stored.outputs, stored.blocks
            shape, width = (outputs, blocks, BLOCK * bits // 8), -(-blocks * bits // 8)

            def numbers() -> Iterator[NDArray[np.uint8]]:
                for piece in quantised(stored, self._steps(stored)):
                    yield pack(piece, bits)
                stored.close()

            parts = {
                f"{name}_Q{bits}": _Streamed(numbers, ir.DataType.UINT8, shape),
                f"{name}_scales": _lazy(
                    lambda: self._steps(stored).scales.astype(kind), (outputs, blocks), self.dtype
                ),
                f"{name}_zero_points": _lazy(
                    lambda: pack(self._steps(stored).zeros, bits), (outputs, width), ir.DataType.UINT8
                ),
            }
            self._blocks[name] = _Blocks(stored, *(self.keep(key, tensor) for key, tensor in parts.items()))
        return self._blocks[name]

    # Products of integers.

    def integer_product(self, node: ir.Node, stored: Stored, *, fused: bool) -> Value:
        """The same with MatMulInteger, which takes its numbers [inputs, outputs] only."""
        outputs = stored.outputs
        width = outputs + -outputs % TILE
        scales = functools.cache(lambda: output_scales(stored))

        def numbers() -> Iterator[NDArray[np.int8]]:
            yield from integers(stored, scales())
            stored.close()

        packed = self.keep(f"{stored.name}_Q8", _Streamed(numbers, ir.DataType.INT8, (stored.inputs, width)))
        by_output = self.keep(
            f"{stored.name}_scales", _lazy(lambda: np.pad(scales(), (0, width - outputs)), (width,))
        )
        activations = node.inputs[0]
        assert activations is not None
        rows, by_token = self.rounded(node, activations)
        if fused:
            parts = (rows, packed, self.constant(1.0, np.float32), by_output, self.constant(MIDDLE, np.uint8))
            product = self.op(node, "MatMulIntegerToFloat", *parts, domain=ORT)
        else:
            product = self.op(node, "MatMulInteger", rows, packed, self.constant(MIDDLE, np.uint8))
            product = self.op(node, "Cast", product, to=int(ir.DataType.FLOAT))
            product = self.op(node, "Mul", product, by_output)
        product = self.op(node, "Mul", product, by_token)
        if width == outputs:
            return product
        return self.op(node, "Slice", product, *(self.constant([end]) for end in (0, outputs, 1)))

    def rounded(self, node: ir.Node, values: Value) -> tuple[Value, Value]:
        """Activations as numbers, uint8 [..., inputs], and the scale of each token, float32 [..., 1]."""
        if values not in self._activations:
            one, middle = self.constant(1.0, np.float32), self.constant(MIDDLE, np.uint8)
            sizes = self.op(node, "Abs", values)
            largest = self.op(node, "ReduceMax", sizes, self.constant([-1]), keepdims=1)
            largest = self.op(node, "Max", largest, self.constant(SMALLEST, np.float32))
            scales = self.op(node, "Mul", largest, self.constant(1 / LARGEST_ACTIVATION, np.float32))
            parts = self.op(node, "Div", values, scales)
            numbers = self.op(node, "QuantizeLinear", parts, one, middle)
            self._activations[values] = numbers, scales
        return self._activations[values]


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
