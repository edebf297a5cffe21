"""Finds NaN and infinities in a safetensors file from its bytes, while they are copied or hashed.

Of two positive floating point numbers the larger one has the larger bits, infinity has the largest of all
numbers, and NaN larger ones still (IEEE 754, section 3.4). So the largest bits of a block tell of all its
values: read as signed integers of the positive ones, and as unsigned integers of the negative ones.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable

from converter.errors import SourceError, option
from converter.source.checkpoint import ITEM_BYTES, Tensor

INFINITY = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000}
"""Dtype -> the bits of infinity; those of NaN are larger."""
DAMAGED = f"download the file again (converting with {option.no_verify} keeps such values)"


class Scan:
    """Looks at the bytes of one file, block by block."""

    def __init__(
        self, tensors: Iterable[Tensor], file: str, ignored: re.Pattern[str], remedy: str = DAMAGED
    ) -> None:
        """``ignored`` finds the names of tensors that may hold anything; ``remedy`` ends the message."""
        self.file, self.remedy = file, remedy
        self._tensors = sorted(
            (
                tensor
                for tensor in tensors
                if tensor.dtype in INFINITY and tensor.end > tensor.start and not ignored.search(tensor.name)
            ),
            key=lambda tensor: tensor.offset,
        )
        self._offsets = [tensor.offset for tensor in self._tensors]
        self._at = 0
        self._rest = b""
        """The first bytes of a number that ends in the next block."""

    def __call__(self, block: memoryview) -> None:
        """Takes the next bytes, of any number; a ``SourceError`` names a tensor that is not finite there."""
        import numpy as np  # here, since the command line imports this module

        start, end = self._at, self._at + len(block)
        self._at = end
        for tensor in self._tensors[max(0, bisect_right(self._offsets, start) - 1) :]:
            if tensor.offset >= end:
                break
            stop = tensor.offset + tensor.end - tensor.start
            data: memoryview | bytes = block[max(tensor.offset - start, 0) : max(stop - start, 0)]
            if self._rest:
                data = self._rest + data
            size = ITEM_BYTES[tensor.dtype]
            whole = len(data) - len(data) % size
            self._rest = bytes(data[whole:])
            infinity, sign = INFINITY[tensor.dtype], 1 << 8 * size - 1
            positive, negative = (np.frombuffer(data[:whole], f"<{kind}{size}") for kind in "iu")
            if positive.max(initial=0) >= infinity or negative.max(initial=0) >= sign + infinity:
                raise not_finite(tensor.name, self.file, self.remedy)


def not_finite(name: str, file: str, remedy: str = DAMAGED) -> SourceError:
    return SourceError(f"the tensor {name!r} in {file} has values that are NaN or infinite; {remedy}")
