"""The values of stored tensors, read in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from converter.source.checkpoint import ITEM_BYTES, Tensor

FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""safetensors dtype -> that of NumPy; bfloat16 is the upper half of a float32."""
BLOCK = 1 << 22
"""Elements that are read at a time."""


def blocks(folder: Path, tensor: Tensor) -> Iterator[Any]:
    """The values of a tensor as flat arrays; as integers if its dtype is not in ``FLOATS``."""
    import numpy as np  # here, since the command line imports this module

    size = ITEM_BYTES[tensor.dtype]
    with (folder / tensor.file).open("rb") as file:
        file.seek(tensor.offset)
        for at in range(tensor.start, tensor.end, BLOCK * size):
            data = file.read(min(BLOCK * size, tensor.end - at))
            values = np.frombuffer(data, FLOATS.get(tensor.dtype, f"<u{size}"))
            wide = tensor.dtype == "BF16"
            yield (values.astype(np.uint32) << 16).view(np.float32) if wide else values


def same_values(folder: Path, first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same numbers, in whatever dtypes."""
    import numpy as np

    if first.shape != second.shape:
        return False
    pairs = zip(blocks(folder, first), blocks(folder, second), strict=True)
    return all(np.array_equal(*pair) for pair in pairs)
