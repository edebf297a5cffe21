"""The NumPy reference against its own invariants and stock transformers; test_slopes.py has its formulas.

Stock is compared in float32 and only where it is right: not Falcon's eager attention, which adds
the bias twice.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.falcon import modeling_falcon

from tests import tiny
from tests.dealt import dealt
from tests.reference import FAMILIES, alibi

HEADS = [16, 12, 40]
NTK = {"type": "ntk", "factor": 4.0}
MASKS = {
    "no mask": None,
    "ones": tiny.padding_mask([48, 48], "left"),
    "left padding": tiny.padding_mask([48, 29], "left"),
    "right padding": tiny.padding_mask([48, 29], "right"),
}

Array = NDArray[np.float64]
Module = TypeVar("Module", bound=nn.Module)


# Invariants of the whole network


def tolerance(logits: Array) -> float:
    """What float32 may differ from the truth by, in logits."""
    return max(1e-4, 1e-5 * float(np.abs(logits).max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_dynamic_scalings_by_their_definition(tmp_path: Path, family: str) -> None:
    layers = tiny.CHECKPOINTS[family].layers
    config, tensors = tiny.read(tiny.FACTORIES[family](tmp_path, 12, **{layers: 1}))
    logits = FAMILIES[family].logits
    # By position, what comes later has no influence.
    ids, last = tiny.token_ids(1, 40), []
    for dynamic, differs in (("position", False), ("length", True)):
        config["alibi_scaling"] = {"type": "ntk", "dynamic": dynamic, "rate": 1.0, "train_seq_len": 10}
        whole, start = (logits(config, tensors, tokens) for tokens in (ids, ids[:, :20]))
        assert (np.abs(whole[:, :20] - start).max() > 100 * tolerance(start)) == differs
        last.append(whole[:, -1])
    # The last query of a single layer sees its position as the length.
    assert_allclose(last[0], last[1], atol=1e-11)
    # By length, each row has the static scaling of its own length.
    mask = tiny.padding_mask([40, 25, 6], "left")
    ids = tiny.token_ids(3, 40)
    dynamic = {"type": "ntk", "dynamic": "length", "rate": 1.5, "train_seq_len": 15}
    by_length = logits({**config, "alibi_scaling": dynamic}, tensors, ids, mask)
    for row, factor in enumerate([4.0, 2.5, 1.0]):
        static = {**config, "alibi_scaling": {"type": "ntk", "factor": factor}}
        fixed = logits(static, tensors, ids[row : row + 1], mask[row : row + 1])[0]
        assert_allclose(by_length[row][mask[row] == 1], fixed[mask[row] == 1], atol=1e-11)


# Stock transformers


def stock_logits(model: nn.Module, ids: NDArray[np.int64], mask: NDArray[np.int64] | None) -> Array:
    """The logits [B, L, vocabulary] of a stock model."""
    masks = {} if mask is None else {"attention_mask": torch.from_numpy(mask)}
    with torch.no_grad():
        output = model.eval()(torch.from_numpy(ids), use_cache=False, **masks)
    logits: Array = output.logits.double().numpy()
    return logits


def check_against(model: nn.Module, family: str, folder: Path, length: int = 48) -> None:
    """Reference and ``model`` agree at every real token, and would not with other slopes."""
    config, tensors = tiny.read(folder)
    ids = tiny.token_ids(2, length)
    for mask in MASKS.values():
        real = np.ones((2, length)) == 1 if mask is None else mask == 1
        expected = FAMILIES[family].logits(config, tensors, ids, mask)[real]
        difference = np.abs(stock_logits(model, ids, mask)[real] - expected).max()
        assert difference <= tolerance(expected)
        scaled = FAMILIES[family].logits({**config, "alibi_scaling": NTK}, tensors, ids, mask)[real]
        assert np.abs(scaled - expected).max() > 1000 * tolerance(expected)


def load(folder: Path, attention: str) -> nn.Module:
    """The folder's stock model in float32."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    return model


@pytest.mark.parametrize(
    ("family", "heads", "changes"),
    [
        *((family, heads, {}) for family in ("bloom", "mpt") for heads in HEADS),
        ("bloom", 12, {"apply_residual_connection_post_layernorm": True}),
        ("bloom", 12, {"tie_word_embeddings": False}),
        ("bloom", 12, {"layer_norm_epsilon": 0.1}),
        ("bloom", 12, {"n_layer": 3}),
        ("mpt", 12, {"attn_config": {"softmax_scale": 0.1}}),
        ("mpt", 12, {"attn_config": {"clip_qkv": 1.0}}),
        ("mpt", 12, {"tie_word_embeddings": False}),
        ("mpt", 12, {"layer_norm_epsilon": 0.1}),
    ],
    ids=str,
)
def test_it_is_stock(tmp_path: Path, family: str, heads: int, changes: dict[str, Any]) -> None:
    folder = tiny.FACTORIES[family](tmp_path, heads, **changes)
    check_against(load(folder, "eager"), family, folder)


def test_mpt_logit_scale(tmp_path: Path) -> None:
    config, tensors = tiny.read(tiny.FACTORIES["mpt"](tmp_path))
    ids = tiny.token_ids(1, 9)
    plain = FAMILIES["mpt"].logits(config, tensors, ids)
    for scale, factor in ((0.25, 0.25), ("inv_sqrt_d_model", 1 / math.sqrt(32))):
        scaled = FAMILIES["mpt"].logits({**config, "logit_scale": scale}, tensors, ids)
        assert_allclose(scaled, plain * factor)


FALCON_LAYOUTS: dict[str, dict[str, Any]] = {
    "biases": {},
    "no biases": {"bias": False},
    "narrow MLP": {"ffn_hidden_size": 120},
    "untied": {"tie_word_embeddings": False},
}


def exact_falcon_bias(mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Stock Falcon's bias before the rounding: slope times position, [B * num_heads, 1, L]."""
    positions = (mask.cumsum(dim=-1) - 1) * mask
    slopes = torch.from_numpy(alibi.press_slopes(num_heads))
    return (slopes[None, :, None] * positions[:, None, :]).flatten(0, 1)[:, None, :].to(dtype)


@pytest.mark.parametrize(("layout", "heads"), dealt(FALCON_LAYOUTS, HEADS))
def test_falcon_is_stock_but_for_the_rounding_of_the_bias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: int, layout: str
) -> None:
    """Stock rounds slope times position to bf16 even in a float32 model; here it does not."""
    folder = tiny.FACTORIES["falcon"](tmp_path, heads, **FALCON_LAYOUTS[layout])
    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", exact_falcon_bias)
    check_against(load(folder, "sdpa"), "falcon", folder)


def test_falcon_is_stock_where_bf16_rounds_nothing(tmp_path: Path) -> None:
    """Eight heads have slopes 2^-1 to 2^-8: times a position up to 256, these are exact in bf16."""
    folder = tiny.FACTORIES["falcon"](tmp_path, 8)
    check_against(load(folder, "sdpa"), "falcon", folder)
