"""Compares a graph's file with the graph that is built of the repository again.

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
from converter.exports.onnx.report import AGAIN, GraphCheck, failed
from converter.exports.onnx.requirements import graph_pooling
from converter.result.converted import ConvertedRepository


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
    if made.pooling is not None:
        check_pooling(file, repository)
    try:
        built = build_graph(repository, made).model()
    except SourceError as error:
        raise ValidationError(f"{file.name} does not belong to these weights: {error}; {AGAIN}") from error
    try:
        if not made.standalone:
            check_pointers(file, built.graph, repository)
        different = difference(file.model.graph, built.graph)
    except ValidationError:
        raise
    except Exception as error:  # what is raised depends on which part of the file is damaged
        return failed("file", error)
    if different is None:
        return GraphCheck("graph", True, "what is built of these weights and this config")
    detail = f"{different} is not what ntk-convert {__version__} builds"
    if file.model.producer_version != __version__:
        detail += f", and {file.model.producer_version} wrote it"
    return GraphCheck("graph", False, f"{detail}; {AGAIN}")


def check_pooling(file: GraphFile, repository: ConvertedRepository) -> None:
    """Raises ``ValidationError`` unless the repository still pools as the graph does."""
    try:
        now = graph_pooling(repository.folder).to_json()
    except (SourceError, UnsupportedModel) as error:
        raise ValidationError(f"{file.name} makes one vector of each text, but {error}") from error
    if now != file.made.pooling:
        raise ValidationError(
            f"{file.name} was made for the pooling {json.dumps(file.made.pooling)}, and the repository's "
            f"files for sentence-transformers say {json.dumps(now)}; {AGAIN}"
        )


def check_pointers(file: GraphFile, built: ir.Graph, repository: ConvertedRepository) -> None:
    """Raises ``ValidationError`` unless all external data is where the repository has the tensor."""
    for name, value in file.model.graph.initializers.items():
        if not isinstance(value.const_value, ir.ExternalTensor):
            continue
        right = built.initializers[name].const_value if name in built.initializers else None
        if right is None and name in repository.checkpoint.tensors:
            continue  # another graph over these weights
        if not isinstance(right, ir.ExternalTensor) or pointer(value.const_value) != pointer(right):
            what = "is not in the weights" if right is None else "is elsewhere in them now"
            raise ValidationError(
                f"{file.name} does not belong to these weights: its tensor {name!r} {what}; {AGAIN}"
            )


def pointer(tensor: ir.ExternalTensor) -> tuple[Any, ...]:
    """Where a tensor is and what it is."""
    return str(tensor.location), tensor.offset, tensor.length, tensor.dtype, tensor.shape


def difference(found: ir.Graph, right: ir.Graph) -> str | None:
    """The first thing that differs between two graphs; None if they are the same."""
    for name in (*right.initializers, *found.initializers):
        pair = found.initializers.get(name), right.initializers.get(name)
        if None in pair or not same_tensor(*(value.const_value for value in pair if value is not None)):
            return f"the tensor {name}"
    if dict(found.opset_imports) != dict(right.opset_imports):
        return "its opset"
    for ours, theirs in zip_longest(parts(found), parts(right)):
        if ours != theirs:
            return str((ours or theirs)[0])
    return None


def same_tensor(ours: ir.TensorProtocol | None, theirs: ir.TensorProtocol | None) -> bool:
    """Whether two tensors have the same dtype and shape and, if they are constants, the same content."""
    if ours is None or theirs is None or (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    if not isinstance(theirs, ir.Tensor):
        return True
    # Slopes are powers, which another processor may round another way.
    found, right = ours.numpy().astype(np.float64), theirs.numpy().astype(np.float64)
    return bool(np.allclose(found, right, rtol=1e-6, atol=0, equal_nan=True))


def parts(graph: ir.Graph) -> Iterator[tuple[Any, ...]]:
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
            {name: content(attribute) for name, attribute in node.attributes.items()},
        )


def content(attribute: Any) -> Any:
    """The value of an attribute; floats as a file stores them."""
    value = attribute.value
    if isinstance(value, ir.Graph):
        return list(parts(value))
    if isinstance(value, float):
        return np.float32(value)
    return list(value) if isinstance(value, list | tuple) else value
