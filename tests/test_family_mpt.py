"""MPT checkpoints written by llm-foundry: grouped heads, defaults, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MptConfig

from converter.errors import SourceError, Undecided, UnsupportedModel
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


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({}, 8),
        ({"kv_n_heads": 24}, 24),
        ({"kv_n_heads": 1}, 1),
        ({"attn_type": "multiquery_attention", "kv_n_heads": None}, 1),
        ({"attn_type": "multihead_attention", "kv_n_heads": None}, 24),
        ({"attn_type": "multihead_attention", "kv_n_heads": 24}, 24),
    ],
)
def test_attn_type_decides_the_number_of_key_heads(options: dict[str, Any], groups: int) -> None:
    values = config(attn_config=options)
    assert check_source(values).geometry(values).num_kv_heads == groups


def test_the_defaults_are_those_of_the_code_that_wrote_the_config() -> None:
    ours = config()
    ours["attn_config"] = without(ours["attn_config"], "alibi")
    with pytest.raises(UnsupportedModel, match=r"attn_config\.alibi is False"):
        check_source(ours)
    check_source({**ours, "architectures": ["MptForCausalLM"]})

    assert FAMILY.normalise(without(config(), "no_bias"))["no_bias"] is False
    native = {**without(config(), "no_bias"), "architectures": ["MptForCausalLM"]}
    assert "no_bias" not in FAMILY.normalise(native)


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


def test_the_activation_of_krutrim_is_not_guessed() -> None:
    sizes = {"d_model": 4608, "n_heads": 48, "attn_config": {"kv_n_heads": 8, "clip_qkv": 6}}
    with pytest.raises(Undecided, match=r"--set ffn_config\.ffn_act_fn\.name=relu or "):
        check_source(config(**sizes))
    for name in ("relu", "gelu"):
        assert check_source(config(**sizes, ffn_config={"ffn_act_fn": {"name": name}})) is FAMILY


@pytest.mark.parametrize(
    "changes",
    [
        {"learned_pos_emb": True},
        {"embedding_fraction": 0.1},
        {"use_pad_tok_in_ffn": False},
        {"attn_config": {"attn_uses_sequence_id": True, "attn_impl": "flash"}},
        {"attn_config": {"attn_temperature_tuning": {"floor_scale": 8192, "attn_scale": 0.0}}},
        {"fc_type": {"name": "torch", "bias": False}, "ffn_config": {"fc_type": {"name": "torch"}}},
        {"block_overrides": None, "final_logit_softcapping": None},
    ],
)
def test_what_changes_no_real_token_is_accepted(changes: dict[str, Any]) -> None:
    assert check_source(config(**changes)) is FAMILY


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_config": {"attn_type": "multiquery_attention"}}, "kv_n_heads is 8, but attn_type"),
        ({"attn_config": {"attn_type": "multihead_attention"}}, "kv_n_heads is 8, but attn_type"),
        ({"attn_config": {"attn_type": "flash"}}, "attn_type is 'flash'"),
        ({"attn_config": {"qk_gn": True}}, "qk_gn is True"),
        ({"attn_config": {"fused_qkv": False}}, "fused_qkv is False"),
        ({"attn_config": {"kv_dim": 16}}, "kv_dim is 16"),
        ({"attn_config": {"nope": True}}, "nope is True"),
        ({"attn_config": {"reuse_kv_layer_idx": -1}}, "reuse_kv_layer_idx is -1"),
        ({"attn_config": {"attn_logit_softcapping": 50.0}}, "attn_logit_softcapping is 50.0"),
        ({"attn_config": {"norm_type": "rmsnorm"}}, "attn_config.norm_type is 'rmsnorm'"),
        ({"attn_config": {"norm_eps": 1e-6}}, "attn_config.norm_eps is 1e-06"),
        ({"attn_config": {"attn_temperature_tuning": {"attn_scale": 0.1}}}, "attn_temperature_tuning"),
        ({"attn_config": {"qk_ln": True}, "norm_eps": 1e-6}, "qk_ln is set and the norms have epsilon 1e-06"),
        ({"norm_type": "triton_rmsnorm"}, "norm_type is 'triton_rmsnorm'"),
        ({"norm_type": "rmsnorm", "fc_type": None}, "norm_type is 'rmsnorm' without fc_type"),
        ({"fc_type": "te"}, "fc_type is 'te'"),
        ({"fc_type": {"name": "te"}}, "fc_type is 'te'"),
        ({"ffn_config": {"fc_type": {"name": "te"}}}, "ffn_config.fc_type is 'te'"),
        ({"ffn_config": {"ffn_type": "mptgeglu"}}, "ffn_type is 'mptgeglu'"),
        ({"ffn_config": {"ffn_type": "mb_dmoe"}}, "ffn_type is 'mb_dmoe'"),
        ({"ffn_config": {"ffn_act_fn": {"name": "tanh"}}}, "ffn_act_fn is"),
        ({"ffn_config": {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}}, "ffn_act_fn is"),
        ({"block_overrides": {"order": []}}, "block_overrides is"),
        ({"fuse_norm_attn_norm": True}, "fuse_norm_attn_norm is True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ],
)
def test_what_the_template_does_not_honour_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        check_source(config(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_config": {"kv_n_heads": None}}, "no kv_n_heads"),
        ({"attn_config": {"kv_n_heads": 5}}, "kv_n_heads 5 does not divide 24 heads"),
        ({"attn_config": {"kv_n_heads": 48}}, "kv_n_heads 48 does not divide 24 heads"),
        ({"norm_eps": 1e-6, "layer_norm_epsilon": 1e-5}, "norm_eps 1e-06 and layer_norm_epsilon 1e-05"),
        ({"norm_eps": "small"}, "norm_eps is 'small'"),
        ({"ffn_config": {"ffn_hidden_size": 0}}, "ffn_hidden_size is 0"),
        ({"ffn_config": [1]}, r"ffn_config is \[1\]"),
    ],
)
def test_impossible_values(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SourceError, match=words):
        check_source(config(**changes))


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


def test_known_trained_lengths() -> None:
    assert FAMILY.train_lengths["replit/replit-code-v1_5-3b"] == 4096
    assert FAMILY.train_lengths["mosaicml/mpt-7b-storywriter"] == 65536
