"""Logits of converted models against the float64 reference and against stock transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon

from tests import tiny
from tests.dealt import dealt
from tests.patched import (
    FAMILIES,
    FITTED,
    HEADS,
    SCALINGS,
    STOCK,
    VARIANTS,
    Convert,
    assert_logits,
    batch,
    config_of,
    load,
)
from tests.reference import FAMILIES as REFERENCES


def reference_logits(folder: Path, family: str, ids: torch.Tensor, mask: torch.Tensor | None) -> Any:
    _, tensors = tiny.read(folder)
    rows = None if mask is None else mask.numpy()
    return REFERENCES[family].logits(config_of(folder), tensors, ids.numpy(), rows)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "scaling", "heads"),
    [*dealt(FAMILIES, SCALINGS, HEADS), *dealt(FAMILIES, FITTED, [12], each=1)],
)
def test_logits_are_the_reference_s(converted: Convert, family: str, scaling: str, heads: int) -> None:
    folder = converted(family, heads, scaling)
    model = load(folder)
    for side in ("left", "right"):
        ids, mask = batch(side=side)
        expected = reference_logits(folder, family, ids, mask)
        assert_logits(model(ids, attention_mask=mask).logits, expected, mask)
    expected = reference_logits(folder, family, ids, None)
    assert_logits(model(ids).logits, expected)
    assert_logits(model(ids, attention_mask=torch.ones_like(ids)).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_options_of_the_config_are_honoured(converted: Convert, variant: str) -> None:
    family, changes = VARIANTS[variant]
    folder = converted(family, 12, "ntk", **changes)
    ids, mask = batch()
    assert_logits(
        load(folder)(ids, attention_mask=mask).logits, reference_logits(folder, family, ids, mask), mask
    )


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_scaling_changes_the_logits_by_far_more_than_the_tolerance(
    converted: Convert, family: str
) -> None:
    folder = converted(family, 12, "ntk")
    ids, mask = batch()
    scaled = load(folder)(ids, attention_mask=mask).logits
    unscaled = load(folder, alibi_scaling=None)(ids, attention_mask=mask).logits
    assert (scaled - unscaled)[mask.bool()].abs().max() > 0.05


@torch.no_grad()
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("family", STOCK)
def test_unscaled_is_stock(converted: Convert, tmp_path: Path, family: str, heads: int) -> None:
    model = load(converted(family, heads, "none"))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "source").eval()
    ids, mask = batch()
    # Stock Falcon rounds its bias to bfloat16 in a float32 model; BLOOM's same function does not.
    with mock.patch.object(modeling_falcon, "build_alibi_tensor", modeling_bloom.build_alibi_tensor):
        assert_logits(model(ids).logits, stock(ids).logits)
        assert_logits(model(ids, attention_mask=mask).logits, stock(ids, attention_mask=mask).logits, mask)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_weights_come_with_the_same_numbers(converted: Convert, family: str) -> None:
    folder = converted(family, 12, "ntk-position")
    model = load(folder)
    ids, mask = batch(rows=2, length=40)
    fused = model(ids, attention_mask=mask).logits
    output = model(ids, attention_mask=mask, output_attentions=True)
    assert_logits(output.logits, fused, mask)
    assert_logits(load(folder, attn_implementation="eager")(ids, attention_mask=mask).logits, fused, mask)
    _, tensors = tiny.read(folder)
    expected = REFERENCES[family].trunk(
        config_of(folder), tensors, ids.numpy(), mask.numpy(), attentions=True
    )
    for weights, reference in zip(output.attentions, expected.attentions, strict=True):
        real = mask.bool()[:, None, :, None].expand_as(weights)
        assert (weights.double() - torch.as_tensor(reference))[real].abs().max() < 1e-5


@torch.no_grad()
def test_mpt_runs_beyond_its_own_length_limit(converted: Convert) -> None:
    folder = converted("mpt", 4, "ntk", max_seq_len=16)
    assert config_of(folder)["max_seq_len"] >= 16
    ids, mask = batch(length=80)
    assert_logits(
        load(folder)(ids, attention_mask=mask).logits, reference_logits(folder, "mpt", ids, mask), mask
    )
