"""What a ``pytorch_model.bin`` holds, as tensors only, running none of its code."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from converter.errors import SourceError
from converter.weights.files import is_zip

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
"""Names of the torch dtypes that a model's tensors have."""


def load(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one ``.bin`` file, in its order; mapped from the disk where its format allows.

    Raises:
        SourceError: unreadable, or something other than a dict of plain tensors.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unusual pickles; they load or they do not
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip(path))
    except MemoryError:
        raise
    except Exception as error:  # a hostile pickle can raise anything
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        reason = reason.partition(". ")[0][:160]
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
