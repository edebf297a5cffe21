"""MosaicGPT and the first replit-code-v1-3b: recognition, slopes, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from converter import convert
from converter.errors import SourceError, UnsupportedModel
from converter.families import recognise
from converter.families.mosaic_gpt import FAMILY
from converter.families.refusals import check_source
from tests import tiny
from tests.patched import Convert, assert_logits, batch, config_of, load
from tests.reference import mosaic_gpt as reference
from tests.tiny import mosaic_gpt


def config(**changes: Any) -> dict[str, Any]:
    return {**mosaic_gpt.config(4), **changes}


@pytest.mark.parametrize(
    ("model_type", "architecture"), [("mosaic_gpt", "MosaicGPT"), ("replit_lm", "ReplitLM")]
)
def test_both_names_are_the_same_family(model_type: str, architecture: str) -> None:
    named = config(model_type=model_type, architectures=[architecture])
    assert check_source(named) is FAMILY
    assert FAMILY.architectures(named) == ["NtkMosaicGptForCausalLM"]


@torch.no_grad()
def test_the_first_replit_code_converts(converted: Convert) -> None:
    folder = converted(
        "mosaic_gpt", 8, "ntk", model_type="replit_lm", architectures=["ReplitLM"], attn_qk_ln=False
    )
    assert config_of(folder)["model_type"] == "ntk_mosaic_gpt"
    ids, mask = batch()
    _, tensors = tiny.read(folder)
    expected = reference.logits(config_of(folder), tensors, ids.numpy(), mask.numpy())
    assert_logits(load(folder)(ids, attention_mask=mask).logits, expected, mask)


def test_slopes_are_one_series_for_every_number_of_heads() -> None:
    slopes = FAMILY.stock_slopes(config(n_heads=12, d_model=96))
    assert slopes == pytest.approx([2 ** (-8 * head / 12) for head in range(1, 13)])
    steeper = FAMILY.stock_slopes(config(n_heads=3, d_model=24, alibi_bias_max=6))
    assert steeper == pytest.approx([1 / 4, 1 / 16, 1 / 64])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alibi": False}, "alibi is False"),
        ({"alibi": None}, "alibi is None"),
        ({"alibi": "yes"}, "alibi is 'yes'"),
        ({"prefix_lm": True}, "prefix_lm is True"),
        ({"norm_type": "low_precision_layernorm"}, "norm_type is 'low_precision_layernorm'"),
        ({"multiquery_attention": True}, "multiquery_attention is True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"softmax_scale": 1e-6}, "softmax_scale is 1e-06"),
        ({"architectures": ["MosaicGPTForDreaming"]}, "'MosaicGPTForDreaming'"),
    ],
)
def test_what_the_template_does_not_honour_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        check_source(config(**changes))


def test_alibi_is_off_by_default() -> None:
    with pytest.raises(UnsupportedModel, match="alibi is False"):
        check_source({key: value for key, value in config().items() if key != "alibi"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alibi_bias_max": 0}, "alibi_bias_max is 0"),
        ({"attn_clip_qkv": "6"}, "attn_clip_qkv is '6'"),
        ({"logit_scale": "sqrt"}, "logit_scale is 'sqrt'"),
        ({"mlp_ratio": 2.5}, "mlp_ratio is 2.5"),
        ({"n_heads": 5}, "not a multiple of the number of heads, 5"),
    ],
)
def test_impossible_values(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SourceError, match=words):
        check_source(config(**changes))


def test_known_trained_lengths() -> None:
    assert FAMILY.train_lengths["mosaicml/mpt-1b-redpajama-200b"] == 2048
    assert FAMILY.train_lengths["mosaicml/mpt-1b-redpajama-200b-dolly"] == 2048


def test_the_original_refuses_longer_inputs_so_the_limit_is_raised() -> None:
    raised = config(max_seq_len=64)
    assert FAMILY.raise_length is not None
    FAMILY.raise_length(raised, 256)
    assert raised["max_seq_len"] == 256


def test_an_mpt_is_not_taken_for_one() -> None:
    assert recognise({"model_type": "mpt"}).name == "mpt"


@pytest.mark.parametrize(("heads", "doubted"), [(4, False), (12, True), (16, False)])
def test_slopes_that_the_config_leaves_open_are_named(tmp_path: Path, heads: int, doubted: bool) -> None:
    source = tiny.FACTORIES["mosaic_gpt"](tmp_path / "source", heads)
    result = convert(source, tmp_path / "out", scale=2, verify=False)
    assert any(f"has {heads} heads, not a power of two" in note for note in result.notes) == doubted
