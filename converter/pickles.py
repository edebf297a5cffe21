"""``pytorch_model.bin`` to safetensors, one shard in memory at a time, running none of its code."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from converter.checkpoint import SAFETENSORS_INDEX, Checkpoint, target_names
from converter.errors import OutputError, SourceError
from converter.progress import Advance

if TYPE_CHECKING:
    import torch

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
"""Names of the torch dtypes that a model's tensors have."""


def convert_shards(checkpoint: Checkpoint, source: Path, folder: Path, advance: Advance) -> None:
    """Writes ``model.safetensors``, or as many shards as the checkpoint has and their index.

    Raises:
        SourceError: a shard that is unreadable, holds more than tensors, or lacks one of the index.
    """
    targets = target_names(checkpoint.files, checkpoint.index)
    weight_map: dict[str, str] = {}
    total = 0
    for name in checkpoint.files:
        stored, size = _convert_shard(checkpoint, source / name, folder / targets[name], advance)
        for tensor in stored & weight_map.keys():
            raise SourceError(f"the tensor {tensor!r} is in {name} and in an earlier shard")
        weight_map.update(dict.fromkeys(stored, targets[name]))
        total += size
    if len(checkpoint.files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _convert_shard(
    checkpoint: Checkpoint, source: Path, target: Path, advance: Advance
) -> tuple[set[str], int]:
    """Converts one file, and lets go of its tensors; their names, and bytes written."""
    state = load(source)
    for tensor, file in checkpoint.weight_map.items():
        if file == source.name and tensor not in state:
            raise SourceError(f"{checkpoint.index} lists the tensor {tensor!r}, but {file} does not have it")
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = distinct(state)
    try:
        save_file(tensors, target, metadata={"format": "pt"})
    except SafetensorError as error:  # its form of a full disk and the like
        raise OutputError(f"cannot write {target.name}: {error}") from error
    advance(source.stat().st_size)
    return set(tensors), sum(tensor.nbytes for tensor in tensors.values())


def load(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one ``.bin`` file, in its order; mapped from the disk where its format allows.

    Raises:
        SourceError: unreadable, or something other than a dict of plain tensors.
    """
    import torch

    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"  # the format since torch 1.6; older ones cannot be mapped
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unusual pickles; they load or they do not
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except MemoryError:
        raise
    except Exception as error:  # a hostile pickle can raise anything
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0][:160]
        raise SourceError(
            f"{path.name} is damaged or holds more than tensors, which only its own code could load "
            f"({reason}); convert a safetensors version of the checkpoint"
        ) from error
    if not isinstance(state, dict):
        raise SourceError(f"{path.name} holds a {type(state).__name__}, not the tensors of a model by name")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise SourceError(f"{path.name}: {name!r} is a {type(tensor).__name__}, not a tensor by its name")
        if (
            tensor.layout != torch.strided
            or tensor.device.type != "cpu"
            or str(tensor.dtype).removeprefix("torch.") not in DTYPES
        ):
            raise SourceError(
                f"{path.name}: {name!r} is a {tensor.layout} {tensor.dtype} tensor, which no model uses"
            )
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise SourceError(f"{path.name}: {name!r} claims more elements than it stores; it is damaged")
    return state


def distinct(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``state`` without the second and later names of one and the same tensor, each dense and on its own.

    Of a tied pair the embedding stays, whatever the order; the loading class ties the head to it
    again. Tensors that only share some memory are both kept, the later copied.
    """
    result: dict[str, torch.Tensor] = {}
    storages, views = set(), set()
    for name, tensor in sorted(state.items(), key=lambda item: item[0].startswith("lm_head.")):
        storage = tensor.untyped_storage().data_ptr()
        view = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() == 0 or view not in views:
            dense = tensor.detach().contiguous()
            result[name] = (
                dense.clone() if storage in storages and dense.data_ptr() == tensor.data_ptr() else dense
            )
        storages.add(storage)
        views.add(view)
    return result
