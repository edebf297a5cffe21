"""A trained BLOOM in vLLM: every scaling, caches, compilation, and controls that must fail."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from converter import convert
from tests.patched import fitted_scaling, tempered
from tests.vllm.engines import (
    BOUND,
    FELT,
    TINY_BLOOM,
    difference,
    engine,
    mean_difference,
    next_log_probs,
    prompt_log_probs,
    trained_prompts,
    widened,
    worst,
)
from tests.vllm.engines import Reference as AnyReference

LENGTHS = (11, 200, 680)
# For long prompts of this model, transformers' float32 is itself off by up to 1e-3; at 692 tokens and with
# temperatures, by 1.2e-3 on some processors.
Reference = functools.partial(AnyReference, dtype=torch.float64)
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ntk": {"scale": 4.0},
    "ntk-position": {"dynamic": "position", "train_length": 256},
    "by-parts": {"method": "by-parts", "scale": 4.0, "ramp": (0.25, 2.0), "train_length": 256},
    **{
        f"tempered{basis}": {"method": "by-parts", "train_length": 256, **strength}
        for basis, strength in (("", {"scale": 4.0}), ("-position", {"dynamic": "position"}))
    },
    "concave": {"method": "concave", "train_length": 256},
    "fitted": {"slopes": fitted_scaling(8, 2)},
    "fitted-position": {"slopes": fitted_scaling(8, 2, "position") | {"train_seq_len": 256}},
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return widened(tmp_path_factory.mktemp("wide") / "source")


@pytest.fixture
def converted_wide(wide: Path, tmp_path: Path) -> Any:
    def build(scaling: str) -> Path:
        convert(wide, tmp_path / scaling, verify=False, **SCALINGS[scaling])
        return tempered(tmp_path / scaling) if "tempered" in scaling else tmp_path / scaling

    return build


@pytest.mark.parametrize("scaling", SCALINGS)
def test_log_probabilities(converted_wide: Any, scaling: str) -> None:
    folder = converted_wide(scaling)
    reference, prompts = Reference(folder), trained_prompts(*LENGTHS)
    assert reference.felt(prompts[-1]) > FELT
    with engine(folder) as llm:
        assert worst(llm, reference, prompts) < BOUND


def test_heads_that_the_backend_must_pad(tmp_path: Path) -> None:
    """tiny-bloom's own heads of 8 channels, which vLLM's CPU backend does not take."""
    convert(TINY_BLOOM, tmp_path / "out", verify=False, scale=4.0)
    with engine(tmp_path / "out") as llm:
        assert worst(llm, Reference(tmp_path / "out"), trained_prompts(*LENGTHS)) < BOUND


@pytest.mark.parametrize("scaling", ["ntk", "ntk-position"])
def test_chunked_prefill_and_cached_prefixes(converted_wide: Any, scaling: str) -> None:
    folder = converted_wide(scaling)
    reference, [prompt] = Reference(folder), trained_prompts(692)
    expected = reference(prompt)[-1:]
    with engine(folder, max_num_batched_tokens=48, max_num_seqs=8, enable_prefix_caching=True) as llm:
        found, cached = next_log_probs(llm, prompt)
        assert cached == 0
        assert difference(found, expected) < BOUND
        found, cached = next_log_probs(llm, prompt)
        assert cached == 640, "5 blocks of 128 tokens"
        assert difference(found, expected) < BOUND


def test_weights_that_are_quantised_when_they_are_loaded(converted_wide: Any) -> None:
    """Weights and inputs have 4 significant bits, so only a gross mistake is found, such as a wrong order."""
    folder, [prompt] = converted_wide("ntk"), trained_prompts(200)
    expected = Reference(folder)(prompt)
    changes = []
    for options in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "fp8_per_channel"}):
        with engine(folder, **options) as llm:
            [found] = prompt_log_probs(llm, [prompt])
        changes.append(mean_difference(found, expected))
    assert changes[0] < 0.2 < changes[1] < 1


@pytest.mark.parametrize("scaling", ["fitted", "fitted-position", "tempered", "tempered-position"])
def test_dropped_temperatures_are_noticed(converted_wide: Any, scaling: str) -> None:
    from converter.vllm_plugin.templates.ntk_alibi import Alibi

    folder = converted_wide(scaling)
    dropped = mock.patch.object(Alibi, "query_factors", return_value=None)
    with dropped, engine(folder) as llm:
        assert worst(llm, Reference(folder), trained_prompts(692)) > FELT


def test_dropped_slopes_are_noticed(converted_wide: Any) -> None:
    from vllm.model_executor.layers.attention import Attention

    def without_slopes(*arguments: Any, alibi_slopes: Any, **options: Any) -> Attention:
        assert len(alibi_slopes) == 8
        return Attention(*arguments, alibi_slopes=None, **options)

    folder = converted_wide("ntk")
    with mock.patch("converter.vllm_plugin.attention.Attention", without_slopes), engine(folder) as llm:
        assert worst(llm, Reference(folder), trained_prompts(692)) > FELT
