"""transformers' continuous batching gives what ``generate`` gives."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from tests import tiny
from tests.messages import raises
from tests.patched import Convert, load

OLD = transformers.__version__.startswith("4.")
LENGTHS = (5, 64, 129, 700)
NEW_TOKENS = 6
FUNCTIONS = {"sdpa": "sdpa_paged", "eager": "eager_paged"} if OLD else {"sdpa": "sdpa", "eager": "eager"}
"""Attention of ``generate`` -> attention of continuous batching; the newest makes eager paged by itself."""


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 4.57 asks for the memory of a GPU, and fails if there is none."""
    if OLD:
        from transformers.generation.continuous_batching import cache

        breakdown = (torch.device("cpu"), 1 << 30, 0, 0)
        monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: breakdown)


def prompts() -> list[list[int]]:
    return [tiny.token_ids(1, length)[0].tolist() for length in LENGTHS]


def greedy() -> GenerationConfig:
    return GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)


def generated(model: Any, rows: Sequence[list[int]]) -> tuple[list[list[int]], torch.Tensor]:
    """New tokens of ``generate``, each row by itself, and their log-probabilities [rows, tokens]."""
    tokens, found = [], []
    for row in rows:
        output = model.generate(
            torch.tensor([row]),
            generation_config=greedy(),
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = output.sequences[0, len(row) :]
        tokens.append(new.tolist())
        found.append(torch.cat(output.logits).log_softmax(-1).gather(1, new[:, None])[:, 0])
    return tokens, torch.stack(found)


def with_attention(model: Any, name: str) -> Any:
    model.set_attn_implementation(FUNCTIONS[name])
    return model


def batched(model: Any, rows: Sequence[list[int]]) -> list[Any]:
    """The outputs of ``generate_batch``. A prompt of 700 tokens takes several forward passes."""
    config = greedy()
    if OLD:
        config.num_blocks, config.max_batch_tokens = 128, 256
        outputs = model.generate_batch(rows, generation_config=config, progress_bar=False)
        return list(outputs.values()) if outputs else []
    from transformers import ContinuousBatchingConfig

    size = ContinuousBatchingConfig(
        page_size=32, num_blocks=128, max_batch_tokens=256, return_logprobs=True, auto_switch_to_flash=False
    )
    outputs = model.generate_batch(rows, generation_config=config, continuous_batching_config=size)
    return list(outputs.values())


@pytest.mark.parametrize(
    ("family", "scaling", "attention"),
    [
        ("bloom", "fitted-position", "sdpa"),
        ("mpt", "ntk-position", "eager"),
        ("falcon", "concave", "sdpa"),
        ("replit", "ntk", "sdpa"),
        pytest.param("refact", "ntk-position", "eager", marks=pytest.mark.slow),
        pytest.param("jais", "ntk", "sdpa", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_generate(converted: Convert, family: str, scaling: str, attention: str) -> None:
    model = load(converted(family, 12, scaling), attn_implementation=attention)
    tokens, log_probabilities = generated(model, prompts())
    outputs = batched(with_attention(model, attention), prompts())
    assert [output.error for output in outputs] == [None] * len(LENGTHS)
    assert [output.generated_tokens for output in outputs] == tokens
    if not OLD:  # 4.57 does not return them
        found = torch.tensor([output.logprobs for output in outputs])
        assert (found - log_probabilities).abs().max() < 3e-4


def test_length_dynamic_scaling_is_refused(converted: Convert) -> None:
    model = load(converted("bloom", 4, "ntk-length"))
    with raises(ValueError, "length-dynamic", "--dynamic position"):
        batched(model, prompts())


def test_eager_attention_in_half_precision_is_refused(converted: Convert) -> None:
    model = load(converted("bloom"), dtype=torch.bfloat16)
    assert all(output.error is None for output in batched(with_attention(model, "sdpa"), prompts()))
    model = with_attention(model, "eager")
    if not OLD:
        assert "rounds the scores" in batched(model, prompts())[0].error
        model.set_attn_implementation("paged|eager")
    with raises(ValueError, "torch.bfloat16", "use sdpa or float32"):
        model(torch.tensor([[5]]), position_ids=torch.tensor([[7]]), cache=object())


def test_a_concave_penalty_in_float16_is_refused(converted: Convert) -> None:
    model = with_attention(load(converted("bloom", 4, "concave"), dtype=torch.float16), "sdpa")
    with pytest.raises(ValueError, match="in bfloat16"):
        model(torch.tensor([[5]]), position_ids=torch.tensor([[7]]), cache=object())


def test_tensor_parallelism_is_refused(converted: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has only some of the heads that the paged cache was made for."""
    model = with_attention(load(converted("bloom")), "sdpa")
    module = sys.modules[type(model.base_model).__mro__[1].__module__]
    monkeypatch.setattr(module, "head_processes", lambda _: object())
    with raises(ValueError, "continuous batching", "tensor parallelism"):
        model(torch.tensor([[5]]), position_ids=torch.tensor([[7]]), cache=object())


@pytest.mark.skipif(not OLD, reason="from transformers 5.24 on, the model updates the paged cache")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_without_a_paged_cache_is_refused(converted: Convert, attention: str) -> None:
    """It would attend to the new tokens only."""
    model = load(converted("bloom"))
    model.config._attn_implementation = attention
    with raises(ValueError, attention, "continuous batching"):
        model(torch.tensor([[5]]), position_ids=torch.tensor([[7]]), cache=object())
