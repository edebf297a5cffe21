"""A checkpoint's tensors as the initialisers of a graph: pointers into safetensors files, no copies.

ONNX external data is (file, offset, length) of raw little-endian bytes, and so is a tensor in a
safetensors file (onnx.proto, ``TensorProto.external_data``).
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from converter.errors import SourceError
from converter.model.alibi import AlibiModel

DTYPES = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}
"""safetensors dtype -> ONNX dtype, for weights that a graph can point to."""


@dataclass(frozen=True)
class Weights:
    """Finds a repository's tensors by the names that the model's code uses."""

    repository: AlibiModel
    follow_links: bool
    """Name the files that links lead to, for a graph that copies the weights."""
    vocabulary: int | None = None
    """Rows of the tables, of which a graph may take the first."""

    def external(self, name: str, shape: tuple[int, ...]) -> ir.ExternalTensor:
        """The tensor as external data, relative to the checkpoint's folder; absolute to follow links.

        ``SourceError`` for one that is missing, of another shape, or not a float of 2 or 4 bytes.
        """
        tensor = self.repository.family.find(self.repository.checkpoint.tensors, name)
        if tensor is None:
            raise SourceError(f"the weights have no tensor {name!r}, which the graph needs")
        length = tensor.end - tensor.start
        if self.vocabulary and tensor.shape[:1] == (self.vocabulary,) and tensor.shape[1:] == shape[1:]:
            length = length // self.vocabulary * shape[0]
        elif tensor.shape != shape:
            raise SourceError(
                f"the tensor {tensor.name!r} has shape {list(tensor.shape)}, not {list(shape)} "
                "as config.json says"
            )
        if tensor.dtype not in DTYPES:
            raise SourceError(
                f"the tensor {tensor.name!r} is {tensor.dtype}; graphs are built over {', '.join(DTYPES)}"
            )
        # With a base folder, onnx-ir reads only files that are not links and have no other hard link.
        folder = self.repository.folder
        path = (folder / tensor.file).resolve()
        return ir.ExternalTensor(
            path if self.follow_links else tensor.file,
            tensor.offset,
            length,
            DTYPES[tensor.dtype],
            shape=ir.Shape(shape),
            name=tensor.name,
            base_dir="" if self.follow_links else folder,
        )
