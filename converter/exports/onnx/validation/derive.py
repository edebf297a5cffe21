"""Graphs derived from a saved one that cannot be run as it is. They have the nodes of the file."""

from __future__ import annotations

import math
import re

import numpy as np
import onnx_ir as ir

from converter.exports.onnx.graph import OUTER

LAYER = re.compile(r"/layers\.(\d+)/")
BY_COLUMN = ("Transpose", "DequantizeLinear")
"""Operators that read a stored weight [inputs, outputs]."""
CACHE = re.compile(r"(?:past_key_values|present)\.(\d+)\.")


def serialised(model: ir.Model) -> bytes:
    """A graph as onnxruntime reads it from memory; its weights stay where they are."""
    content: bytes = ir.to_proto(model).SerializeToString()
    return content


def in_float32(model: ir.Model) -> None:
    """Makes a bfloat16 graph compute in float32, casting its weights as they load.

    The CPU provider has no bfloat16 kernels; this way it can run everything except their rounding.
    """
    graph = model.graph
    nodes = list(ir.traversal.RecursiveGraphIterator(graph))
    for node in nodes:
        if node.op_type == "Cast" and node.attributes.get_int("to") == ir.DataType.BFLOAT16:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
    for value in (*graph.inputs, *graph.outputs):
        if value.dtype == ir.DataType.BFLOAT16:
            value.dtype = ir.DataType.FLOAT
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or tensor.dtype != ir.DataType.BFLOAT16:
            continue
        if not isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.tensor(tensor.numpy().astype("float32"), name=tensor.name)
            value.dtype = ir.DataType.FLOAT
            continue
        users = list(value.uses())
        cast = ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT)}, name=f"/float32/{value.name}")
        cast.outputs[0].name = f"/float32/{value.name}_output"
        graph.insert_before(graph[0], cast)
        for node, index in users:
            node.replace_input_with(index, cast.outputs[0])


def excerpt(model: ir.Model, layers: int, vocabulary: int, full: int) -> None:
    """Keeps only a graph's first layers and first tokens, over the same weights.

    The later layers are removed and the head is connected to the last layer that is kept. Embeddings and head
    keep their first tokens.

    Args:
        model: a graph that ntk-convert wrote.
        layers: how many layers to keep.
        vocabulary: how many tokens to keep.
        full: how many tokens there are.
    """
    graph = model.graph
    nodes = {node.name: node for node in graph}
    total = 1 + max((_layer(LAYER, name) for name in nodes if name), default=0)

    for node in list(graph):
        if _layer(LAYER, node.name or "") >= 0:
            continue
        for index, value in enumerate(node.inputs):
            producer = None if value is None else value.producer()
            if producer is None or _layer(LAYER, producer.name or "") != total - 1:
                continue
            twin = nodes[str(producer.name).replace(f"/layers.{total - 1}/", f"/layers.{layers - 1}/")]
            node.replace_input_with(index, twin.outputs[producer.outputs.index(value)])
    graph.outputs[:] = [value for value in graph.outputs if _layer(CACHE, value.name or "") < layers]
    late = [node for node in graph if _layer(LAYER, node.name or "") >= layers]
    graph.remove(late, safe=False)
    for node in late:
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)
    graph.inputs[:] = [value for value in graph.inputs if _layer(CACHE, value.name or "") < layers]
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]
        elif vocabulary != full and value.const_value is not None:
            _shorten(value, value.const_value, full, vocabulary)
    logits = graph.outputs[0]
    if logits.shape is not None and logits.shape[-1] == full:
        logits.shape = ir.Shape([*logits.shape[:-1], vocabulary])


def _shorten(value: ir.Value, tensor: ir.TensorProtocol, full: int, rows: int) -> None:
    """Keeps the first ``rows`` tokens of a stored table, or of a constant with one number for each token.

    Tables are stored [tokens, ...], where the first rows are the first bytes. The quantised tables of the
    profile ``portable`` are stored [..., tokens]; what is kept of them is read here.
    """
    sizes = [int(size) for size in tensor.shape.numpy()]
    users = [use.node for use in value.uses()]
    axis = 1 if any(node.op_type in BY_COLUMN for node in users) else 0
    if sizes[axis : axis + 1] != [full] or not any((node.name or "").startswith(OUTER) for node in users):
        return
    sizes[axis] = rows
    if axis == 1 or not isinstance(tensor, ir.ExternalTensor):
        kept = tensor.numpy()[:, :rows] if axis else tensor.numpy()[:rows]
        value.const_value = ir.tensor(np.ascontiguousarray(kept), dtype=tensor.dtype, name=tensor.name)
    else:
        value.const_value = ir.ExternalTensor(
            tensor.location,
            tensor.offset,
            math.prod(sizes) * int(tensor.dtype.itemsize),
            tensor.dtype,
            shape=ir.Shape(sizes),
            name=tensor.name,
            base_dir=tensor.base_dir,
        )
    value.shape = ir.Shape(sizes)
    for node in users:
        if node.op_type == "MatMulNBits":
            node.attributes["N"] = ir.AttrInt64("N", rows)


def _layer(pattern: re.Pattern[str], name: str) -> int:
    found = pattern.match(name)
    return int(found[1]) if found else -1
