"""Graphs derived from a saved one, to run what cannot be run as it is. The nodes are those of the file."""

from __future__ import annotations

import math
import re

import onnx_ir as ir

from converter.onnx.graph import EMBEDDINGS, OUTER

LAYER = re.compile(r"/layers\.(\d+)/")
CACHE = re.compile(r"(?:past_key_values|present)\.(\d+)\.")


def serialised(model: ir.Model) -> bytes:
    """A graph as onnxruntime reads it from memory; its weights stay where they are."""
    content: bytes = ir.to_proto(model).SerializeToString()
    return content


def in_float32(model: ir.Model) -> None:
    """Makes a bfloat16 graph compute in float32, casting its weights as they load.

    The CPU provider has no bfloat16 kernels; this way it can run everything but their rounding.
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


def excerpt(model: ir.Model, layers: int, vocabulary: int) -> None:
    """Keeps a graph's first layers and its first tokens only, over the same weights.

    The later layers are cut out and the head is connected to the last layer that is left; embeddings
    and head are shortened to their first rows, which stand first in the weights' bytes.

    Args:
        model: a graph that ntk-convert wrote; of a quantised one the vocabulary cannot be shortened.
        layers: how many layers to keep.
        vocabulary: how many tokens to keep.
    """
    graph = model.graph
    nodes = {node.name: node for node in graph}
    total = 1 + max((_layer(LAYER, name) for name in nodes if name), default=0)
    full = _rows_of_table(graph)

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


def _rows_of_table(graph: ir.Graph) -> int:
    """The size of the vocabulary: rows of the table that the input ids look up."""
    node = next(
        node for node in graph if node.op_type == "Gather" and (node.name or "").startswith(f"/{EMBEDDINGS}/")
    )
    value = node.inputs[0]
    assert value is not None
    assert value.shape is not None
    return int(value.shape[0])  # type: ignore[arg-type]


def _shorten(value: ir.Value, tensor: ir.TensorProtocol, full: int, rows: int) -> None:
    """Keeps the first rows of a stored table, or of what the graph itself holds one number a row of."""
    sizes = [int(size) for size in tensor.shape.numpy()]
    outer = any((use.node.name or "").startswith(OUTER) for use in value.uses())
    if sizes[:1] != [full] or not outer:
        return
    if not isinstance(tensor, ir.ExternalTensor):
        value.const_value = ir.tensor(tensor.numpy()[:rows], dtype=tensor.dtype, name=tensor.name)
        value.shape = ir.Shape([rows, *sizes[1:]])
        return
    value.const_value = ir.ExternalTensor(
        tensor.location,
        tensor.offset,
        rows * math.prod(sizes[1:]) * int(tensor.dtype.itemsize),
        tensor.dtype,
        shape=ir.Shape([rows, *sizes[1:]]),
        name=tensor.name,
        base_dir=tensor.base_dir,
    )
    value.shape = ir.Shape([rows, *sizes[1:]])


def _layer(pattern: re.Pattern[str], name: str) -> int:
    found = pattern.match(name)
    return int(found[1]) if found else -1
