"""Positions in the stored tensors: positions other than ALiBi are refused, stored slopes are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from converter import UnsupportedModel, convert, inspect
from converter.errors import SourceError
from converter.model.alibi import check_positions
from tests import tiny
from tests.conftest import MakeSource, Refused
from tests.patched import config_of
from tests.tiny.layout import change_tensors

SLOPES = "transformer.relative_pe.slopes"
FOREIGN = {
    "transformer.h.0.self_attention.rotary_emb.inv_freq": "rotary",
    "transformer.h.1.self_attention.maybe_rotary.inv_freq": "rotary",
    "model.layers.0.self_attn.rope.freqs": "rotary",
    "model.layers.0.self_attn.rotary_emb.inv_freq": "rotary",
    # Rewritten DNABERT-2 code stores such tensors (guyiyangyoung/LLM-DNABERT2).
    "bert.encoder.rope.sin": "rotary",
    "transformer.wpe.weight": "learned",
    "bert.embeddings.position_embeddings.weight": "learned",
}


def add(folder: Path, name: str, tensor: torch.Tensor) -> None:
    """Adds a tensor to a checkpoint, or replaces it."""
    change_tensors(folder, lambda tensors: tensors.update({name: tensor}))


@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
@pytest.mark.parametrize("name", FOREIGN)
def test_other_positions_under_an_alibi_config_are_refused(
    make_source: MakeSource, refused: Refused, tmp_path: Path, name: str, fmt: Literal["bin"]
) -> None:
    source = make_source("bloom", fmt=fmt)
    add(source, name, torch.ones(4, 4))
    line = refused(source, "--scale", 2, "--no-verify", "--out", tmp_path / "out")
    assert repr(name) in line
    assert f"{FOREIGN[name]} positions, not the ALiBi" in line
    if fmt == "safetensors":
        assert repr(name) in refused("inspect", source)
        assert repr(name) in refused(source, "--scale", 2, "--dry-run", "--out", tmp_path / "out")


def test_names_that_only_resemble_them_pass() -> None:
    check_positions(["transformer.h.0.mlp.europe.weight", "embeddings.position_ids", "h.0.property.weight"])
    for name in FOREIGN:
        with pytest.raises(UnsupportedModel):
            check_positions(["lm_head.weight", name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_stored_slopes_are_read_in_every_dtype(tmp_path: Path, fmt: Literal["bin"], dtype: Any) -> None:
    source = tiny.FACTORIES["jais"](tmp_path / "source", 4, fmt=fmt)
    slopes = torch.tensor([0.75, 0.3, 0.11, 0.01]).to(dtype)
    add(source, SLOPES, slopes[:, None])
    convert(source, tmp_path / "out", method="none")
    assert config_of(tmp_path / "out")["alibi_slopes"] == slopes.double().tolist()
    assert inspect(tmp_path / "out").slopes.stock == tuple(slopes.double().tolist())


WRONG: dict[str, Any] = {
    "too few": torch.tensor([0.5, 0.25]),
    "negative": torch.tensor([0.5, 0.25, -0.1, 0.2]),
    "not a number": torch.tensor([0.5, 0.25, float("nan"), 0.2]),
    "infinite": torch.tensor([0.5, 0.25, float("inf"), 0.2]),
    "zero": torch.tensor([0.5, 0.25, 0.0, 0.2]),
    "integers": torch.tensor([4, 3, 2, 1]),
}


@pytest.mark.parametrize("problem", WRONG)
def test_what_is_no_slopes_is_refused(
    make_source: MakeSource, refused: Refused, tmp_path: Path, problem: str
) -> None:
    source = make_source("jais")
    add(source, SLOPES, WRONG[problem][:, None])
    line = refused(source, "--scale", 2, "--out", tmp_path / "out")
    assert repr(SLOPES) in line
    with pytest.raises(SourceError):
        inspect(source)


@pytest.mark.parametrize(
    ("name", "options", "prefix", "remedy"),
    [
        ("bloom", {}, "pretrained_model.", "(model.pretrained_model.save_pretrained(DIR))"),
        ("bloom", {"fmt": "bin"}, "base_model.model.", "(model.merge_and_unload().save_pretrained(DIR))"),
        # The backbone alone
        (
            "bloom",
            {"prefix": False},
            "pretrained_transformer.",
            "(model.pretrained_transformer.save_pretrained",
        ),
        ("llama", {}, "pretrained_model.", "(model.pretrained_model.save_pretrained(DIR))"),
        ("llama", {}, "base_model.model.", "(model.merge_and_unload().save_pretrained(DIR))"),
        ("jina_bert", {}, "module.", "(model.module.save_pretrained(DIR))"),
    ],
)
def test_names_of_a_wrapper(
    name: str,
    options: dict[str, Any],
    prefix: str,
    remedy: str,
    make_source: MakeSource,
    refused: Refused,
    tmp_path: Path,
) -> None:
    """The line says which prefix the names have, and how to get rid of it."""
    source = make_source(name, **options)

    def wrap(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[prefix + key] = tensors.pop(key)

    change_tensors(source, wrap)
    line = refused(source, "--scale", 2, "--train-length", 64, "--out", tmp_path / "out")
    assert line.startswith(f"error: {prefix} stands before the tensors' names, such as '{prefix}")
    assert remedy in line


@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("transformer.h.0.mlp.dense_h_to_4h.base_layer.weight", torch.zeros(4, 4), "an adapter that was not"),
        ("transformer.h.0.mlp.dense_h_to_4h.lora_A.default.weight", torch.zeros(4, 4), "an adapter that was"),
        ("transformer.h.0.mlp.modules_to_save.default.weight", torch.zeros(4, 4), "an adapter that was not"),
        ("v_head.summary.weight", torch.zeros(1, 32), "a value head"),
        ("transformer.ln_f.weight", torch.zeros(0), "ZeRO-3"),
    ],
)
def test_tensors_that_show_what_was_saved(
    make_source: MakeSource,
    refused: Refused,
    tmp_path: Path,
    fmt: str,
    name: str,
    tensor: torch.Tensor,
    words: str,
) -> None:
    source = make_source("bloom", fmt=fmt)
    add(source, name, tensor)
    line = refused(source, "--scale", 2, "--out", tmp_path / "out")
    assert words in line
    assert repr(name) in line
