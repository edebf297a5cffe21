"""Tiny random checkpoints of every family, written as the real ones are.

Each factory writes a folder with config.json, weights, a tokenizer and, for transformers' own
classes, a generation config. The weights are large enough that attention is peaked and a wrong bias
changes the logits by far more than rounding does.

    layout.py    random values, storages, and the factory of an architecture that a module describes
    stock.py     the families that transformers has classes for, written by those
    others       one module a family: the original's config and tensors, by their own names
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from tests.tiny import baichuan, jais, jina_bert, layout, mosaic_bert, mosaic_gpt, refact, replit
from tests.tiny.layout import (
    END,
    HEAD_DIM,
    PAD,
    SPECIAL_TOKENS,
    START,
    UNKNOWN,
    VOCAB_SIZE,
    Factory,
    Format,
    Head,
    Tensors,
    tokenizer,
)
from tests.tiny.stock import bloom, falcon, mpt

__all__ = [
    "ENCODERS",
    "END",
    "FACTORIES",
    "HEAD_DIM",
    "PAD",
    "SPECIAL_TOKENS",
    "START",
    "STOCK",
    "UNKNOWN",
    "VOCAB_SIZE",
    "Factory",
    "Format",
    "Head",
    "bloom",
    "falcon",
    "mpt",
    "padding_mask",
    "read",
    "token_ids",
    "tokenizer",
]

STOCK: dict[str, Factory] = {"bloom": bloom, "mpt": mpt, "falcon": falcon}
FACTORIES: dict[str, Factory] = {
    **STOCK,
    "replit": layout.factory(replit),
    "mosaic_gpt": layout.factory(mosaic_gpt),
    "jais": layout.factory(jais),
    "baichuan": layout.factory(baichuan),
    "refact": layout.factory(refact),
}
"""The decoders."""
ENCODERS: dict[str, Factory] = {
    "jina_bert": layout.factory(jina_bert),
    "mosaic_bert": layout.factory(mosaic_bert),
}


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
