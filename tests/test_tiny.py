"""The tiny checkpoints are stored in every way that real ones are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import tiny

WAYS = ["bloom", "jais"]
"""A family whose checkpoints transformers writes, and one of the others."""


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same tensors, a tied head aside."""
    (_, left), (_, right) = tiny.read(one), tiny.read(other)
    names = (left.keys() | right.keys()) - {"lm_head.weight"}
    return all(name in left and name in right and np.array_equal(left[name], right[name]) for name in names)


@pytest.mark.parametrize("family", WAYS)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_every_storage_holds_the_same_model(
    tmp_path: Path, family: str, fmt: Literal["safetensors", "bin"], sharded: bool
) -> None:
    write = tiny.FACTORIES[family]
    folder = write(tmp_path / "stored", fmt=fmt, sharded=sharded)
    assert same(folder, write(tmp_path / "plain"))

    stem = "model" if fmt == "safetensors" else "pytorch_model"
    weights = sorted(file.name for file in folder.glob(f"*.{fmt}"))
    index = folder / f"{stem}.{fmt}.index.json"
    assert index.exists() == sharded
    if sharded:
        assert 3 <= len(weights) <= 5
        assert weights[0] == f"{stem}-00001-of-{len(weights):05d}.{fmt}"
        weight_map = json.loads(index.read_text())["weight_map"]
        assert set(weight_map.values()) == set(weights)
        for file in weights:
            assert sorted(names_in(folder / file)) == sorted(n for n in weight_map if weight_map[n] == file)
    else:
        assert weights == [f"{stem}.{fmt}"]


def names_in(file: Path) -> list[str]:
    """The tensors of one file of weights."""
    return list(load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True))


@pytest.mark.parametrize("sharded", [False, True])
def test_bin_stores_a_tied_head_as_the_embedding(tmp_path: Path, sharded: bool) -> None:
    folder = tiny.FACTORIES["bloom"](tmp_path, fmt="bin", sharded=sharded)
    found = []
    for file in folder.glob("*.bin"):
        state = torch.load(file, weights_only=True)
        if "lm_head.weight" in state:
            embedding = state["transformer.word_embeddings.weight"]
            found.append(state["lm_head.weight"].data_ptr() == embedding.data_ptr())
    assert found == [True]
