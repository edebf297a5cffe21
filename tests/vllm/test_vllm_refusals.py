"""What vLLM would compute wrongly is rejected with an error, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from transformers import AutoConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from converter.vllm_plugin import register, versions
from tests.messages import raises, says
from tests.vllm.engines import converted_tiny, engine

Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path) -> Refused:
    """``refused(scaling, **options)``: why an engine does not start."""

    def start(scaling: str, **options: Any) -> str:
        folder = converted_tiny(tmp_path, "bloom", scaling)
        with pytest.raises((ValueError, RuntimeError)) as error, engine(folder, **options):
            pass
        return str(error.value)

    return start


def test_length_dynamic_scaling(refused: Refused) -> None:
    says(refused("ntk-length"), "--dynamic position", "--scale")


def test_texts_too_long_for_a_concave_penalty_in_float16(refused: Refused) -> None:
    message = refused("concave", dtype="float16", max_model_len=1024)
    says(message, "1024", "bfloat16")


def test_a_quantised_cache_with_positions_in_the_keys(refused: Refused) -> None:
    message = refused("ntk-position", kv_cache_dtype="fp8")
    says(message, "fp8", "positions", "drop --kv-cache-dtype")


@pytest.mark.parametrize("backend", [AttentionBackendEnum.FLASHINFER, AttentionBackendEnum.FLEX_ATTENTION])
def test_a_backend_that_ignores_slopes(refused: Refused, backend: AttentionBackendEnum) -> None:
    """vLLM has one backend on the CPU, and cannot import the others; so the choice is made for it."""
    chosen = SimpleNamespace(get_name=lambda: backend.name)
    with mock.patch("converter.vllm_plugin.attention.get_attn_backend", return_value=chosen):
        message = refused("ntk")
    says(message, backend.name, "ALiBi slopes", "--attention-backend TRITON_ATTN or FLASH_ATTN")


def test_another_model_s_class(refused: Refused) -> None:
    message = refused("ntk", hf_overrides={"architectures": ["BloomForCausalLM"]})
    says(message, "BloomForCausalLM", "--hf-overrides", "architectures", "drop that")


def test_another_model_s_type(refused: Refused) -> None:
    changes = {"model_type": "bloom", "architectures": ["BloomForCausalLM"]}
    says(refused("ntk", hf_overrides=changes), "--hf-overrides", "model_type bloom", "drop that")


def test_weights_that_are_stored_quantised(refused: Refused) -> None:
    stored = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    message = refused("ntk", hf_overrides=stored, dtype="bfloat16")
    says(message, "stored quantised", "--quantization fp8_per_channel")


def test_vllm_s_own_way_to_run_a_repository_s_code(refused: Refused) -> None:
    message = refused("ntk", model_impl="transformers", trust_remote_code=True)
    says(message, "vLLM", "pip install . in a clone of ntk-convert")


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0"])
def test_another_version_of_vllm(tmp_path: Path, version: str) -> None:
    folder = converted_tiny(tmp_path, "bloom", "ntk")
    try:
        with mock.patch("vllm.__version__", version):
            register()
        with raises(ValueError, f"vLLM {version}") as error:
            AutoConfig.from_pretrained(folder)
        assert "\n" not in str(error.value)
    finally:
        register()
    assert AutoConfig.from_pretrained(folder).alibi_scaling == {"type": "ntk", "factor": 4.0}


def test_the_extra_states_the_same_versions() -> None:
    requirements = [Requirement(line) for line in metadata.requires("ntk-convert") or []]
    [range_] = [each.specifier for each in requirements if each.name == "vllm"]
    assert range_ == SpecifierSet(f">={versions.FIRST},<{versions.BEYOND.base_version}")
