"""Refact: recognition, its two layouts, and the norm outside the trunk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSequenceClassification

from converter import convert
from tests import tiny
from tests.conftest import edit_json
from tests.patched import Convert, assert_logits, batch, config_of, load


def test_the_head_is_never_tied(converted: Convert, tmp_path: Path) -> None:
    """The config does not say so, and transformers ties the head by default."""
    folder = converted("refact")
    assert "tie_word_embeddings" not in config_of(tmp_path / "source")
    assert config_of(folder)["tie_word_embeddings"] is False
    model = load(folder)
    assert model.lm_head.weight.data_ptr() != model.transformer.wte.weight.data_ptr()


def test_the_width_of_the_mlp_is_the_real_one(converted: Convert) -> None:
    """5632 channels at the real size: two thirds of 4 * 2048, rounded up to a multiple of 256."""
    sizes = {"n_embd": 2048, "n_head": 32, "n_layer": 1, "vocab_size": 8, "pad_token_id": None}
    model = load(converted("refact"))
    config = type(model.config)(**{**model.config.to_dict(), **sizes})
    with torch.device("meta"):
        real = type(model)(config)
    shapes = {name: list(tensor.shape) for name, tensor in real.transformer.h[0].state_dict().items()}
    assert shapes == {
        "ln_1.weight": [2048],
        "attn.q.weight": [2048, 2048],
        "attn.kv.weight": [128, 2048],
        "attn.c_proj.weight": [2048, 2048],
        "ln_2.weight": [2048],
        "mlp.gate_up_proj.weight": [11264, 2048],
        "mlp.c_proj.weight": [2048, 5632],
    }


@torch.no_grad()
def test_both_layouts_are_the_same_network(converted: Convert) -> None:
    split = load(converted("refact", packed_projections=False))
    state = split.state_dict()
    for n in range(split.config.n_layer):
        for whole, parts in (
            ("attn.kv", ("attn.k", "attn.v")),
            ("mlp.gate_up_proj", ("mlp.linear_1", "mlp.linear_3")),
        ):
            names = [f"transformer.h.{n}.{part}.weight" for part in parts]
            state[f"transformer.h.{n}.{whole}.weight"] = torch.cat([state.pop(name) for name in names])
    config = type(split.config)(**{**split.config.to_dict(), "packed_projections": True})
    packed = type(split)(config).eval()
    packed.load_state_dict(state)
    ids, mask = batch()
    assert_logits(packed(ids, attention_mask=mask).logits, split(ids, attention_mask=mask).logits, mask)


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
