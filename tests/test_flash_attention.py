"""FlashAttention 2 and 3 as transformers calls their packages: what they get gives what sdpa gives.

test_numbers.py compares such models with the reference.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from templates.ntk_plan import check_dtype
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


def test_single_precision_is_refused_in_words() -> None:
    """The packages take half precision only. Without a Linear layer, transformers ends with StopIteration."""
    plain, quantised = SimpleNamespace(), SimpleNamespace(_is_quantized=True)
    on_gpu = {"device": torch.device("cuda")}
    single = SimpleNamespace(dtype=torch.float32, **on_gpu)
    half = SimpleNamespace(dtype=torch.bfloat16, **on_gpu)
    for name in ("flash_attention_2", "paged|flash_attention_3", "kernels-community/flash-attn"):
        with pytest.raises(
            ValueError, match=re.escape(f"{name} needs half precision; use dtype=torch.bfloat16")
        ):
            check_dtype(name, plain, single)
        check_dtype(name, plain, half)
        check_dtype(name, quantised, single)
    check_dtype("sdpa", plain, single)
    check_dtype("flash_attention_2", plain, torch.zeros(1, 1, 1))  # stand-ins on the CPU


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
