"""Reads pickled weights as tensors only, without running any of their code."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from converter.errors import SourceError
from converter.source.checkpoint import LONGEST_NAME, MOST_DIMENSIONS, TRAINING
from converter.weights.files import is_zip

NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""torch dtype of a model's tensors -> its name in the safetensors format."""
MOST_EXPANSION = 8
"""The tensors together may have at most this many times the file's bytes. A tensor with several names, or one
that repeats a number, is stored once but written out in full; a hostile file could fill the disk that way."""


def load(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one ``.bin`` file, in its order, memory-mapped if possible; or a ``SourceError``."""
    state = _unpickle(path)
    if path.name == TRAINING and isinstance(state, dict):
        state = state.get("state_dict")
    if not isinstance(state, dict):
        raise SourceError(f"{path.name} holds a {type(state).__name__}, not a dict of named tensors")
    tensors = {name: value for name, value in state.items() if not isinstance(value, Ignored)}
    for name, tensor in tensors.items():
        _check_name(path.name, name, tensor)
        _check_tensor(path.name, name, tensor)
    size = path.stat().st_size
    total = sum(tensor.nbytes for tensor in tensors.values())
    if total > MOST_EXPANSION * size:
        raise SourceError(
            f"{path.name} has {size} bytes, but its tensors share storage and would take {total} when "
            f"written; at most {MOST_EXPANSION} times the file's size is allowed"
        )
    return tensors


class Ignored:
    """Stands for an object of a training program, of which nothing is read and no code is run."""

    def __init__(self, *args: object, **keywords: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _unpickle(path: Path) -> Any:
    """What a pickle holds, of tensors and plain containers; a ``SourceError`` if it holds anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual pickles: they either load or raise
            with safe_globals(_ignored(path)):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip(path))
    except MemoryError:
        raise
    except Exception as error:  # a hostile pickle can raise anything
        what = _what_is_wrong(str(error))
        raise SourceError(f"{path.name} {what}; convert a safetensors version of the checkpoint") from error


def _ignored(path: Path) -> list[Callable[..., object] | tuple[Callable[..., object], str]]:
    """Stand-ins for the classes in a training program's checkpoint; in other files they are refused."""
    names = get_unsafe_globals_in_checkpoint(path) if path.name == TRAINING else []
    return [(Ignored, name) for name in names]


def _what_is_wrong(said: str) -> str:
    """What is wrong with a pickle, by what torch said as it refused it."""
    called = re.search(r"GLOBAL (\S{1,100})", said)
    if called:
        return f"holds more than tensors: {called[1]}, which this tool does not run"
    _, _, reason = said.rpartition("WeightsUnpickler error: ")
    line, _, _ = reason.strip().partition("\n")
    sentence, _, _ = line.partition(". ")
    return f"is damaged or holds more than tensors, and this tool does not run its code ({sentence[:160]})"


def _check_name(file: str, name: object, tensor: object) -> None:
    """Raises ``SourceError`` for what is not a tensor with a name that one can have."""
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise SourceError(
            f"{file}: {_short(name)} is a {type(tensor).__name__}, not a tensor with a text name"
        )
    if not name.isprintable() or len(name) > LONGEST_NAME or name == "__metadata__":
        raise SourceError(f"{file}: {_short(name)} is not a valid tensor name; the file is damaged")


def _check_tensor(file: str, name: str, tensor: torch.Tensor) -> None:
    """Raises ``SourceError`` for a kind of tensor that no model has, or one with too few stored elements."""
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_neg()
    if not plain or tensor.dtype not in NAMES or tensor.dim() > MOST_DIMENSIONS:
        kind = f"negated {tensor.dtype}" if tensor.is_neg() else f"{tensor.dtype}"
        raise SourceError(
            f"{file}: {name!r} is a {tensor.layout} {kind} tensor of {tensor.dim()} dimensions, "
            "which no model uses"
        )
    if _reach(tensor) > tensor.untyped_storage().nbytes():
        raise SourceError(f"{file} is damaged: {name!r} claims more elements than it stores")


def without_tied(state: Mapping[str, torch.Tensor], tied: Collection[str]) -> dict[str, torch.Tensor]:
    """``state`` without each tensor named in ``tied`` that is exactly the same view as one that stays."""
    kept = {_view(tensor) for name, tensor in state.items() if name not in tied}
    return {name: tensor for name, tensor in state.items() if name not in tied or _view(tensor) not in kept}


def pieces(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """The elements in order, as dense one-dimensional tensors of at most ``size`` bytes.

    Contiguous tensors are not copied, and others one piece at a time.
    """
    most = max(1, size // tensor.element_size())
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        # Force a stride of 1: torch calls a tensor of one element contiguous whatever its stride.
        yield from torch.split(tensor.as_strided((tensor.numel(),), (1,)), most)
        return
    rows = most // (tensor.numel() // len(tensor))
    if rows == 0:
        for row in tensor:
            yield from pieces(row, size)
    else:
        for part in torch.split(tensor, rows):
            yield from pieces(part.contiguous(), size)


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key that two tensors share if and only if they are the same tensor."""
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the start of the storage to the end of the last element."""
    if tensor.numel() == 0:
        return 0
    last = tensor.storage_offset()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (length - 1) * stride
    return int(last + 1) * tensor.element_size()


def _short(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 200 else f"{text[:200]}..."
