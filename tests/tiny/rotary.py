"""Tiny rotary checkpoints, written by transformers' own classes, with config.json spelled by hand.

Versions of transformers write a config's rotary settings differently; here both have the spelling that
published checkpoints have, or the one that 5.x writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from tests.tiny.layout import SPECIAL_IDS, VOCAB_SIZE, Random, tokenizer, write_json

Spelling = Literal["classic", "parameters"]

LENGTH = 64
"""``max_position_embeddings``."""
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": LENGTH,
    **SPECIAL_IDS,
}
HEAD_DIM = 16
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
FULL_HEADS = {"num_key_value_heads": 4}
OWN_HEAD_DIM = {"head_dim": HEAD_DIM}
SETTINGS: dict[str, dict[str, Any]] = {
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {"sliding_window": 32},
    "diffllama": {},
    "ernie4_5": OWN_HEAD_DIM,
    "exaone4": {"sliding_window": 32, "sliding_window_pattern": 4},
    "flex_olmo": EXPERTS,
    "gemma": OWN_HEAD_DIM,
    "gemma2": {**OWN_HEAD_DIM, "sliding_window": 32},
    "glm": {**OWN_HEAD_DIM, "partial_rotary_factor": 0.5},
    "glm4": {**OWN_HEAD_DIM, "partial_rotary_factor": 0.5},
    "glm4_moe": {**OWN_HEAD_DIM, **EXPERTS, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
    "gpt_neox": {**FULL_HEADS, "rotary_pct": 0.5},
    "granite": {},
    "granitemoe": EXPERTS,
    "granitemoeshared": EXPERTS,
    "helium": {**OWN_HEAD_DIM, **FULL_HEADS},
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {**EXPERTS, "sliding_window": None},
    "olmo": FULL_HEADS,
    "olmo2": FULL_HEADS,
    "olmoe": {**EXPERTS, **FULL_HEADS},
    "persimmon": {**FULL_HEADS, "partial_rotary_factor": 0.5},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": None, "partial_rotary_factor": 1.0},
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {**EXPERTS, **FULL_HEADS, "use_sliding_window": False},
    "qwen3": OWN_HEAD_DIM,
    "qwen3_moe": {**OWN_HEAD_DIM, **EXPERTS},
    "seed_oss": OWN_HEAD_DIM,
    "smollm3": {},
    "stablelm": {**FULL_HEADS, "partial_rotary_factor": 0.25},
    "starcoder2": {"sliding_window": None},
    "vaultgemma": {**OWN_HEAD_DIM, "sliding_window": 32},
}
"""model_type -> what its config has beside ``SIZES`` and the base."""


def config(model_type: str, spelling: Spelling = "classic", base: float = 10_000.0) -> dict[str, Any]:
    """config.json of a tiny checkpoint."""
    model_class = _model_class(model_type)
    values = {
        "architectures": [model_class.__name__],
        "model_type": model_type,
        **SIZES,
        **SETTINGS[model_type],
        "tie_word_embeddings": False,
    }
    old = model_type == "gpt_neox"
    if spelling == "classic":
        return {**values, "rotary_emb_base" if old else "rope_theta": base}
    partial = values.pop("rotary_pct" if old else "partial_rotary_factor", None)
    parameters = {"rope_type": "default", "rope_theta": base}
    values["rope_parameters"] = parameters | ({"partial_rotary_factor": partial} if partial else {})
    return values


def rotary(
    folder: Path,
    model_type: str = "llama",
    *,
    spelling: Spelling = "classic",
    base: float = 10_000.0,
    **config_changes: Any,
) -> Path:
    """Writes a checkpoint into ``folder``, made if need be, and returns the folder.

    Args:
        folder: where to write.
        model_type: one of ``SETTINGS``.
        spelling: of the rotary settings in config.json; the weights do not depend on it.
        base: of the rotary frequencies.
        config_changes: keys of config.json.
    """
    values = config(model_type, spelling, base) | config_changes
    # The weights are the same for every spelling, so the class is given the one that any version reads.
    settings = {**config(model_type, "classic", base), **config_changes}
    del settings["architectures"], settings["model_type"]
    torch.manual_seed(0)
    model = _model_class(model_type)(transformers.CONFIG_MAPPING[model_type](**settings)).float()
    random = Random(0, f"{model.base_model_prefix}.")
    for name, parameter in sorted(model.named_parameters()):
        embeddings = "embed" in name
        parameter.data.copy_(random(name, *parameter.shape, scale=0.3 if embeddings else None))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer(folder)
    write_json(folder / "config.json", values)
    return folder


def _model_class(model_type: str) -> Any:
    config_class = transformers.CONFIG_MAPPING[model_type]
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
