"""MPT checkpoints written by llm-foundry: grouped heads, defaults, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MptConfig

from converter.errors import UnsupportedModel
from converter.families.mpt import FAMILY
from converter.families.refusals import check_source
from templates.ntk_alibi import CHANNELS
from tests import tiny
from tests.patched import Convert, assert_logits, batch, config_of, load
from tests.reference import mpt as reference
from tests.tiny import replit
from tests.tiny.layout import merged


def config(heads: int = 24, **changes: Any) -> dict[str, Any]:
    return merged(replit.config(heads), changes)


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


@torch.no_grad()
def test_replit_code_has_24_heads_over_8(converted: Convert) -> None:
    folder = converted("replit", 24, "ntk")
    model = load(folder)
    assert model.transformer.blocks[0].attn.Wqkv.weight.shape == (24 * 8 + 2 * 8 * 8, 24 * 8)
    ids, mask = batch()
    _, tensors = tiny.read(folder)
    expected = reference.logits(config_of(folder), tensors, ids.numpy(), mask.numpy())
    assert_logits(model(ids, attention_mask=mask).logits, expected, mask)


@torch.no_grad()
def test_a_cache_holds_the_key_heads_only(converted: Convert) -> None:
    ids, _ = batch(rows=1, length=10)
    cache = load(converted("replit", 24, "ntk"))(ids, use_cache=True).past_key_values
    assert cache.layers[0].keys.shape == (1, 8, 10, 8 + CHANNELS)


@torch.no_grad()
def test_norm_eps_is_the_epsilon_of_the_norms(converted: Convert) -> None:
    folder = converted("replit", 4, "ntk", norm_eps=0.1)
    assert config_of(folder)["layer_norm_epsilon"] == 0.1
    ids, mask = batch()
    _, tensors = tiny.read(folder)
    expected = reference.logits(config_of(folder), tensors, ids.numpy(), mask.numpy())
    assert_logits(load(folder)(ids, attention_mask=mask).logits, expected, mask)


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
            assert check_source(values) is FAMILY
            assert FAMILY.normalise(without(values, "no_bias")).get("no_bias", True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "attn_type"),
        ({"norm_type": "rmsnorm"}, "norm_type"),
        ({"ffn_config": {"ffn_type": "mptglu"}}, "ffn_config"),
        ({"norm_eps": 1e-6}, "norm_eps"),
    ],
)
def test_stock_transformers_is_no_measure_for_these(changes: dict[str, Any], words: str) -> None:
    multihead = {} if words == "attn_type" else {"attn_type": "multihead_attention", "kv_n_heads": None}
    reason = FAMILY.stock_unfit(config(**{"attn_config": multihead, **changes}))
    assert reason is not None
    assert words in reason
