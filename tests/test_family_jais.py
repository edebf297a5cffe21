"""JAIS and BTLM: recognition, the stored slopes, the names of the muP keys, and their own scaling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from converter import convert, inspect
from converter.errors import SourceError
from tests import tiny
from tests.patched import assert_logits, batch, config_of, load
from tests.reference import alibi, jais

Source = Callable[..., Path]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """``source(slopes=None, **config_changes)``: a tiny checkpoint; ``slopes=()`` stores no slopes."""

    def build(slopes: Any = None, num_heads: int = 4, **changes: Any) -> Path:
        folder = tiny.FACTORIES["jais"](tmp_path / "source", num_heads, **changes)
        if slopes is not None:
            tensors = load_file(folder / "model.safetensors")
            del tensors["transformer.relative_pe.slopes"]
            if len(slopes):
                tensors["transformer.relative_pe.slopes"] = torch.tensor(slopes)[:, None]
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return build


# Recognising


# muP


# Slopes


@torch.no_grad()
@pytest.mark.parametrize("slopes", [None, (0.3, 0.2, 0.05, 0.01), ()], ids=["stock", "other", "none stored"])
def test_stored_slopes_beat_the_formula(source: Source, tmp_path: Path, slopes: Any) -> None:
    folder = convert(source(slopes), tmp_path / "out", method="ntk", scale=4.0).path
    formula = alibi.press_slopes(4)
    stored = config_of(folder).get("alibi_slopes")
    if slopes == ():
        assert stored is None
    else:
        np.testing.assert_allclose(stored, formula if slopes is None else slopes, rtol=1e-6)
    ids, mask = batch()
    expected = jais.logits(config_of(folder), tiny.read(folder)[1], ids.numpy(), mask.numpy())
    assert_logits(load(folder)(ids, attention_mask=mask).logits, expected, mask)


def test_slopes_of_another_number_are_refused(source: Source, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"relative_pe\.slopes"):
        convert(source((0.5, 0.25)), tmp_path / "out", method="ntk", scale=4.0)


def test_a_stored_copy_of_the_tied_head(source: Source, tmp_path: Path) -> None:
    """The pickled checkpoints of jais-13b store such a copy."""
    folder = source()
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load(convert(folder, tmp_path / "out", method="ntk", scale=4.0).path)


# Their own scaling


@torch.no_grad()
@pytest.mark.parametrize("tokens", [20, 24, 60])
def test_their_dynamic_scaling_is_our_linear_one_by_length(
    source: Source, tmp_path: Path, tokens: int
) -> None:
    """Their formula: slopes / (T / train_seq_len) for T keys, if T > train_seq_len; here without padding."""
    own = source(num_heads=12, alibi_scaling={"type": "linear", "train_seq_len": 24})
    config, tensors = tiny.read(own)
    tensors["transformer.relative_pe.slopes"] /= tokens / 24 if tokens > 24 else 1.0
    ids, _ = batch(rows=2, length=tokens)
    expected = jais.logits({**config, "alibi_scaling": None}, tensors, ids.numpy())

    folder = convert(own, tmp_path / "out", method="linear", dynamic="length", rate=1.0).path
    assert config_of(folder)["alibi_scaling"] == {
        "type": "linear",
        "train_seq_len": 24,
        "dynamic": "length",
        "rate": 1.0,
    }
    assert_logits(load(folder)(ids).logits, expected)


@torch.no_grad()
def test_their_fixed_scaling_is_our_linear_one(source: Source, tmp_path: Path) -> None:
    own = source(alibi_scaling={"type": "linear", "factor": 4.0})
    config, tensors = tiny.read(own)
    tensors["transformer.relative_pe.slopes"] /= 4.0
    ids, _ = batch()
    expected = jais.logits({**config, "alibi_scaling": None}, tensors, ids.numpy())
    folder = convert(own, tmp_path / "out", method="linear", scale=4.0).path
    assert_logits(load(folder)(ids).logits, expected)


def test_inspect_shows_their_scaling_and_a_conversion_replaces_it(source: Source, tmp_path: Path) -> None:
    own = source(alibi_scaling={"type": "linear", "factor": 2.0})
    shown = inspect(own).alibi_scaling
    assert shown == {"type": "linear", "factor": 2.0}
    folder = convert(own, tmp_path / "out", method="ntk", scale=3.0).path
    assert config_of(folder)["alibi_scaling"] == {"type": "ntk", "factor": 3.0}


# Trained lengths


def test_a_length_that_the_config_states_is_the_trained_one(source: Source) -> None:
    found = inspect(source(alibi_scaling={"type": "linear", "train_seq_len": 32}))
    assert (found.train_length, found.train_length_origin) == (32, "config.json's alibi_scaling")
    assert inspect(source(n_positions=4096)).train_length is None
    assert "n_positions 4096" in inspect(source(n_positions=4096)).train_length_origin


@pytest.mark.version
def test_missing_weights_are_random(source: Source, tmp_path: Path) -> None:
    """They get values of the usual size, not whatever the memory holds."""
    convert(source(), tmp_path / "out", method="none", verify=False)
    file, name = tmp_path / "out/model.safetensors", "transformer.h.0.mlp.c_fc.weight"
    tensors = load_file(file)
    shape = tensors.pop(name).shape
    save_file(tensors, file, metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True, output_loading_info=True
    )
    assert set(info["missing_keys"]) == {name}
    weight = model.get_parameter(name)
    assert weight.shape == shape
    assert weight.std().item() == pytest.approx(model.config.initializer_range, rel=0.2)
