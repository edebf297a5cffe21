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

from converter import UnsupportedModel, convert, inspect
from converter.errors import SourceError
from converter.families import FAMILIES
from converter.families.jais import FAMILY, OWNERS, scales
from converter.families.refusals import check_source
from tests import tiny
from tests.patched import assert_logits, batch, config_of, load
from tests.reference import alibi, jais

OLD = ("embeddings_scale", "width_scale", "scale_qk_dot_by_d")
NEW = ("mup_embeddings_scale", "mup_width_scale", "mup_output_alpha", "mup_scale_qk_dot_by_d")
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


def published(**changes: Any) -> dict[str, Any]:
    """A config with the sizes and key names of jais-13b."""
    config: dict[str, Any] = {
        "model_type": "jais",
        "architectures": ["JAISLMHeadModel"],
        "activation_function": "swiglu",
        "position_embedding_type": "alibi",
        "embeddings_scale": 14.6,
        "width_scale": 0.111,
        "scale_qk_dot_by_d": True,
        "n_embd": 5120,
        "n_head": 40,
        "n_inner": 13653,
        "n_layer": 40,
        "n_positions": 2048,
        "vocab_size": 84992,
    }
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


# Recognising


def test_both_names_are_one_family() -> None:
    for model_type, prefix in (("jais", "JAIS"), ("btlm", "BTLM")):
        config = published(model_type=model_type, architectures=[f"{prefix}LMHeadModel"])
        assert check_source(config) is FAMILY
        assert FAMILY.architectures(config) == ["NtkJaisForCausalLM"]
        assert FAMILY.architectures({"architectures": [f"{prefix}Model"]}) == ["NtkJaisModel"]
    assert sum(family.recognises(published()) for family in FAMILIES) == 1
    assert not any(family.recognises({"model_type": "jais2"}) for family in FAMILIES)


def test_gpt_jx_must_spell_its_factors() -> None:
    config = published(model_type="gptjx", architectures=["GPTJXForCausalLM"])
    assert check_source(config) is FAMILY
    for key in ("embeddings_scale", "width_scale"):
        with pytest.raises(UnsupportedModel, match="GPT-JX has no mup_embeddings_scale or embeddings_scale"):
            check_source({**config, key: None})


@pytest.mark.parametrize(
    ("heads", "width", "layers", "head_dim"),
    [(40, 5120, 40, 128), (56, 7168, 48, 128), (32, 2560, 32, 80)],
)
def test_published_geometries(heads: int, width: int, layers: int, head_dim: int) -> None:
    geometry = FAMILY.geometry(published(n_head=heads, n_embd=width, n_layer=layers))
    assert (geometry.num_heads, geometry.head_dim, geometry.num_layers) == (heads, head_dim, layers)
    assert geometry.num_kv_heads == heads


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_embedding_type": "learned"}, "Cerebras-GPT"),
        ({"position_embedding_type": ...}, "'learned'"),
        ({"activation_function": "gelu"}, "activation_function is 'gelu'"),
        ({"activation_function": ...}, "'gelu_new'"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"n_head": 16}, "n_embd / n_head is 320"),
        ({"alibi_scaling": {"type": "ntk", "factor": 2.0}}, "'ntk'"),
        ({"alibi_scaling": {"type": "linear"}}, "alibi_scaling"),
        ({"alibi_scaling": {"type": "linear", "factor": 0.5}}, "0.5"),
        ({"alibi_scaling": {"type": "linear", "train_seq_len": 2048.0}}, "2048.0"),
        ({"alibi_scaling": {"type": "linear", "factor": 2.0, "train_seq_len": 2048}}, "2048"),
        ({"alibi_scaling": "linear"}, "'linear'"),
        ({"architectures": ["JAISDoubleHeadsModel"]}, "JAISLMHeadModel"),
    ],
)
def test_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        check_source(published(**changes))
    assert words in str(refusal.value)


def test_what_does_not_change_the_network_is_accepted() -> None:
    check_source(published(reorder_and_upcast_attn=True, add_cross_attention=None))
    check_source(published(alibi_scaling={"type": "linear", "factor": 2.0}))


# muP


def test_the_old_spelling_becomes_the_current_one() -> None:
    expected = dict(zip(NEW, (14.6, 0.111, 1.0, True), strict=True))
    assert scales(published()) == expected
    config = FAMILY.normalise(published())
    assert {key: config[key] for key in NEW} == expected
    assert not set(OLD) & config.keys()
    assert FAMILY.normalise(config) == config


def test_the_scales_have_the_original_s_defaults() -> None:
    assert scales({}) == dict(zip(NEW, (1.0, 1.0, 1.0, False), strict=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mup_embeddings_scale": 1.0}, "embeddings_scale 14.6"),
        ({"mup_scale_qk_dot_by_d": False}, "scale_qk_dot_by_d True"),
        ({"mup_width_scale": 0.111, "mup_output_alpha": 2.0}, "width_scale 0.111"),
        ({"embeddings_scale": "14.6"}, "expected a number"),
        ({"scale_qk_dot_by_d": 1}, "expected true or false"),
    ],
)
def test_contradicting_or_impossible_scales(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SourceError) as refusal:
        check_source(published(**changes))
    assert words in str(refusal.value)


def test_both_spellings_may_agree() -> None:
    both = published(mup_embeddings_scale=14.6, mup_output_alpha=2.0, mup_width_scale=0.0555)
    assert scales(both)["mup_width_scale"] * scales(both)["mup_output_alpha"] == pytest.approx(0.111)


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


@pytest.mark.parametrize(
    ("repo_id", "tokens"),
    [
        *((f"{owner}/jais-13b-chat", 2048) for owner in OWNERS),
        ("core42/jais-30b-v1", 2048),
        ("inceptionai/jais-30b-chat-v3", 8192),
        ("inceptionai/jais-family-590m", 2048),
        ("inceptionai/jais-family-30b-16k-chat", 16384),
        ("cerebras/btlm-3b-8k-base", 8192),
    ],
)
def test_known_checkpoints(repo_id: str, tokens: int) -> None:
    assert FAMILY.train_lengths[repo_id] == tokens


def test_the_length_limit_is_raised(source: Source, tmp_path: Path) -> None:
    folder = convert(source(), tmp_path / "out", scale=4.0, train_length=64).path
    assert config_of(folder)["n_positions"] == 256


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
