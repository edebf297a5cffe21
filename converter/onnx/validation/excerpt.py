"""The first layers of a saved graph, for models that are too large to run whole."""

from __future__ import annotations

import math
import re
from pathlib import Path

import onnx_ir as ir

LAYER = re.compile(r"/layers\.(\d+)/")
CACHE = re.compile(r"(?:past_key_values|present)\.(\d+)\.")


def excerpt(path: Path, layers: int, vocabulary: int) -> bytes:
    """The graph with its first layers and its first tokens only, over the same weights.

    The nodes are those of the file: the later layers are cut out and the head is connected to the last
    layer that is left; embeddings and head are shortened to their first rows, which stand first in the
    weights' bytes.

    Args:
        path: a graph that ntk-convert wrote, not quantised.
        layers: how many layers to keep.
        vocabulary: how many tokens to keep.

    Returns:
        The serialised graph; its external data are relative to the folder of ``path``.
    """
    model = ir.load(path)
    graph = model.graph
    nodes = {node.name: node for node in graph}
    total = 1 + max((_layer(LAYER, name) for name in nodes if name), default=0)
    full = graph.outputs[0].shape[2]  # type: ignore[index]

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
        elif vocabulary != full and value.shape is not None and value.shape[0] == full:
            _shorten(value, vocabulary)
    logits = graph.outputs[0]
    logits.shape = ir.Shape([*logits.shape[:2], vocabulary])  # type: ignore[index]
    content: bytes = ir.to_proto(model).SerializeToString()
    return content


def _shorten(value: ir.Value, rows: int) -> None:
    tensor = value.const_value
    if not isinstance(tensor, ir.ExternalTensor):
        return
    sizes = [int(size) for size in tensor.shape.numpy()]
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
