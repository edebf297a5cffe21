"""What only one family has: heads, layouts, stored slopes, old spellings, and refusals by tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    MptConfig,
)

from converter import UnsupportedModel, convert, inspect
from converter.families import mpt
from converter.families.checks import check_source
from tests import tiny
from tests.conftest import edit_json
from tests.patched import Convert, assert_logits, batch, config_of, load
from tests.reference import alibi, jais
from tests.runners import expected
from tests.tiny import jina_bert as tiny_jina_bert
from tests.tiny.layout import change_tensors


def check_logits(model: Any, folder: Path, name: str) -> None:
    """They are the reference's."""
    ids, mask = batch()
    right = expected(folder, name, ids.numpy(), mask.numpy())
    assert_logits(model(ids, attention_mask=mask).logits, right, mask)


# Baichuan


def test_a_loaded_model_does_not_checkpoint_gradients(converted: Convert) -> None:
    """The original's config has ``[false]``, which is true in Python."""
    folder = converted("baichuan")
    assert (
        config_of(folder).items()
        >= {
            "gradient_checkpointing": False,
            "norm_head": True,
            "tie_word_embeddings": False,
        }.items()
    )
    assert not load(folder).is_gradient_checkpointing


def test_the_stored_head_stays_as_it_is(converted: Convert, tmp_path: Path) -> None:
    """The original code overwrites the weight with its normalised form at the first evaluation."""
    folder = converted("baichuan")
    stored = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert (stored.norm(dim=1) - 1).abs().max() > 0.1
    model, ids = load(folder), batch()[0]
    with torch.no_grad():
        before = model(ids).logits
        assert torch.equal(model(ids).logits, before)
    assert torch.equal(model.lm_head.weight, stored)
    model.train()(ids, labels=ids).loss.backward()
    # The length of a row does not matter, so the gradient is orthogonal to the row.
    along = (model.lm_head.weight.grad * model.lm_head.weight).sum(dim=1)
    assert along.abs().max() < 1e-6 < model.lm_head.weight.grad.abs().max()
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")["lm_head.weight"], stored)


@torch.no_grad()
@pytest.mark.parametrize("norm_head", [True, False])
def test_another_vocabulary_keeps_the_kind_of_head(
    converted: Convert, norm_head: bool, tmp_path: Path
) -> None:
    model, ids = load(converted("baichuan", norm_head=norm_head)), batch()[0]
    before = model(ids).logits
    model.resize_token_embeddings(tiny.VOCAB_SIZE + 3)
    assert torch.allclose(model(ids).logits[..., : tiny.VOCAB_SIZE], before, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(again(ids).logits, model(ids).logits)
    if norm_head:  # transformers 4.57 gives a plain head random values again
        model.post_init()
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_the_loss_has_baichuan2_s_penalty(converted: Convert) -> None:
    ids, _ = batch()
    folder = converted("baichuan", z_loss_weight=0.25)
    output = load(folder)(ids, labels=ids)
    plain = load(folder, z_loss_weight=0.0)(ids, labels=ids)
    penalty = output.logits[:, :-1].max(dim=-1).values.pow(2).mean()
    assert plain.loss.item() == pytest.approx(
        torch.nn.functional.cross_entropy(plain.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item(),
        abs=1e-5,
    )
    assert (output.loss - plain.loss).item() == pytest.approx(0.25 * penalty.item(), rel=1e-5)


# JAIS and BTLM

Source = Callable[..., Path]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """``source(slopes=None, **config_changes)``: a tiny checkpoint; ``slopes=()`` stores no slopes."""

    def build(slopes: Any = None, num_heads: int = 4, **changes: Any) -> Path:
        folder, name = tmp_path / "source", "transformer.relative_pe.slopes"
        tiny.FACTORIES["jais"](folder, num_heads, **changes)
        if slopes == ():
            change_tensors(folder, lambda tensors: tensors.pop(name))
        elif slopes is not None:
            change_tensors(folder, lambda tensors: tensors.update({name: torch.tensor(slopes)[:, None]}))
        return folder

    return build


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
    check_logits(load(folder), folder, "jais")


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
    right = jais.logits({**config, "alibi_scaling": None}, tensors, ids.numpy())

    folder = convert(own, tmp_path / "out", method="linear", dynamic="length", rate=1.0).path
    assert config_of(folder)["alibi_scaling"] == {
        "type": "linear",
        "train_seq_len": 24,
        "dynamic": "length",
        "rate": 1.0,
    }
    assert_logits(load(folder)(ids).logits, right)


def test_inspect_shows_their_scaling_and_a_conversion_replaces_it(source: Source, tmp_path: Path) -> None:
    own = source(alibi_scaling={"type": "linear", "factor": 2.0})
    shown = inspect(own).alibi_scaling
    assert shown == {"type": "linear", "factor": 2.0}
    folder = convert(own, tmp_path / "out", method="ntk", scale=3.0).path
    assert config_of(folder)["alibi_scaling"] == {"type": "ntk", "factor": 3.0}


def test_a_length_that_the_config_states_is_the_trained_one(source: Source) -> None:
    found = inspect(source(alibi_scaling={"type": "linear", "train_seq_len": 32}))
    assert (found.train_length, found.train_length_origin) == (32, "config.json's alibi_scaling")
    assert inspect(source(n_positions=4096)).train_length is None
    assert "n_positions 4096" in inspect(source(n_positions=4096)).train_length_origin


@pytest.mark.version
def test_missing_weights_are_random(source: Source, tmp_path: Path) -> None:
    """They get values of the usual size, not whatever the memory holds."""
    convert(source(), tmp_path / "out", method="none", verify=False)
    name = "transformer.h.0.mlp.c_fc.weight"
    shape = load_file(tmp_path / "out/model.safetensors")[name].shape
    change_tensors(tmp_path / "out", lambda tensors: tensors.pop(name))
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True, output_loading_info=True
    )
    assert set(info["missing_keys"]) == {name}
    weight = model.get_parameter(name)
    assert weight.shape == shape
    assert weight.std().item() == pytest.approx(model.config.initializer_range, rel=0.2)


# JinaBERT

QK = tiny_jina_bert.code(tiny_jina_bert.QK_CODE)


@pytest.mark.parametrize(
    ("place", "stays"),
    [
        ("jinaai/jina-bert-implementation", False),
        ("jinaai/jina-bert-v2-qk-post-norm", False),
        ("jinaai/jina-embeddings-v2-base-en", True),
    ],
)
def test_keys_of_jinabert_s_own_code_go(tmp_path: Path, place: str, stays: bool) -> None:
    """One would contradict the input limit, the other say that the model is from where its code was."""
    keys = {"model_max_length": 8192, "_name_or_path": place}
    source = tiny.ENCODERS["jina_bert"](tmp_path / "source", 4, **keys)
    convert(source, tmp_path / "out", scale=2, max_length=100, verify=False)
    config = config_of(tmp_path / "out")
    assert config["max_position_embeddings"] == 100
    assert "model_max_length" not in config
    assert (config.get("_name_or_path") == place) is stays


def test_the_stored_names_decide(tmp_path: Path) -> None:
    """An embedding model without a prediction head, whose config names another copy of the code."""
    folder = tiny.ENCODERS["jina_bert"](tmp_path / "source", 4, head="Model", **QK)
    copied = {"architectures": ["JinaBertForMaskedLM"], **tiny_jina_bert.code("someone/copy")}
    edit_json(folder / "config.json", copied)
    convert(folder, tmp_path / "out", method="none")
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["NtkJinaBertModel"]
    assert (config["qk_post_norm"], config["add_pooling_layer"]) == (True, True)


# MosaicBERT


def test_layers_that_are_not_mosaicbert_s_are_refused(tmp_path: Path) -> None:
    """Its code has copies under many names, so the stored tensors decide."""
    tiny.ENCODERS["mosaic_bert"](tmp_path / "source", 4)
    other = tiny.ENCODERS["jina_bert"](tmp_path / "other", 4)
    (other / "model.safetensors").rename(tmp_path / "source/model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"no tensor \.\.\.\.attention\.self\.Wqkv\.weight"):
        convert(tmp_path / "source", tmp_path / "out", method="none", verify=False)


@torch.no_grad()
def test_dnabert_2_s_config_is_completed(tmp_path: Path) -> None:
    tiny.ENCODERS["mosaic_bert"](tmp_path / "source", 12)
    lacking = ("model_type", "architectures", "pad_token_id")
    edit_json(tmp_path / "source/config.json", dict.fromkeys(lacking))
    convert(tmp_path / "source", tmp_path / "out", scale=4, train_length=512, verify=False)
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["NtkMosaicBertForMaskedLM"]
    assert config["max_position_embeddings"] == 2048
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    assert model.config.pad_token_id == 0
    check_logits(model, tmp_path / "out", "mosaic_bert")


# MPT


@pytest.mark.version
@pytest.mark.parametrize("named", ["MPTForCausalLM", "MptForCausalLM"])
def test_a_config_that_transformers_wrote(named: str, tmp_path: Path) -> None:
    """Its MptConfig keeps the class names that it read, and its defaults are ALiBi and no biases."""
    for options in ({}, {"alibi": True, "clip_qkv": 6.0}, {"alibi": False}):
        written = MptConfig(d_model=64, n_heads=4, n_layers=2, attn_config=options)
        written.architectures = [named]
        written.save_pretrained(tmp_path)
        values = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        assert values["attn_config"]["model_type"] == ""
        # Up to transformers 4.56 it wrote only what differs from its defaults.
        values["attn_config"] = {"model_type": "", **options}
        if options.get("alibi") is False:
            with pytest.raises(UnsupportedModel, match=r"^attn_config\.alibi is False"):
                check_source(values)
        else:
            assert check_source(values) is mpt.FAMILY
            values.pop("no_bias", None)
            assert mpt.FAMILY.template_config(values).get("no_bias", True)


# Refact


def test_the_head_is_never_tied(converted: Convert, tmp_path: Path) -> None:
    """The config does not say so, and transformers ties the head by default."""
    folder = converted("refact")
    assert "tie_word_embeddings" not in config_of(tmp_path / "source")
    assert config_of(folder)["tie_word_embeddings"] is False
    model = load(folder)
    assert model.lm_head.weight.data_ptr() != model.transformer.wte.weight.data_ptr()


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_the_layout_is_read_from_the_tensors(tmp_path: Path, packed: bool, said: bool | None) -> None:
    source = tiny.FACTORIES["refact"](tmp_path / "source", 4, packed_projections=packed)
    edit_json(source / "config.json", {"packed_projections": said})
    convert(source, tmp_path / "out", scale=2)
    assert config_of(tmp_path / "out")["packed_projections"] is packed


@torch.no_grad()
def test_the_other_heads_read_the_language_model_s_last_norm(converted: Convert) -> None:
    folder = converted("refact")
    ids, _ = batch(rows=1, length=20)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    assert sorted(info["missing_keys"]) == ["score.weight"]
    trunk = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    raw = trunk(ids).last_hidden_state
    weight = load_file(folder / "model.safetensors")["ln_f.weight"]
    normed = torch.nn.functional.layer_norm(raw, weight.shape, weight, None, 1e-5)
    expected = model.score(normed[:, -1])
    assert torch.allclose(model.eval()(ids).logits, expected, atol=1e-5)
    language = load(folder)
    assert torch.allclose(language(ids).logits, language.lm_head(normed), atol=1e-4)
