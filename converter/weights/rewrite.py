"""Rewrites one weight file as safetensors: from a ``.bin``, or in another dtype.

It works block by block, so memory use does not depend on the file's size. The safetensors format is
described in ``converter.source.checkpoint``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from converter.errors import SourceError, option
from converter.source.checkpoint import (
    ITEM_BYTES,
    PICKLED,
    Tensor,
    loads_everywhere,
    read_header,
    read_metadata,
)
from converter.weights.files import BLOCK, Look, changed, write_all
from converter.weights.finite import not_finite
from converter.weights.pickles import NAMES, load, pieces, without_tied

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
"""The dtypes that ``--dtype`` converts from and to."""


@dataclass(frozen=True)
class Stored:
    """One tensor, to be read block by block."""

    dtype: str
    """Its name in the safetensors format."""
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[torch.Tensor]]
    """Its elements in order: one-dimensional tensors of its dtype, or of bytes if torch lacks that dtype."""


def rewrite(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    keep: Collection[str] = (),
    expected: Collection[str] = (),
    tied: Collection[str] = (),
    ignored: re.Pattern[str] | None = None,
    look: Look = bool,
) -> str:
    """Writes the tensors of a ``.bin`` or safetensors file to a new safetensors file; returns its SHA-256.

    ``dtype`` (F32, F16 or BF16) rounds all floating point tensors but those in ``keep``. A ``.bin`` file must
    have the names in ``expected`` but for those in ``tied``; these are left out where they are the same
    tensor as another name. ``ignored`` finds the names of tensors that may hold NaN or infinities; None lets
    all of them. ``look`` is called with the written bytes. What does not fit is a ``SourceError``.
    """
    if source.suffix in PICKLED:
        tensors, metadata = _of_bin(source, expected, tied), {}
    else:
        tensors, metadata = _of_safetensors(source), read_metadata(source) or {}
        if not loads_everywhere(metadata):
            metadata = {**metadata, "format": "pt"}
    wanted = {
        name: dtype if dtype is not None and stored.dtype in FLOATS and name not in keep else stored.dtype
        for name, stored in tensors.items()
    }
    # Widest dtypes first, with the data starting at a multiple of 8 bytes: every element is aligned.
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[wanted[name]], name))
    digest = hashlib.sha256()
    with target.open("xb", buffering=0) as file:

        def write(data: bytes | memoryview) -> None:
            digest.update(data)
            look(memoryview(data))
            write_all(file.fileno(), data)

        write(header({name: (wanted[name], tensors[name].shape) for name in order}, metadata))
        for name in order:
            for block in tensors[name].blocks():
                if ignored and not ignored.search(name) and not block.isfinite().all():
                    raise not_finite(name, source.name)
                if wanted[name] != tensors[name].dtype:
                    block = _cast(block, FLOATS[wanted[name]], name)
                write(block.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] = {}) -> bytes:
    """The start of a safetensors file whose tensors, name -> dtype and shape, follow in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + ITEM_BYTES[dtype] * torch.Size(shape).numel()
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _of_bin(source: Path, expected: Collection[str], tied: Collection[str]) -> dict[str, Stored]:
    state = load(source)
    for name in expected:
        if name not in state and name not in tied:
            raise SourceError(f"the index lists the tensor {name!r}, but {source.name} does not have it")

    return {
        name: Stored(NAMES[tensor.dtype], tuple(tensor.shape), partial(pieces, tensor.detach(), BLOCK))
        for name, tensor in without_tied(state, tied).items()
    }


def _of_safetensors(source: Path) -> dict[str, Stored]:
    """Reads instead of mapping: if a mapped file were cut off, SIGBUS would kill the whole process."""

    def blocks(tensor: Tensor) -> Iterator[torch.Tensor]:
        end = tensor.offset + tensor.end - tensor.start
        with source.open("rb", buffering=0) as file:
            for at in range(tensor.offset, end, BLOCK):
                buffer = bytearray(min(BLOCK, end - at))
                if os.preadv(file.fileno(), [buffer], at) != len(buffer):
                    raise changed(source.name)
                yield torch.frombuffer(buffer, dtype=FLOATS.get(tensor.dtype, torch.uint8))

    return {
        name: Stored(tensor.dtype, tensor.shape, partial(blocks, tensor))
        for name, tensor in read_header(source).items()
    }


def _cast(block: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """The nearest values, ties to even; torch rounds float64 to a half precision by way of float32."""
    result = block.to(dtype)
    if not result.isfinite().all() and not torch.equal(result.isfinite(), block.isfinite()):
        largest = block[block.isfinite()].abs().max().item()
        raise SourceError(
            f"the tensor {name!r} has values up to {largest:.3g}, which {str(dtype).removeprefix('torch.')} "
            f"cannot hold; give another {option.dtype}"
        )
    return result
