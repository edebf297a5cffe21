"""FlashAttention 2 and 3 as transformers calls their packages: what they get gives what sdpa gives.

test_numbers.py compares such models with the reference.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from tests import flash_stand_in
from tests.dealt import dealt
from tests.patched import FAMILIES, Convert, assert_logits, batch, load
from tests.test_continuous_batching import OLD, batched, prompts


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "implementation", "scaling"),
    dealt(FAMILIES, flash_stand_in.IMPLEMENTATIONS, ["ntk", "ntk-position", "ntk-length"], each=1),
)
def test_logits_are_those_of_sdpa(
    converted: Convert, monkeypatch: pytest.MonkeyPatch, family: str, implementation: str, scaling: str
) -> None:
    calls = flash_stand_in.install(monkeypatch, implementation)
    model = load(converted(family, 12, scaling))
    layers = model.config.num_hidden_layers
    inputs = {}
    for side in ("left", "right"):
        ids, mask = batch(rows=2, length=50, side=side)
        inputs[side] = {"input_ids": ids, "attention_mask": mask}
    inputs["none"] = {"input_ids": ids}
    documents = torch.cat([torch.arange(length) for length in (7, 33, 10)])
    inputs["packed"] = {"input_ids": ids, "position_ids": documents[None], "use_cache": False}
    expected = {name: model(**kwargs).logits for name, kwargs in inputs.items()}

    # transformers checks for a GPU when the implementation is set by its method.
    model.config._attn_implementation = implementation
    for name, kwargs in inputs.items():
        calls.plain.clear(), calls.varlen.clear()
        assert_logits(model(**kwargs).logits, expected[name], kwargs.get("attention_mask"))
        if name == "packed":
            assert calls.varlen == [[0, 7, 40, 50, 57, 90, 100]] * layers
            assert not calls.plain
        else:
            assert len(calls.plain) == layers
            assert not calls.varlen
    if scaling == "ntk-length":  # a cached key is that of its own time
        return
    cache, left = DynamicCache(), inputs["left"]
    for start, end in ((0, 20), (20, 49), (49, 50)):
        logits = model(
            left["input_ids"][:, start:end],
            attention_mask=left["attention_mask"][:, :end],
            past_key_values=cache,
            use_cache=True,
        ).logits
    assert_logits(logits, expected["left"][:, -1:])


@pytest.mark.parametrize(
    "implementation", ["flash_attention_2", pytest.param("flash_attention_3", marks=pytest.mark.slow)]
)
@pytest.mark.skipif(OLD, reason="transformers 4.57 has another function for this, which needs a GPU")
def test_continuous_batching(
    converted: Convert, monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    calls = flash_stand_in.install(monkeypatch, implementation)
    model = load(converted("refact", 12, "ntk-position"))
    rows = prompts()[:3]
    expected = [output.generated_tokens for output in batched(model, rows)]
    model.config._attn_implementation = implementation
    outputs = batched(model, rows)
    assert [output.error for output in outputs] == [None] * len(rows)
    assert [output.generated_tokens for output in outputs] == expected
    assert calls.varlen
    assert not calls.plain
