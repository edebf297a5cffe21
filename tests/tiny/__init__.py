"""Tiny random checkpoints of every family, written as the real ones are.

Each factory writes a folder with config.json, weights, a tokenizer and, for transformers' own
classes, a generation config. The weights are large enough that attention is peaked and a wrong bias
changes the logits by far more than rounding does.

    layout.py     random values, storages, and what a family's module declares
    stock.py      checkpoints written by transformers' own classes
    NAME.py       one a family, found by its name: a ``TINY``, and the original's config and tensors
    replit.py     MPT's second kind of checkpoint, as mpt.py says
    rotary.py     rotary models
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from converter import families
from tests.tiny.layout import (
    END,
    HEAD_DIM,
    PAD,
    SPECIAL_TOKENS,
    START,
    UNKNOWN,
    VOCAB_SIZE,
    Factory,
    Head,
    Tensors,
    Tiny,
)

__all__ = [
    "CHECKPOINTS",
    "ENCODERS",
    "END",
    "FACTORIES",
    "FAMILY",
    "HEAD_DIM",
    "PAD",
    "SPECIAL_TOKENS",
    "START",
    "STOCK",
    "UNKNOWN",
    "VOCAB_SIZE",
    "Head",
    "padding_mask",
    "read",
    "token_ids",
]

CHECKPOINTS: dict[str, Tiny] = {}
"""By the family's name, or the name of another of its checkpoints."""
FAMILY: dict[str, families.Family] = {}
"""Their families, by the same names."""
for _family in families.FAMILIES:
    _tiny: Tiny = importlib.import_module(f"tests.tiny.{_family.name}").TINY
    for _name, _each in {_family.name: _tiny, **_tiny.others}.items():
        CHECKPOINTS[_name], FAMILY[_name] = _each, _family


def _factories(kind: str) -> dict[str, Factory]:
    return {name: each.write for name, each in CHECKPOINTS.items() if FAMILY[name].kind == kind}


FACTORIES = _factories("decoder")
ENCODERS = _factories("encoder")
STOCK = {family.name: CHECKPOINTS[family.name].write for family in families.FAMILIES if family.stock}
"""Of the families that transformers has classes for, written by those."""


def read(folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.float64]]]:
    """config.json as a dict, and every tensor of the folder in float64, however it is stored."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    for file in sorted(folder.glob("*.bin")):
        tensors.update(torch.load(file, map_location="cpu", weights_only=True))
    return config, {name: tensor.double().numpy() for name, tensor in tensors.items()}


def token_ids(batch: int, length: int, seed: int = 0) -> NDArray[np.int64]:
    """Random tokens, none of them special, [batch, length]."""
    return np.random.default_rng(seed).integers(PAD + 1, VOCAB_SIZE, size=(batch, length))


def padding_mask(
    lengths: list[int], side: Literal["left", "right"], width: int | None = None
) -> NDArray[np.int64]:
    """[rows, width]: 1 for each of a row's real tokens, 0 for padding; as wide as the longest row."""
    width = max(lengths) if width is None else width
    columns = np.arange(width)
    if side == "left":
        return np.stack([columns >= width - length for length in lengths]).astype(np.int64)
    return np.stack([columns < length for length in lengths]).astype(np.int64)
