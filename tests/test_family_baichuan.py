"""Baichuan: the models that are refused, the head that a config implies, and the head's normalisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from converter import SourceError, UnsupportedModel, convert
from converter.families import baichuan, refusals
from tests import tiny
from tests.patched import Convert, batch, config_of, load

# The keys that distinguish the models, from the config.json files on the Hub.
BAICHUAN_13B = {
    "architectures": ["BaichuanForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 13696,
    "model_max_length": 4096,
    "model_type": "baichuan",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "vocab_size": 64000,
}
BAICHUAN2_13B = {**BAICHUAN_13B, "gradient_checkpointing": False, "vocab_size": 125696}
BAICHUAN2_7B = {
    **BAICHUAN2_13B,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "z_loss_weight": 0,
}
BAICHUAN_7B = {
    key: value for key, value in BAICHUAN2_7B.items() if key not in ("model_max_length", "z_loss_weight")
} | {"architectures": ["BaiChuanForCausalLM"], "vocab_size": 64000}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize(
    ("config", "head"), [(BAICHUAN_13B, False), (BAICHUAN2_13B, True)], ids=["Baichuan", "Baichuan2"]
)
def test_the_13b_models_are_taken(config: dict[str, Any], head: bool) -> None:
    family = refusals.check_source(config)
    assert family is baichuan.FAMILY
    assert family.normalise(config)["norm_head"] is head
    assert family.architectures(config) == ["NtkBaichuanForCausalLM"]
    assert family.geometry(config).num_heads == 40
    assert len(set(family.stock_slopes(config))) == 40


@pytest.mark.parametrize(
    "config",
    [
        BAICHUAN_7B,
        BAICHUAN2_7B,
        {**BAICHUAN_7B, "architectures": ["BaichuanForCausalLM"]},
        without(BAICHUAN2_7B, "max_position_embeddings"),
        {**BAICHUAN2_7B, "hidden_size": 2048, "num_attention_heads": 16},
        {**without(BAICHUAN_7B, "max_position_embeddings"), "hidden_size": 2048, "model_max_length": 4096},
        {**BAICHUAN2_13B, "hidden_size": 2560, "rope_theta": 10000.0},
    ],
    ids=["7B", "2-7B", "renamed", "no-positions-key", "resized", "class-only", "rope-theta"],
)
def test_the_rotary_models_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"has rotary positions, not ALiBi .* rope_scaling"):
        refusals.check_source(config)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**BAICHUAN_13B, "max_position_embeddings": 4096}, "it has max_position_embeddings"),
        ({**BAICHUAN2_13B, "rope_scaling": {"type": "linear", "factor": 2}}, "it has rope_scaling"),
        ({**BAICHUAN_13B, "architectures": ["BaiChuanForCausalLM"]}, "its class is BaiChuanForCausalLM"),
        (without(BAICHUAN_13B, "model_max_length"), "neither model_max_length"),
    ],
    ids=["positions", "rope", "class", "neither"],
)
def test_positions_are_never_guessed(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"ambiguous.*{said}.*restore"):
        refusals.check_source(config)


def test_rotary_tensors_are_refused_whatever_the_config_says(tmp_path: Path) -> None:
    source = tiny.FACTORIES["baichuan"](tmp_path / "source", 4)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"rotary_emb\.inv_freq"):
        convert(source, tmp_path / "out", scale=2, verify=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("changes", "head"),
    [
        ({"vocab_size": 125700, "z_loss_weight": 0}, True),
        ({"vocab_size": 125696, "z_loss_weight": 2e-4}, True),
        ({"vocab_size": 64016, "norm_head": False}, False),
        ({"vocab_size": 125700, "norm_head": True}, True),
        ({"vocab_size": 64000, "norm_head": True}, True),
        ({"vocab_size": 125696, "z_loss_weight": 0, "norm_head": False}, False),
    ],
    ids=str,
)
def test_the_head_of_a_fine_tuned_model(changes: dict[str, Any], head: bool) -> None:
    config = {**BAICHUAN_13B, **changes}
    refusals.check_source(config)
    assert baichuan.FAMILY.normalise(config)["norm_head"] is head


@pytest.mark.parametrize(
    "changes",
    [{"vocab_size": 64016}, {"vocab_size": 64000, "z_loss_weight": 0}, {"vocab_size": None}],
    ids=str,
)
def test_the_head_is_never_guessed(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"which head .* --set norm_head=true"):
        refusals.check_source({**BAICHUAN_13B, **changes})


def test_other_values_are_refused() -> None:
    for changes, message in (
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantised"),
        ({"architectures": ["BaichuanForConditionalGeneration"]}, "architectures names"),
    ):
        with pytest.raises(UnsupportedModel, match=message):
            refusals.check_source({**BAICHUAN2_13B, **changes})
    for changes in ({"norm_head": "yes"}, {"z_loss_weight": "high"}, {"z_loss_weight": -1}):
        with pytest.raises(SourceError, match=next(iter(changes))):
            refusals.check_source({**BAICHUAN2_13B, **changes})


@pytest.mark.parametrize(
    ("stored", "meant"), [(False, False), ([False], False), ([[False]], False), ([True], True), ([], False)]
)
def test_gradient_checkpointing_is_unwrapped(stored: Any, meant: bool) -> None:
    config = {**BAICHUAN_13B, "gradient_checkpointing": stored}
    assert baichuan.FAMILY.normalise(config)["gradient_checkpointing"] is meant
    assert "gradient_checkpointing" not in baichuan.FAMILY.normalise(BAICHUAN_13B)


def test_known_lengths_and_the_raised_limit(tmp_path: Path) -> None:
    assert baichuan.FAMILY.train_lengths["baichuan-inc/Baichuan2-13B-Base"] == 4096
    source = tiny.FACTORIES["baichuan"](tmp_path / "source", 4)
    convert(source, tmp_path / "out", scale=2, verify=False)
    assert config_of(tmp_path / "out")["model_max_length"] == 8192


def test_a_loaded_model_does_not_checkpoint_gradients(converted: Convert) -> None:
    """The original's config has ``[false]``, which is true in Python."""
    folder = converted("baichuan")
    assert config_of(folder)["gradient_checkpointing"] is False
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
def test_the_length_of_a_row_does_not_matter(converted: Convert) -> None:
    model, ids = load(converted("baichuan")), batch()[0]
    before = model(ids).logits
    model.lm_head.weight.mul_(torch.rand(len(model.lm_head.weight), 1) * 100 + 0.01)
    assert torch.allclose(model(ids).logits, before, atol=1e-4)


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


def test_the_converted_config_says_what_was_decided(converted: Convert) -> None:
    config = config_of(converted("baichuan"))
    assert config["norm_head"] is True
    assert config["tie_word_embeddings"] is False
    assert json.dumps(config)
