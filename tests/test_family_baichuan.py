"""Baichuan: the models that are refused, the head that a config implies, and the head's normalisation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from converter import UnsupportedModel, convert
from tests import tiny
from tests.patched import Convert, batch, config_of, load


def test_rotary_tensors_are_refused_whatever_the_config_says(tmp_path: Path) -> None:
    source = tiny.FACTORIES["baichuan"](tmp_path / "source", 4)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"rotary_emb\.inv_freq"):
        convert(source, tmp_path / "out", scale=2, verify=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


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
