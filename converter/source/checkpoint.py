"""The weights of a checkpoint, read from its index and headers only: without torch or tensor data.

The safetensors format: 8 bytes with the header's length n (little-endian); n bytes of JSON, name ->
{dtype, shape, data_offsets}; then the tensors' bytes, without gaps
(github.com/huggingface/safetensors, README, "Format").
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard

from converter.config import is_integer
from converter.errors import SourceError, UnsupportedModel
from converter.source.jsonfile import check_pointer, parse_object, read_object

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
TRAINING = "checkpoint.ckpt"
"""Weights as a training program stores them, with its own objects beside them: AlBERTurin's."""
PICKLED = (".bin", ".ckpt")
"""How the names of weight files end that torch.load reads; here their format is called bin."""
INDEXES = (SAFETENSORS_INDEX, BIN_INDEX)

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes per element of each safetensors dtype that a model's weights can have."""

QUANTISED_TENSOR = re.compile(r"\.(qweight|qzeros|scales)$")
"""Finds the tensors of a quantised layer, as GPTQ and AWQ store it."""
WEIGHT = re.compile(r"\.(weight|bias)$")
"""Finds weights. A mask, which may be of integers, can be called bias too, but has more dimensions."""

LARGEST_HEADER = 32 << 20
"""Bytes. A tensor takes about 120; at the safetensors library's limit, 100 MB, parsing needs a GB."""
MOST_DIMENSIONS = 16
"""Dimensions of one tensor; a model's have about five at most."""
LONGEST_FILE = 240
"""Bytes of a weight file's name: file systems allow 255, and while it is written, its name is longer."""
LONGEST_NAME = 512
"""Characters of a tensor's name; a model's have about 100 at most."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    """Offset of the first byte in the data part of the file, in bytes."""
    end: int
    offset: int
    """Offset of the first byte in the whole file, in bytes."""


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a folder: its files and, for safetensors, its tensors."""

    format: Literal["safetensors", "bin"]
    files: Mapping[str, int]
    """Name -> size in bytes, in the order of the shards."""
    index: str | None
    weight_map: Mapping[str, str] = field(default_factory=dict)
    """Tensor -> file, from the index; empty without an index. Tied tensors may be listed and not stored."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """By name; empty for ``.bin`` files, whose tensors are known only after loading."""

    @property
    def parameters(self) -> int | None:
        """Number of stored elements (a tied head counts once); None for ``.bin`` files."""
        return sum(self.elements.values()) if self.tensors else None

    @property
    def elements(self) -> dict[str, int]:
        """safetensors dtype -> number of stored elements; empty for ``.bin`` files."""
        found: dict[str, int] = {}
        for tensor in self.tensors.values():
            found[tensor.dtype] = found.get(tensor.dtype, 0) + math.prod(tensor.shape)
        return found

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The safetensors dtypes in use, the one with the most bytes first."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.end - tensor.start
        return tuple(sorted(sizes, key=lambda dtype: -sizes[dtype]))


def weights_entry(names: Container[str]) -> str | None:
    """The file by which a library finds the weights, an index or the single weight file; None without any.

    Safetensors win over ``.bin``, as in transformers.
    """
    known = (SAFETENSORS, SAFETENSORS_INDEX, BIN, BIN_INDEX, TRAINING)
    return next((name for name in known if name in names), None)


def read_weight_map(index: str, content: Mapping[str, Any]) -> dict[str, str]:
    """The ``weight_map`` in the content of an index, tensor -> file.

    Raises ``SourceError`` if it is no map to files in the index's folder or below it.
    """
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index} has no weight_map; download it again")
    suffix = ".bin" if index == BIN_INDEX else ".safetensors"
    for tensor, file in weight_map.items():
        if QUANTISED_TENSOR.search(tensor):
            raise quantised(f"tensor {tensor[:200]!r}")
        plain = isinstance(file, str) and file.isprintable()
        # Not absolute, and without a part that leads out of the folder.
        if not plain or not file.endswith(suffix) or {"", ".", ".."} & {*file.split("/")}:
            raise SourceError(
                f"{index} places {tensor[:200]!r} in {str(file)[:200]!r}, which is not a weight file "
                "in its folder"
            )
        if len(file.encode()) > LONGEST_FILE:
            raise SourceError(
                f"{index} names a file {file[:80]!r}... of more than {LONGEST_FILE} bytes; give it a shorter "
                "name, there and in the folder"
            )
    return weight_map


def quantised(what: str) -> UnsupportedModel:
    """The error for a quantised checkpoint; ``what`` it has that shows it."""
    return UnsupportedModel(f"the checkpoint is quantised ({what}); convert the unquantised one")


def target_names(files: Iterable[str], index: str | None) -> dict[str, str]:
    """Weight file or index -> its name after conversion: safetensors files, and none in a subfolder."""
    files = list(files)
    if any(name.endswith(PICKLED) or "/" in name for name in files):
        if len(files) == 1:
            return {files[0]: SAFETENSORS}
        shards = {
            name: f"model-{number:05}-of-{len(files):05}.safetensors"
            for number, name in enumerate(files, start=1)
        }
        return shards | ({} if index is None else {index: SAFETENSORS_INDEX})
    return {name: name for name in (*files, index) if name is not None}


def read_checkpoint(folder: Path, tied: Container[str] = ()) -> Checkpoint:
    """Lists and checks the weights of ``folder``; a ``SourceError`` names the wrong file or tensor.

    An index may list tensors in ``tied`` that no file has: transformers takes the embeddings for them.
    """
    first = weights_entry({path.name for path in folder.iterdir() if path.is_file()})
    if first is None:
        raise SourceError(f"{folder} has no weights: neither {SAFETENSORS} nor {BIN}, nor an index of shards")
    index = None
    weight_map: dict[str, str] = {}
    if first in INDEXES:
        index = first
        weight_map = read_weight_map(first, read_object(folder / first))
    files = sorted(set(weight_map.values())) or [first]
    sizes = _sizes(folder, files)
    if first in (BIN, BIN_INDEX, TRAINING):
        return Checkpoint("bin", sizes, index, weight_map)

    tensors = _tensors(folder, files)
    if first == SAFETENSORS:
        _check_stub(folder, len(tensors))
    for name, file in weight_map.items():
        if name not in tensors:
            if name not in tied:
                raise SourceError(f"{index} lists the tensor {name!r}, but {file} does not have it")
        elif tensors[name].file != file:
            raise SourceError(f"{index} places {name!r} in {file}, but it is in {tensors[name].file}")
    return Checkpoint("safetensors", sizes, index, weight_map, tensors)


def _sizes(folder: Path, files: Sequence[str]) -> dict[str, int]:
    """Bytes of each file; raises ``SourceError`` if one is missing, empty, or a pointer to a large file."""
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise SourceError(
            f"{len(missing)} of {len(files)} shards are missing (first: {missing[0]!r}); download them again"
        )
    sizes = {}
    for file in files:
        sizes[file] = (folder / file).stat().st_size
        if sizes[file] == 0:
            raise SourceError(f"{file} is empty; download it again")
        check_pointer(folder / file)
    return sizes


def _check_stub(folder: Path, found: int) -> None:
    """Raises ``SourceError`` if the single file holds few tensors, and an index beside it lists many.

    Libraries load the single file. What else is wrong with an index that is not used does not matter.
    """
    for index in INDEXES:
        try:
            listed = read_object(folder / index).get("weight_map")
        except SourceError:
            continue
        if isinstance(listed, dict) and 2 * found < len(listed):
            raise SourceError(
                f"{SAFETENSORS} has {found} tensors, {index} lists {len(listed)}, and libraries load the "
                f"first; delete {SAFETENSORS} if it is a leftover, else {index} and its shards"
            )


def _tensors(folder: Path, files: list[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_header(folder / file).items():
            if name in tensors:
                raise SourceError(f"the tensor {name!r} is in both {tensors[name].file} and {file}")
            if QUANTISED_TENSOR.search(name):
                raise quantised(f"tensor {name!r}")
            if WEIGHT.search(name) and len(tensor.shape) < 3 and "F" not in tensor.dtype:
                raise UnsupportedModel(
                    f"the tensor {name!r} in {file} has dtype {tensor.dtype}, and weights are floating "
                    "point; convert the checkpoint that it was made from"
                )
            if WEIGHT.search(name) and 0 in tensor.shape:
                raise SourceError(
                    f"the tensor {name!r} in {file} has the shape {list(tensor.shape)} and so no values, as "
                    "DeepSpeed's ZeRO-3 leaves it; gather the weights with its zero_to_fp32.py"
                )
            tensors[name] = replace(tensor, file=file)
    return tensors


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, checked against the file's size, or a ``SourceError``."""
    (header, data_bytes), file = _header(path), path.name
    entries, _ = _entries(header, file)
    tensors = {name: _tensor(name, entry, file, 8 + len(header)) for name, entry in entries.items()}
    reached = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != reached:
            overlap = "overlaps the one before it" if tensor.start < reached else "leaves a gap before it"
            raise SourceError(f"{file} is damaged: the tensor {tensor.name!r} {overlap}; download it again")
        reached = tensor.end
    if reached != data_bytes:
        what = "is truncated" if reached > data_bytes else "has bytes beyond its last tensor"
        raise SourceError(
            f"{file} {what}: {reached} bytes of tensors, {data_bytes} in the file; download it again"
        )
    return tensors


def read_metadata(path: Path) -> dict[str, str] | None:
    """The metadata of one safetensors file, None if it has none; raises as ``read_header`` does."""
    return _entries(_header(path)[0], path.name)[1]


def loads_everywhere(metadata: Mapping[str, str] | None) -> bool:
    """Whether every supported transformers loads a safetensors file with this metadata.

    Version 4 rejects metadata without a format, and takes "tf" and "flax" for weights of these frameworks.
    """
    return metadata is None or metadata.get("format") in ("pt", "mlx")


def _header(path: Path) -> tuple[bytes, int]:
    """The header, and the number of bytes of data after it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > size - 8:
                raise SourceError(
                    f"{path.name} is truncated or not a safetensors file ({size} bytes); download it again"
                )
            if length > LARGEST_HEADER:
                raise SourceError(
                    f"the header of {path.name} has {length} bytes, more than the limit of {LARGEST_HEADER}; "
                    "save the checkpoint as several files"
                )
            header = file.read(length)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error
    return header, size - 8 - length


def _entries(header: bytes, file: str) -> tuple[dict[str, Any], dict[str, str] | None]:
    """A header's entries of tensors, and its metadata if it has any."""
    entries = parse_object(header, f"the header of {file}")
    if rb"\ud" in header.lower():
        try:
            json.dumps(entries, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            # Half of a surrogate pair: Python's reader of JSON takes it, the safetensors library does not.
            raise SourceError(f"the header of {file} is not valid Unicode; download it again") from error
    metadata = entries.pop("__metadata__", None)
    texts = metadata.values() if isinstance(metadata, dict) else [metadata]
    if metadata is not None and not all(isinstance(text, str) for text in texts):
        raise SourceError(f"{file} is damaged: its __metadata__ is not a map of texts; download it again")
    return entries, metadata


def _tensor(name: str, entry: object, file: str, data: int) -> Tensor:
    if not name.isprintable() or len(name) > LONGEST_NAME:
        raise SourceError(f"{file} is damaged: {name[:200]!r} is not a valid tensor name; download it again")
    damaged = SourceError(f"{file} is damaged: the entry of tensor {name!r} is not valid; download it again")
    if not isinstance(entry, dict):
        raise damaged
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise damaged
    if dtype not in ITEM_BYTES:
        raise SourceError(
            f"{file}: the tensor {name!r} has dtype {dtype[:20]!r}, which no supported model uses"
        )
    if len(shape) > MOST_DIMENSIONS or math.prod(shape) * ITEM_BYTES[dtype] != offsets[1] - offsets[0]:
        raise damaged
    return Tensor(name, dtype, tuple(shape), file, offsets[0], offsets[1], data + offsets[0])


def _counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(is_integer(value) and 0 <= value < 1 << 63 for value in values)
