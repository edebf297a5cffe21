"""Hostile values in configs whose results are verified, so transformers builds and runs the model."""

# ruff: noqa: ARG001 -- every case gets a random generator, whether it uses it or not
from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile import mutate

POOL: list[tuple[str, Any]] = [
    ("attn_implementation", "nobody/evil-kernel"),
    ("_attn_implementation", "nobody/evil-kernel"),
    ("_attn_implementation_internal", "nobody/evil-kernel"),
    ("experts_implementation", "nobody/evil-kernel"),
    ("dtype", "nn.Module"),
    ("torch_dtype", "save"),
    ("transformers_weights", "../../outside/secret.json"),
    ("transformers_version", "\n\x1b[2J"),
    ("custom_pipelines", {"text-generation": {"impl": "evil.Model"}}),
    ("auto_map", {"AutoModelForCausalLM": "modeling_evil.Model", "AutoConfig": "nobody/evil--evil.Model"}),
    ("tie_word_embeddings", "x"),
    ("torchscript", True),
    ("pruned_heads", {"0": [0]}),
    ("num_labels", 1 << 24),
    ("id2label", [1]),
    ("hidden_dropout", 1e308),
    ("attention_dropout", -1),
    ("layer_norm_epsilon", 1e308),
    ("layer_norm_epsilon", "x"),
    ("slow_but_exact", True),
    ("vocab_size", 1 << 24),
    ("base_model_tp_plan", {"x": "y"}),
    ("problem_type", "evil"),
    ("is_encoder_decoder", True),
    ("use_cache", []),
    ("pad_token_id", 1 << 40),
    ("sub_configs", {"a": {}}),
    ("text_config", {"model_type": "evil"}),
    ("quantization_config", {"quant_method": "evil"}),
]


def base(folder: Path) -> dict[str, Any]:
    """Replaces the source by a BLOOM that loads."""
    from tests import tiny

    for name in (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        (folder / name).unlink()
    tiny.FACTORIES["bloom"](folder, 2)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def changed(key: str, value: Any) -> Any:
    def make(folder: Path, rng: Random) -> None:
        (folder / "config.json").write_bytes(mutate.dumps({**base(folder), key: value}))

    return make


EXAMPLES: dict[str, Any] = {f"{key} {value!r:.40}": changed(key, value) for key, value in POOL}


def vary(folder: Path, rng: Random) -> None:
    (folder / "config.json").write_bytes(mutate.dumps(mutate.worse(base(folder), rng, POOL)))
