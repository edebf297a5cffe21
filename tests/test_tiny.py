"""The tiny checkpoints load in stock transformers and are stored in every way that real ones are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import transformers
from numpy.testing import assert_array_equal
from safetensors.torch import load_file

from tests import tiny

FAMILIES = list(tiny.FACTORIES)
STOCK = list(tiny.STOCK)
EMBEDDINGS = {name: tiny.FAMILY[name].embeddings for name in STOCK}


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same tensors, a tied head aside."""
    (_, left), (_, right) = tiny.read(one), tiny.read(other)
    names = (left.keys() | right.keys()) - {"lm_head.weight"}
    return all(name in left and name in right and np.array_equal(left[name], right[name]) for name in names)


def assert_loads(name: str, folder: Path) -> None:
    """The stock class ``name`` takes every tensor of ``folder``, misses none, and runs."""
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.isfinite(model(torch.from_numpy(tiny.token_ids(1, 5)))[0]).all()


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", STOCK)
@pytest.mark.parametrize("sharded", [False, True])
def test_bin_stores_a_tied_head_as_the_embedding(tmp_path: Path, family: str, sharded: bool) -> None:
    folder = tiny.FACTORIES[family](tmp_path, fmt="bin", sharded=sharded)
    found = []
    for file in folder.glob("*.bin"):
        state = torch.load(file, weights_only=True)
        if "lm_head.weight" in state:
            embedding = state[f"transformer.{EMBEDDINGS[family]}"]
            found.append(state["lm_head.weight"].data_ptr() == embedding.data_ptr())
    assert found == [True]


@pytest.mark.parametrize("family", STOCK)
@pytest.mark.parametrize(
    "head", ["CausalLM", "Model", "SequenceClassification", "TokenClassification", "QuestionAnswering"]
)
@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_every_head_loads_in_stock_transformers(
    tmp_path: Path, family: str, head: tiny.Head, fmt: Literal["safetensors", "bin"]
) -> None:
    folder = tiny.FACTORIES[family](tmp_path, head=head, fmt=fmt, num_labels=3)
    config, tensors = tiny.read(folder)
    camel = tiny.FAMILY[family].camel
    name = f"{camel}Model" if head == "Model" else f"{camel}For{head}"
    assert config["architectures"] == [name]
    assert any(tensor.startswith("transformer.") for tensor in tensors) == (head != "Model")
    assert_loads(name, folder)


@pytest.mark.parametrize("family", STOCK)
@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_names_without_prefix(tmp_path: Path, family: str, fmt: Literal["safetensors", "bin"]) -> None:
    write = tiny.FACTORIES[family]
    _, bare = tiny.read(write(tmp_path / "bare", prefix=False, fmt=fmt))
    _, full = tiny.read(write(tmp_path / "full"))
    assert bare.keys() == {name.removeprefix("transformer.") for name in full}
    assert EMBEDDINGS[family] in bare
    assert "lm_head.weight" not in bare
    assert_loads(f"{tiny.FAMILY[family].camel}ForCausalLM", tmp_path / "bare")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_same_weights_rounded(
    tmp_path: Path, family: str, fmt: Literal["safetensors", "bin"], dtype: torch.dtype
) -> None:
    folder = tiny.FACTORIES[family](tmp_path / "half", fmt=fmt, dtype=dtype)
    config, half = tiny.read(folder)
    _, full = tiny.read(tiny.FACTORIES[family](tmp_path / "full"))
    assert config.get("dtype", config.get("torch_dtype")) == str(dtype).removeprefix("torch.")
    for name, tensor in full.items():
        assert_array_equal(half[name], torch.from_numpy(tensor).float().to(dtype).double().numpy())


def test_padding_masks() -> None:
    assert_array_equal(tiny.padding_mask([2, 3], "left"), [[0, 1, 1], [1, 1, 1]])
    assert_array_equal(tiny.padding_mask([2, 3], "right", width=4), [[1, 1, 0, 0], [1, 1, 1, 0]])
