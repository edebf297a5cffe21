"""Compares a graph's file with the graph that is built of the repository again.

What the file stores of its own, such as quantised weights, is not compared here: the run under onnxruntime
uses it, and the manifest has its digest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest

import numpy as np
import onnx_ir as ir

from converter._version import __version__
from converter.errors import SourceError, UnsupportedModel
from converter.model.alibi import AlibiModel
from converter.onnx.build import build_graph
from converter.onnx.describe import Description
from converter.onnx.report import AGAIN, GraphCheck, failed
from converter.source.sentence_transformers import Pooling, read_pooling
from converter.source.source import Source


def check_structure(model: ir.Model, made: Description, repository: AlibiModel) -> GraphCheck:
    """Whether a graph is what this version builds of a repository, whose config names the task's class."""
    scaling = repository.result_config.get("alibi_scaling")
    try:
        pooling = made.pooling and stated_pooling(repository.source, made.pooling)
        for what, own, now in (
            ("alibi_scaling", made.alibi_scaling, scaling),
            ("pooling", made.pooling, pooling),
        ):
            if own != now:
                own, now = (json.dumps(each, default=str) for each in (own, now))
                detail = f"made for the {what} {own}, and the repository has {now}"
                return GraphCheck("graph", False, f"{detail}; {AGAIN}")
        built = build_graph(repository, made).model()
        different = difference(model.graph, built.graph, standalone=made.standalone)
    except (SourceError, UnsupportedModel) as error:
        return GraphCheck("graph", False, f"does not belong to this repository: {error}; {AGAIN}")
    except Exception as error:  # what is raised depends on which part of the file is damaged
        return failed("file", error)
    if different is None:
        return GraphCheck("graph", True, "what is built of these weights and this config")
    detail = f"{different} is not what ntk-convert {__version__} builds"
    if model.producer_version != __version__:
        detail += f", and {model.producer_version} wrote it"
    return GraphCheck("graph", False, f"{detail}; {AGAIN}")


def stated_pooling(source: Source, made: Pooling) -> Pooling:
    """How a repository's files say to pool; if they do not say it, ``made``, which the user gave."""
    try:
        return read_pooling(source) or made
    except UnsupportedModel:
        # The settings are missing. Then the user gave the mode, and modules.json says the rest.
        return read_pooling(source, made.modes[0]) or made


def difference(found: ir.Graph, right: ir.Graph, *, standalone: bool) -> str | None:
    """The first thing that differs between two graphs; None if they are the same."""
    for name in (*right.initializers, *found.initializers):
        pair = found.initializers.get(name), right.initializers.get(name)
        tensors = [value.const_value for value in pair if value is not None]
        if len(tensors) < 2 or not same_tensor(*tensors, standalone=standalone):
            return f"the tensor {name}"
    if dict(found.opset_imports) != dict(right.opset_imports):
        return "its opset"
    for ours, theirs in zip_longest(parts(found), parts(right)):
        if ours != theirs:
            return str((ours or theirs)[0])
    return None


def same_tensor(
    ours: ir.TensorProtocol | None, theirs: ir.TensorProtocol | None, *, standalone: bool
) -> bool:
    """Whether two tensors have the same dtype and shape, and content unless that is the file's own."""
    if ours is None or theirs is None or (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    if isinstance(theirs, ir.ExternalTensor) and not standalone:
        return isinstance(ours, ir.ExternalTensor) and place(ours) == place(theirs)
    if not isinstance(theirs, ir.Tensor):
        return True
    # Slopes are powers, which another processor may round another way.
    found, right = ours.numpy().astype(np.float64), theirs.numpy().astype(np.float64)
    return bool(np.allclose(found, right, rtol=1e-6, atol=0, equal_nan=True))


def place(tensor: ir.ExternalTensor) -> tuple[str, int | None, int | None]:
    """Where the bytes of a weight are."""
    return str(tensor.location), tensor.offset, tensor.length


def parts(graph: ir.Graph) -> Iterator[tuple[str, bytes]]:
    """What a graph is made of: each part's name for people, and its content as a file stores it."""
    for kind, found in (("input", graph.inputs), ("output", graph.outputs), ("node", graph)):
        for each in found:
            yield f"the {kind} {each.name}", ir.to_proto(each).SerializeToString(deterministic=True)
