"""Converted tiny checkpoints for the tests of the models, made by the real pipeline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from converter import convert
from converter.repository import templates_folder
from tests import tiny

FAMILIES = tuple(tiny.FACTORIES)
STOCK = tuple(tiny.STOCK)
# Powers of two and not, more and fewer than the next one.
HEADS = (16, 12, 40)
TRAIN_LENGTH = 24

STATIC = {
    "none": {"method": "none"},
    "linear": {"method": "linear", "scale": 4.0},
    "ntk": {"method": "ntk", "scale": 4.0},
    "ntk-published": {"method": "ntk-published", "scale": 4.0},
}
DYNAMIC = {
    f"{method}-{dynamic}": {"method": method, "dynamic": dynamic, "rate": 1.5, "train_length": TRAIN_LENGTH}
    for method in ("linear", "ntk", "ntk-published")
    for dynamic in ("length", "position")
}
SCALINGS: dict[str, dict[str, Any]] = {**STATIC, **DYNAMIC}

# What makes the families' options show: each changes the network, none the tensors' number of heads.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom-residual-after-norm": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "bloom-untied": ("bloom", {"tie_word_embeddings": False}),
    "mpt-bias-max-16": ("mpt", {"attn_config": {"alibi_bias_max": 16}}),
    "mpt-softmax-scale": ("mpt", {"attn_config": {"softmax_scale": 0.2}}),
    "mpt-clip-qkv": ("mpt", {"attn_config": {"clip_qkv": 1.0}}),
    "mpt-qk-ln": ("mpt", {"attn_config": {"qk_ln": True}}),
    "mpt-expansion": ("mpt", {"expansion_ratio": 2}),
    "mpt-logit-scale": ("mpt", {"logit_scale": "inv_sqrt_d_model"}),
    "mpt-biases": ("mpt", {"no_bias": False}),
    "replit-multi-query": (
        "replit",
        {"attn_config": {"attn_type": "multiquery_attention", "kv_n_heads": None}},
    ),
    "replit-qk-ln": ("replit", {"attn_config": {"qk_ln": True}}),
    "replit-untied": ("replit", {"tie_word_embeddings": False}),
    "replit-rmsnorm": ("replit", {"norm_type": "rmsnorm", "no_bias": False}),
    "replit-glu": ("replit", {"ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 80}}),
    "replit-silu": ("replit", {"ffn_config": {"ffn_act_fn": {"name": "silu"}}}),
    "mosaic-gpt-no-qk-ln": ("mosaic_gpt", {"attn_qk_ln": False}),
    "mosaic-gpt-bias-max-16": ("mosaic_gpt", {"alibi_bias_max": 16}),
    "mosaic-gpt-clip": ("mosaic_gpt", {"attn_clip_qkv": 1.0}),
    "mosaic-gpt-scales": ("mosaic_gpt", {"softmax_scale": 0.2, "logit_scale": "inv_sqrt_d_model"}),
    "mosaic-gpt-biases": ("mosaic_gpt", {"no_bias": False, "mlp_ratio": 2}),
    "falcon-parallel": ("falcon", {"parallel_attn": True}),
    "falcon-multi-query": ("falcon", {"multi_query": True}),
    "falcon-grouped": (
        "falcon",
        {"new_decoder_architecture": True, "parallel_attn": True, "num_kv_heads": 2},
    ),
    "falcon-no-bias": ("falcon", {"bias": False, "ffn_hidden_size": 80}),
    "jais-width": ("jais", {"n_inner": None}),
    "jais-sqrt-d": ("jais", {"mup_scale_qk_dot_by_d": False}),
    "jais-untied": ("jais", {"tie_word_embeddings": False}),
    "jais-13b-spelling": (
        "jais",
        {
            **dict.fromkeys(("mup_embeddings_scale", "mup_output_alpha", "mup_width_scale")),
            "mup_scale_qk_dot_by_d": None,
            "embeddings_scale": 1.5,
            "scale_qk_dot_by_d": True,
            "width_scale": 0.11,
        },
    ),
    "btlm": (
        "jais",
        {"model_type": "btlm", "architectures": ["BTLMLMHeadModel"], "mup_embeddings_scale": 1.5},
    ),
    "baichuan-plain-head": ("baichuan", {"norm_head": False}),
    "baichuan-epsilon": ("baichuan", {"rms_norm_eps": 0.1}),
    "refact-first-revision": ("refact", {"packed_projections": False}),
    "refact-width": ("refact", {"n_inner": 600}),
}

Convert = Callable[..., Path]
Mistaken = Callable[[str, str, str], None]


@pytest.fixture
def converted(tmp_path: Path) -> Convert:
    """``converted(family, num_heads, scaling, **config_changes)``: writes and converts a checkpoint."""

    def build(family: str, num_heads: int = 4, scaling: str = "ntk", **changes: Any) -> Path:
        # MPT's configs switch the cache off; the others' do not.
        source = tiny.FACTORIES[family](tmp_path / "source", num_heads, **{"use_cache": True, **changes})
        out = tmp_path / "out"
        convert(source, out, verify=False, **SCALINGS[scaling])
        return out

    return build


@pytest.fixture
def mistaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mistaken:
    """``mistaken(file, before, after)``: from here on, the templates are a copy with such a mistake."""

    def plant(file: str, before: str, after: str) -> None:
        copy = tmp_path / "templates"
        shutil.copytree(templates_folder(), copy)
        text = (copy / file).read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{before!r} stands {text.count(before)} times in {file}"
        (copy / file).write_text(text.replace(before, after), encoding="utf-8")
        # In this order: the first may be imported only now, and takes the function from the other.
        for module in ("converter.verification.patched", "converter.repository"):
            monkeypatch.setattr(f"{module}.templates_folder", lambda: copy)

    return plant


def load(folder: Path, auto_class: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """The converted model as a user loads it, with every tensor accounted for."""
    model, info = auto_class.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **options
    )
    if auto_class is AutoModelForCausalLM:
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def batch(rows: int = 3, length: int = 60, side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and a mask, both [rows, length], with rows of unequal length."""
    lengths = [length - 17 * row for row in range(rows)]
    ids = torch.from_numpy(tiny.token_ids(rows, length))
    return ids, torch.from_numpy(tiny.padding_mask(lengths, side, length))


def assert_logits(actual: torch.Tensor, expected: Any, mask: torch.Tensor | None = None) -> None:
    """Equal within 1e-4, or 1e-5 of the largest logit if that is more, at every real token."""
    expected = torch.as_tensor(np.asarray(expected)).double()
    real = torch.ones(expected.shape[:2]).bool() if mask is None else mask.bool()
    error = (actual.detach().double() - expected)[real].abs().max().item()
    assert error <= max(1e-4, 1e-5 * expected[real].abs().max().item()), f"largest error {error:.2e}"
