"""A graph's file beside the same graph, built again from its repository.

What the file stores of its own, such as quantised weights, is not compared here: the run under onnxruntime
uses it, and the manifest has its digest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import onnx_ir as ir

from converter._version import __version__
from converter.errors import SourceError, UnsupportedModel, ValidationError
from converter.exports.onnx.build import build_graph
from converter.exports.onnx.describe import GraphFile
from converter.exports.onnx.requirements import graph_pooling
from converter.exports.onnx.validation.check import GraphCheck
from converter.result.converted import ConvertedRepository

AGAIN = "export it again: ntk-convert export DIR"


def check_structure(file: GraphFile, repository: ConvertedRepository) -> GraphCheck:
    """Whether a graph is what this version builds of a repository.

    Args:
        file: the graph.
        repository: its config names the class that computes the graph's task.

    Raises:
        ValidationError: the graph was made for another scaling, another pooling or other weights.
    """
    made, scaling = file.made, repository.config.get("alibi_scaling")
    if made.alibi_scaling != scaling:
        raise ValidationError(
            f"{file.name} was made for alibi_scaling {json.dumps(made.alibi_scaling)}, and "
            f"config.json has {json.dumps(scaling)}; {AGAIN}"
        )
    if made.pooling is not None and made.pooling != (now := _pooling_now(repository, file.name)):
        raise ValidationError(
            f"{file.name} was made for the pooling {json.dumps(made.pooling)}, and the repository's files "
            f"for sentence-transformers say {json.dumps(now)}; {AGAIN}"
        )
    try:
        built = build_graph(repository, made).model()
    except SourceError as error:
        raise ValidationError(f"{file.name} does not belong to these weights: {error}; {AGAIN}") from error
    if not made.standalone:
        _check_pointers(file, built.graph, repository)
    different = _difference(file.model.graph, built.graph)
    if different is None:
        return GraphCheck("graph", True, "what is built of these weights and this config")
    detail = f"{different} is not what ntk-convert {__version__} builds"
    if file.model.producer_version != __version__:
        detail += f", and {file.model.producer_version} wrote it"
    return GraphCheck("graph", False, f"{detail}; {AGAIN}")


def _pooling_now(repository: ConvertedRepository, name: str) -> dict[str, Any]:
    """How the repository pools; raises ``ValidationError`` if its files do not say it any more."""
    try:
        return graph_pooling(repository.folder).to_json()
    except (SourceError, UnsupportedModel) as error:
        raise ValidationError(f"{name} makes one vector of each text, but {error}") from error


def _check_pointers(file: GraphFile, built: ir.Graph, repository: ConvertedRepository) -> None:
    """Raises ``ValidationError`` unless all external data is where the repository has the tensor."""
    for name, value in file.model.graph.initializers.items():
        if not isinstance(value.const_value, ir.ExternalTensor):
            continue
        right = built.initializers[name].const_value if name in built.initializers else None
        if right is None and name in repository.checkpoint.tensors:
            continue  # another graph over these weights
        if not isinstance(right, ir.ExternalTensor) or _pointer(value.const_value) != _pointer(right):
            what = "is not in the weights" if right is None else "is elsewhere in them now"
            raise ValidationError(
                f"{file.name} does not belong to these weights: its tensor {name!r} {what}; {AGAIN}"
            )


def _pointer(tensor: ir.ExternalTensor) -> tuple[Any, ...]:
    return str(tensor.location), tensor.offset, tensor.length, *_described(tensor)


def _difference(found: ir.Graph, right: ir.Graph) -> str | None:
    """The first thing that differs between two graphs; None if they are the same."""
    for name, value in right.initializers.items():
        if name not in found.initializers or not _same_tensor(found.initializers[name], value):
            return f"the tensor {name}"
    for name in found.initializers:
        if name not in right.initializers:
            return f"the tensor {name}"
    if dict(found.opset_imports) != dict(right.opset_imports):
        return "its opset"
    for ours, theirs in zip_longest(_parts(found), _parts(right)):
        if ours != theirs:
            return str((ours or theirs)[0])
    return None


def _same_tensor(found: ir.Value, right: ir.Value) -> bool:
    """Whether two initialisers have the same dtype and shape and, if they are constants, the same content."""
    ours, theirs = found.const_value, right.const_value
    if ours is None or theirs is None or _described(ours) != _described(theirs):
        return False
    if not isinstance(theirs, ir.Tensor) or ours.dtype == ir.DataType.BFLOAT16:
        return True
    # Slopes are powers, which another processor may round another way.
    return bool(np.allclose(ours.numpy(), theirs.numpy(), rtol=1e-6, atol=0, equal_nan=True))


def _described(tensor: ir.TensorProtocol) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape.numpy())


def _parts(graph: ir.Graph) -> Iterator[tuple[Any, ...]]:
    """What a graph is made of, in comparable values, each with a name for people first."""
    for kind, values in (("input", graph.inputs), ("output", graph.outputs)):
        for value in values:
            yield f"the {kind} {value.name}", value.dtype, [str(size) for size in value.shape or ()]
    for node in graph:
        yield (
            f"the node {node.name}",
            (node.domain, node.op_type),
            [value.name if value is not None else "" for value in node.inputs],
            [value.name or "" for value in node.outputs],
            {name: _attribute(attribute) for name, attribute in node.attributes.items()},
        )


def _attribute(attribute: Any) -> Any:
    """The value of an attribute; floats as a file stores them."""
    value = attribute.value
    if isinstance(value, ir.Graph):
        return list(_parts(value))
    if isinstance(value, float):
        return np.float32(value)
    return list(value) if isinstance(value, list | tuple) else value
