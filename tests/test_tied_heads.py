"""A language model's head and the embeddings are both stored, and config.json ties them or says nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from converter import OnnxOptions, convert, export, inspect
from converter.result import manifest
from converter.source import values
from converter.source.open import open_folder
from tests import tiny
from tests.conftest import MakeSource, Refused, edit_json
from tests.onnx_graphs import PROFILES, TRAIN_LENGTH, Engine, assert_close, expected
from tests.patched import config_of, load
from tests.reference import ENCODERS
from tests.reference import FAMILIES as REFERENCES
from tests.test_continuous_batching import OLD
from tests.tiny.layout import Format, change_tensors, write_json

Change = Callable[[torch.Tensor], torch.Tensor]

TIE = "tie_word_embeddings"
STORED = {"true": {TIE: True}, "missing": {TIE: None}}
OTHERS = ("jais", "jina_bert", "mosaic_gpt", "mosaic_bert")
"""Families that transformers has no class for, whose own code would use the embeddings."""


def names(family: str) -> tuple[str, str]:
    known = tiny.FAMILY[family]
    return known.head, known.tensor_names(known.embeddings)[0]


def with_head(
    folder: Path, family: str, change: Change, says: str = "true", fmt: Format = "safetensors"
) -> Path:
    """A checkpoint whose head is stored, made from the embeddings; ``says`` is a name of ``STORED``."""
    source = (tiny.FACTORIES | tiny.ENCODERS)[family](folder / "source", 4, fmt=fmt)
    head, table = names(family)
    change_tensors(source, lambda tensors: tensors.update({head: change(tensors[table])}))
    edit_json(source / "config.json", STORED[says])
    return source


def other(table: torch.Tensor) -> torch.Tensor:
    """Other values in the last block alone."""
    return torch.cat([table[:-1], 1 - table[-1:]])


@pytest.mark.parametrize("says", STORED)
@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon", "refact"])
@torch.no_grad()
def test_a_head_that_differs_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, says: str
) -> None:
    monkeypatch.setattr(values, "BLOCK", 100)  # the difference is in the last of several
    source, out = with_head(tmp_path, family, other, says), tmp_path / "out"
    convert(source, out, scale=2.0, train_length=TRAIN_LENGTH)
    assert config_of(out)[TIE] is False
    ids = tiny.token_ids(2, 9)
    right = expected(out, family, ids)
    assert_close(load(out)(torch.from_numpy(ids)).logits.numpy(), right)
    for profile in PROFILES if family == "bloom" else PROFILES[:1]:
        # A repository that an older version converted may still say that they are tied. transformers 4.57
        # then loses the head, so validation rightly finds that the graph is not that model.
        for tied in (False, *[True] * (family == "bloom" and not OLD)):
            edit_json(out / "config.json", {TIE: tied})
            manifest.write(out, manifest.listed(open_folder(out)), {})
            export(out, OnnxOptions(profile))
            assert_close(Engine(out / "model.onnx").step(ids, np.ones_like(ids))[0], right)


@pytest.mark.parametrize("cast", [lambda table: table, lambda table: table.double()], ids=["same", "wider"])
@pytest.mark.parametrize("family", ["bloom", *OTHERS])
def test_an_equal_head_stays_tied(tmp_path: Path, family: str, cast: Change) -> None:
    source = with_head(tmp_path, family, lambda table: cast(table.clone()))
    convert(
        source, tmp_path / "out", scale=2.0, train_length=TRAIN_LENGTH, verify=family in ("bloom", "jais")
    )
    assert config_of(tmp_path / "out").get(TIE, True)


def test_a_head_in_another_dtype_is_compared_by_value(tmp_path: Path) -> None:
    source = with_head(tmp_path, "bloom", lambda table: table.bfloat16())
    convert(source, tmp_path / "out", scale=2.0, train_length=TRAIN_LENGTH)
    assert config_of(tmp_path / "out")[TIE] is False


@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
@pytest.mark.parametrize("says", STORED)
@pytest.mark.parametrize("family", OTHERS)
def test_it_is_refused_where_the_source_s_code_uses_the_embeddings(
    tmp_path: Path, refused: Refused, family: str, says: str, fmt: Format
) -> None:
    source = with_head(tmp_path, family, other, says, fmt)
    words = (source, "--scale", 2, "--train-length", TRAIN_LENGTH, "--no-verify", "--out")
    line = refused(*words, tmp_path / "out")
    assert f"{names(family)[0]!r} differs from the embeddings" in line
    assert "remove it from the weights" in line
    remedy = f"--set {TIE}=false"
    assert (remedy in line) == (family != "mosaic_gpt")


@pytest.mark.parametrize("family", ["jais", "jina_bert", "mosaic_bert"])
@torch.no_grad()
def test_the_remedy_uses_it(tmp_path: Path, family: str) -> None:
    source, out = with_head(tmp_path, family, other), tmp_path / "out"
    convert(source, out, scale=2.0, train_length=TRAIN_LENGTH, overrides={TIE: False})
    export(out)
    ids = tiny.token_ids(2, 9)
    mask = np.ones_like(ids)
    _, tensors = tiny.read(out)
    right = (REFERENCES | ENCODERS)[family].logits(config_of(out), tensors, ids)
    auto = AutoModelForMaskedLM if family in ENCODERS else AutoModelForCausalLM
    assert_close(load(out, auto)(torch.from_numpy(ids)).logits.numpy(), right)
    if family in ENCODERS:
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        assert_close(Engine(out / "model.onnx").session.run(["logits"], inputs)[0], right)
    else:
        assert_close(Engine(out / "model.onnx").step(ids, mask)[0], right)


def only_listed(folder: Path) -> None:
    """One shard without a head, and an index that lists it: as some programs merge and save."""
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight", None))
    [file] = [*folder.glob("model.safetensors"), *folder.glob("pytorch_model.bin")]
    shard = file.rename(file.with_stem(f"{file.stem}-00001-of-00001"))
    stored = load_file(shard) if shard.suffix == ".safetensors" else torch.load(shard)
    places = dict.fromkeys([*stored, "lm_head.weight"], shard.name)
    write_json(folder / f"{file.name}.index.json", {"metadata": {}, "weight_map": places})


@pytest.mark.parametrize(
    ("name", "options", "how"),
    [
        ("bloom", {}, {}),
        ("bloom", {}, {"link": "hard"}),
        ("bloom", {}, {"dtype": "bf16"}),
        ("bloom", {"fmt": "bin"}, {}),
        ("bloom", {"head": "SequenceClassification"}, {}),
        ("llama", {TIE: True}, {}),
    ],
)
def test_a_tied_head_that_only_the_index_has(
    make_source: MakeSource, tmp_path: Path, name: str, options: dict[str, Any], how: dict[str, Any]
) -> None:
    source, out = make_source(name, **options), tmp_path / "out"
    only_listed(source)
    inspect(source)
    convert(source, out, scale=2.0, **how)
    for path in out.glob("*.index.json"):  # a single .bin gets none
        stored = {key for file in out.glob("*.safetensors") for key in load_file(file)}
        assert json.loads(path.read_text(encoding="utf-8"))["weight_map"].keys() == stored


@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_a_head_of_its_own_that_only_the_index_has(
    make_source: MakeSource, refused: Refused, tmp_path: Path, fmt: Format
) -> None:
    source = make_source("bloom", {TIE: False}, fmt=fmt)
    only_listed(source)
    line = refused(source, "--scale", 2, "--out", tmp_path / "out")
    assert "lists the tensor 'lm_head.weight', but" in line
