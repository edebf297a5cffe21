"""MosaicGPT and the first replit-code-v1-3b: recognition, slopes, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from converter import convert
from converter.families.mosaic_gpt import FAMILY
from tests import tiny
from tests.patched import Convert, assert_logits, batch, config_of, load
from tests.reference import mosaic_gpt as reference
from tests.tiny import mosaic_gpt


def config(**changes: Any) -> dict[str, Any]:
    return {**mosaic_gpt.config(4), **changes}


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


@pytest.mark.parametrize(("heads", "doubted"), [(4, False), (12, True), (16, False)])
def test_slopes_that_the_config_leaves_open_are_named(tmp_path: Path, heads: int, doubted: bool) -> None:
    source = tiny.FACTORIES["mosaic_gpt"](tmp_path / "source", heads)
    result = convert(source, tmp_path / "out", scale=2, verify=False)
    assert any(f"has {heads} heads, not a power of two" in note for note in result.notes) == doubted
