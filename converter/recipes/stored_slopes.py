"""What the stored tensors say about positions: their slopes, or that the model has other positions."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from pathlib import Path

from converter.errors import SourceError, UnsupportedModel
from converter.families import Family
from converter.scaling.slopes import Slopes
from converter.source.checkpoint import Checkpoint, Tensor

ROTARY = re.compile(r"(^|[._])(rotary|rope|inv_freq)")
LEARNED = re.compile(r"(^|\.)(wpe|position_embeddings|embed_positions)\.weight$")


def check_positions(names: Iterable[str]) -> None:
    """Refuses weights that were trained with positions other than ALiBi, whatever their config says."""
    for name in names:
        kind = "rotary" if ROTARY.search(name) else "learned" if LEARNED.search(name) else None
        if kind is not None:
            raise UnsupportedModel(
                f"the weights have a tensor {name!r}, so this model has {kind} positions, not the ALiBi that "
                "its config.json claims; there are no slopes to scale"
            )


def read_slopes(folder: Path, checkpoint: Checkpoint, family: Family, num_heads: int) -> Slopes | None:
    """The ``num_heads`` slopes that the checkpoint stores, in the order of the heads; None if it stores none.

    Raises:
        SourceError: the tensor has another number of values, or they are not positive and finite.
    """
    if family.stored_slopes is None:
        return None
    found = (checkpoint.tensors.get(name) for name in family.tensor_names(family.stored_slopes))
    tensor = next(filter(None, found), None)
    if tensor is None:
        return None
    # The number is checked before they are read, since the tensor may have any size.
    slopes = _values(folder, tensor) if math.prod(tensor.shape) == num_heads else ()
    if not slopes or not all(0 < slope < math.inf for slope in slopes):
        raise SourceError(f"the tensor {tensor.name!r} does not hold {num_heads} positive slopes")
    return slopes


def _values(folder: Path, tensor: Tensor) -> tuple[float, ...]:
    """The values of a small tensor, in float64."""
    letter = {"F64": "d", "F32": "f", "F16": "e", "BF16": "f"}.get(tensor.dtype)
    if letter is None:
        raise SourceError(f"the tensor {tensor.name!r} is {tensor.dtype}, expected floating point")
    with (folder / tensor.file).open("rb") as file:
        file.seek(tensor.offset)
        content = file.read(tensor.end - tensor.start)
    if tensor.dtype == "BF16":  # bfloat16 is the upper half of a float32
        content = b"".join(b"\0\0" + content[at : at + 2] for at in range(0, len(content), 2))
    return tuple(value for (value,) in struct.iter_unpack(f"<{letter}", content))
