"""Quantised weights and quantised caches, where their packages are installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TorchAoConfig

from tests.patched import Convert, batch, load

pytestmark = pytest.mark.slow
FAMILIES = ("bloom", "mpt")


def error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return ((logits - expected).norm() / expected.norm()).item()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_int8_weights_of_torchao(converted: Convert, family: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    folder = converted(family, 16, "ntk-position")
    config = TorchAoConfig(quant_type=quantization.Int8WeightOnlyConfig())
    model = load(folder, quantization_config=config, device_map="cpu")
    ids, mask = batch(rows=2, length=60)
    logits, expected = (each(ids, attention_mask=mask).logits for each in (model, load(folder)))
    assert 1e-4 < error(logits[mask.bool()], expected[mask.bool()]) < 0.05


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "scaling"), [*((family, "ntk-position") for family in FAMILIES), ("bloom", "concave")]
)
@pytest.mark.parametrize(
    ("package", "settings", "bound"),
    [
        ("optimum.quanto", {"backend": "quanto", "nbits": 4, "q_group_size": 16}, 0.3),
        ("hqq", {"backend": "hqq", "nbits": 8, "q_group_size": 16, "axis_key": 1, "axis_value": 1}, 0.02),
    ],
    ids=["quanto", "hqq"],
)
def test_quantised_caches(
    converted: Convert, family: str, scaling: str, package: str, settings: dict[str, Any], bound: float
) -> None:
    """Keys are folded after they leave such a cache: rounded positions would be worth nothing."""
    pytest.importorskip(package)
    model = load(converted(family, 16, scaling))
    ids, mask = batch(rows=2, length=60)
    cached, plain = (
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=2,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        ).logits[1]
        for options in ({"cache_implementation": "quantized", "cache_config": settings}, {})
    )
    assert 1e-4 < error(cached, plain) < bound
