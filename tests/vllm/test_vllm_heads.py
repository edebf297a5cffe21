"""Encoders in vLLM, and the heads that vLLM pools: embeddings, classes of texts and of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import tiny
from tests.dealt import dealt
from tests.messages import raises
from tests.patched import FAMILIES, FITTED
from tests.vllm.engines import (
    TASKS,
    HeadReference,
    converted_tiny,
    engine,
    furthest,
    pooled,
    random_prompts,
)

BOUND, FELT = 1e-4, 2e-3
"""Largest difference in float32, and what unscaled slopes must change, at least."""
# The tiny models are scaled for 24 tokens.
LENGTHS = (5, 24, 100, 400)
SCALINGS = ("ntk", "ntk-length", "ntk-position", "by-parts-tempered", "fitted", "fitted-length")

ENCODERS = {name: (name, {}) for name in tiny.ENCODERS} | {
    f"{name}-{variant}": (name, changes)
    for name in tiny.ENCODERS
    for variant, changes in (tiny.CHECKPOINTS[name].layouts | tiny.CHECKPOINTS[name].variants).items()
}
"""Every option that changes what an encoder computes."""


def compare(folder: Path, family: str, scaling: str, head: str, written: Any, **changes: Any) -> None:
    """Converts such a checkpoint, and compares the engine with transformers, scaled and not."""
    prompts = random_prompts(*LENGTHS)
    expected = {}
    for name in (scaling, "none"):
        converted = converted_tiny(folder / name, family, name, written, **changes)
        expected[name] = [*map(HeadReference(converted, head), prompts)]
    assert furthest(expected["none"][-1:], expected[scaling][-1:]) > FELT
    with engine(folder / scaling / "out", runner="pooling") as llm:
        assert furthest(pooled(llm, head, prompts), expected[scaling]) < BOUND


@pytest.mark.parametrize(("case", "scaling"), dealt(ENCODERS, SCALINGS))
def test_embeddings_of_encoders(tmp_path: Path, case: str, scaling: str) -> None:
    """The language model serves them, too: Jina's own embedding models name its class."""
    family, changes = ENCODERS[case]
    compare(tmp_path, family, scaling, "Model", None, **changes)


@pytest.mark.parametrize(
    ("family", "head", "scaling"),
    [
        *dealt(tiny.ENCODERS, TASKS, ["ntk", "ntk-length"], each=3),
        *dealt(FAMILIES, TASKS, ["ntk", "ntk-position", *FITTED], each=2),
    ],
)
def test_heads(tmp_path: Path, family: str, head: Any, scaling: str) -> None:
    compare(tmp_path, family, scaling, head, head)


def test_a_language_model_gives_embeddings(tmp_path: Path) -> None:
    """By vLLM's own option."""
    prompts, folder = random_prompts(*LENGTHS), converted_tiny(tmp_path, "bloom", "ntk")
    expected = [*map(HeadReference(folder, "Model"), prompts)]
    with engine(folder, runner="pooling", convert="embed") as llm:
        assert furthest(pooled(llm, "Model", prompts), expected) < BOUND


def test_the_slopes_of_another_layer_are_noticed(tmp_path: Path) -> None:
    from converter.vllm_plugin.symmetric import TextByText

    prompts, folder = random_prompts(400), converted_tiny(tmp_path, "mosaic_bert", "fitted-length")
    expected = [*map(HeadReference(folder, "Model"), prompts)]
    first = property(lambda self: 0, lambda self, value: None)
    with mock.patch.object(TextByText, "row", first, create=True), engine(folder, runner="pooling") as llm:
        assert furthest(pooled(llm, "Model", prompts), expected) > FELT


def test_half_precision_is_as_close_as_transformers(tmp_path: Path) -> None:
    """bfloat16, the dtype of vLLM's default on many platforms."""
    prompts, folder = random_prompts(100, 400), converted_tiny(tmp_path, "jina_bert", "ntk-length")
    expected = [*map(HeadReference(folder, "Model"), prompts)]
    model = HeadReference(folder, "Model").model.to(torch.bfloat16)
    with torch.no_grad():
        theirs = [model(torch.tensor([prompt])).last_hidden_state[0].float().mean(0) for prompt in prompts]
    with engine(folder, runner="pooling", dtype="bfloat16") as llm:
        found = pooled(llm, "Model", prompts)
    assert furthest(found, expected) < 1.5 * furthest(theirs, expected)


def test_a_head_that_vllm_lacks(tmp_path: Path) -> None:
    folder = converted_tiny(tmp_path, "jina_bert", "ntk", "QuestionAnswering")
    with (
        raises(ValueError, "NtkJinaBertForQuestionAnswering") as error,
        engine(folder),
    ):
        pass
    assert "NtkJinaBertForSequenceClassification" in str(error.value)


@pytest.mark.parametrize("option", ["enable_chunked_prefill", "enable_prefix_caching"])
def test_options_that_would_cut_the_texts_of_an_encoder(tmp_path: Path, option: str) -> None:
    """vLLM itself only warns."""
    folder = converted_tiny(tmp_path, "mosaic_bert", "ntk")
    options = {"runner": "pooling", option: True, "max_num_batched_tokens": 1024}
    with pytest.raises((ValueError, RuntimeError), match="drop --enable"), engine(folder, **options) as llm:
        pooled(llm, "Model", random_prompts(100, 400))
