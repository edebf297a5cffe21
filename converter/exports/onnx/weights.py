"""A checkpoint's tensors as the initialisers of a graph: pointers into safetensors files, no copies.

ONNX external data is (file, offset, length) of raw little-endian bytes, and so is a tensor in a
safetensors file (onnx.proto, ``TensorProto.external_data``).
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from converter.errors import SourceError
from converter.source.checkpoint import Checkpoint, Tensor

DTYPES = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}
"""safetensors dtype -> ONNX dtype, for weights that a graph can point to."""


class Weights:
    """Finds tensors by the names that the model's code uses.

    Args:
        folder: where the checkpoint is.
        checkpoint: its tensors.
        prefix: of the backbone's tensors, ending in a dot.
        follow_links: name the files that links lead to, for a graph that copies the weights.
        vocabulary: rows of the tables, of which a graph may take only the first; None to take all.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        prefix: str,
        *,
        follow_links: bool,
        vocabulary: int | None = None,
    ):
        self.folder = folder
        self.prefix = prefix
        self.checkpoint = checkpoint
        self.follow_links = follow_links
        self.vocabulary = vocabulary

    def find(self, name: str) -> Tensor | None:
        """The stored tensor, with or without the backbone's prefix in its name; None if it is missing."""
        tensors = self.checkpoint.tensors
        return tensors.get(self.prefix + name) or tensors.get(name)

    def external(self, name: str, shape: tuple[int, ...]) -> ir.ExternalTensor:
        """The tensor as external data, relative to the checkpoint's folder; absolute to follow links.

        Raises:
            SourceError: missing, of another shape, or not a float of 2 or 4 bytes.
        """
        tensor = self.find(name)
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
        path = (self.folder / tensor.file).resolve()
        return ir.ExternalTensor(
            path if self.follow_links else tensor.file,
            tensor.offset,
            length,
            DTYPES[tensor.dtype],
            shape=ir.Shape(shape),
            name=tensor.name,
            base_dir="" if self.follow_links else self.folder,
        )
