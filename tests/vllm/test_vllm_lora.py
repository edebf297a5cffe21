"""LoRA adapters, beside peft in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from vllm.lora.request import LoRARequest

from tests.vllm.engines import (
    BOUND,
    FELT,
    Reference,
    converted_tiny,
    difference,
    engine,
    prompt_log_probs,
    random_prompts,
)

# One of each kind of fused projection: by head, queries first, stored transposed, stored in parts.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bloom": ("bloom", "ntk", {}),
    "mpt": ("mpt", "ntk-position", {}),
    "jais": ("jais", "ntk", {}),
    "refact": ("refact", "ntk-position", {"packed_projections": False}),
}
LAYERS = {
    "bloom": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "mpt": ["Wqkv", "out_proj", "up_proj", "down_proj"],
    "jais": ["c_attn", "c_proj", "c_fc", "c_fc2"],
    "refact": ["q", "k", "v", "c_proj", "linear_1", "linear_3"],
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter(case: str, tmp_path: Path) -> None:
    family, scaling, changes = CASES[case]
    folder, adapter = converted_tiny(tmp_path, family, scaling, **changes), tmp_path / "adapter"
    reference, [prompt] = Reference(folder), random_prompts(200)
    plain = reference(prompt)
    torch.manual_seed(0)
    settings = LoraConfig(target_modules=LAYERS[family], r=8, lora_alpha=32, init_lora_weights=False)
    adapted = get_peft_model(reference.model, settings)
    adapted.save_pretrained(adapter)
    with torch.no_grad():
        expected = adapted(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert (expected - plain).abs().max() > FELT
    with engine(folder, enable_lora=True, max_lora_rank=8) as llm:
        [found] = prompt_log_probs(llm, [prompt], LoRARequest("adapter", 1, str(adapter)))
        assert difference(found, expected) < BOUND
        [found] = prompt_log_probs(llm, [prompt])
        assert difference(found, plain) < BOUND


def test_an_adapter_of_packed_projections_is_refused(tmp_path: Path) -> None:
    """By vLLM: Refact's current layout has kv and gate_up_proj, which here are parts of other layers."""
    folder, adapter = converted_tiny(tmp_path, "refact", "ntk"), tmp_path / "adapter"
    settings = LoraConfig(target_modules=["q", "kv"], r=8)
    get_peft_model(Reference(folder).model, settings).save_pretrained(adapter)
    with (
        engine(folder, enable_lora=True, max_lora_rank=8) as llm,
        pytest.raises(ValueError, match=r"but received \[.*\.kv'"),
    ):
        prompt_log_probs(llm, random_prompts(20), LoRARequest("adapter", 1, str(adapter)))
