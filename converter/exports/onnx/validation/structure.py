"""Checks of a graph's file that need no run: it is valid ONNX, and it belongs to this repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from converter.errors import SourceError, UnsupportedModel, ValidationError
from converter.exports.onnx.describe import Description
from converter.exports.onnx.pooling import graph_pooling
from converter.exports.onnx.validation.check import GraphCheck, one_line
from converter.exports.onnx.weights import DTYPES
from converter.result.converted import ConvertedRepository

AGAIN = "export it again: ntk-convert export DIR"


def check_structure(
    path: Path, name: str, made: Description, repository: ConvertedRepository
) -> list[GraphCheck]:
    """Checks that a graph belongs to the repository, and runs the checker of onnx.

    Args:
        path: where the graph is.
        name: its name in the repository.
        made: its description.
        repository: the repository that it should belong to.

    Raises:
        ValidationError: the graph was made for another scaling or other weights.
    """
    scaling = repository.config.get("alibi_scaling")
    if made.alibi_scaling != scaling:
        raise ValidationError(
            f"{name} was made for alibi_scaling {json.dumps(made.alibi_scaling)}, and "
            f"config.json has {json.dumps(scaling)}; {AGAIN}"
        )
    if made.pooling is not None and made.pooling != (now := pooling_now(repository, name)):
        raise ValidationError(
            f"{name} was made for the pooling {json.dumps(made.pooling)}, and the repository's files for "
            f"sentence-transformers say {json.dumps(now)}; {AGAIN}"
        )
    try:
        model = ir.load(path)
        pointers = [
            value.const_value
            for value in model.graph.initializers.values()
            if isinstance(value.const_value, ir.ExternalTensor)
        ]
        if not made.standalone:
            for tensor in pointers:
                check_pointer(tensor, repository, name)
        linked = any(is_link(path.parent / str(tensor.location)) for tensor in pointers)
    except ValidationError:
        raise
    except Exception as error:  # what is raised depends on which part of the file is damaged
        return [GraphCheck("file", False, one_line(error))]
    return [check_onnx(path, linked=linked)]


def pooling_now(repository: ConvertedRepository, name: str) -> dict[str, Any]:
    """How the repository pools; raises ``ValidationError`` if its files do not say it any more."""
    try:
        return graph_pooling(repository.folder).to_json()
    except (SourceError, UnsupportedModel) as error:
        raise ValidationError(f"{name} makes one vector of each text, but {error}") from error


def check_pointer(tensor: ir.ExternalTensor, repository: ConvertedRepository, graph: str) -> None:
    """Raises ``ValidationError`` unless the initialiser points to the stored tensor of its name."""
    stored = repository.checkpoint.tensors.get(tensor.name or "")
    found = (str(tensor.location), tensor.offset, tensor.length, tuple(tensor.shape.numpy()), tensor.dtype)
    if stored is None or found != (
        stored.file,
        stored.offset,
        stored.end - stored.start,
        stored.shape,
        DTYPES.get(stored.dtype),
    ):
        what = "is not in the weights" if stored is None else f"is elsewhere in {stored.file} now"
        raise ValidationError(
            f"{graph} does not belong to these weights: its tensor {tensor.name!r} {what}; {AGAIN}"
        )


def is_link(path: Path) -> bool:
    """Whether a file is a symbolic link, or the same file as another."""
    return path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1)


def check_onnx(path: Path, *, linked: bool) -> GraphCheck:
    """onnx's own checker, with shape inference.

    Args:
        path: the graph.
        linked: the weights are symbolic links, as in the Hub's cache, or hard links to the source's.
            onnxruntime reads those and the checker refuses them, so it gets the weights as inputs.
    """
    name = "onnx checker"
    try:
        if not linked:
            onnx.checker.check_model(str(path), full_check=True)
            return GraphCheck(name, True, "valid, shapes inferred")
        model = onnx.load(path, load_external_data=False)
        for tensor in list(model.graph.initializer):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                model.graph.input.append(
                    onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
                )
                model.graph.initializer.remove(tensor)
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # the checker, shape inference and protobuf raise different errors
        return GraphCheck(name, False, " ".join(str(error).split())[:300])
    return GraphCheck(name, True, "valid, shapes inferred; weights are links and were taken as inputs")
