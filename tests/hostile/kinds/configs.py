"""config.json of every family and of rotary models."""

# ruff: noqa: ARG001 -- every case gets a random generator, whether it uses it or not
from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile import mutate
from tests.hostile.source import CONFIGS

POOL: list[tuple[str, Any]] = sorted(
    (pair for config in CONFIGS.values() for pair in config.items()),
    key=lambda pair: (pair[0], repr(pair[1])),
)
POOL += [
    ("quantization_config", {}),
    ("norm_head", True),
    ("alibi_slopes", [0.5, 0.25]),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("num_labels", 3),
    ("id2label", {"0": "x"}),
    ("head_dim", 8),
    ("sliding_window", 4),
    ("_name_or_path", "mosaicml/mpt-7b"),
    ("torch_dtype", "float16"),
    ("z_loss_weight", 0.1),
    ("norm_eps", 1e-5),
    ("compression_config", None),
]


def changed(family: str, **changes: Any) -> Any:
    """A family's config with some values changed."""

    def make(folder: Path, rng: Random) -> None:
        (folder / "config.json").write_bytes(mutate.dumps({**CONFIGS[family], **changes}))

    return make


def raw(content: bytes) -> Any:
    def make(folder: Path, rng: Random) -> None:
        (folder / "config.json").write_bytes(content)

    return make


HUGE = 10**299
GREAT = 10**9
EXAMPLES: dict[str, Any] = {
    **{f"good {family}": changed(family) for family in CONFIGS},
    "empty": raw(b""),
    "null": raw(b"null"),
    "deep lists": raw(b"[" * 1_000_000),
    "deep objects": raw(b'{"a":' * 1_000_000),
    "65 levels": raw(b'{"model_type":"bloom","x":' + b"[" * 65 + b"]" * 65 + b"}"),
    "endless number": raw(b'{"n_head":' + b"9" * 1_000_000 + b"}"),
    "1e999": raw(b'{"model_type":"bloom","n_head":1e999}'),
    "byte order mark": raw(b"\xef\xbb\xbf{}"),
    "UTF-16": raw(json.dumps(CONFIGS["bloom"]).encode("utf-16")),
    "40 MB": raw(b'{"model_type":"' + b"x" * (40 << 20) + b'"}'),
    "many values": raw(b'{"model_type":["' + b"[]," * (5 << 20) + b"0]}"),
    "forged line": changed("bloom", model_type="bloom\nerror: forged\x1b[2J"),
    "surrogate": changed("bloom", model_type="\ud800"),
    "surrogate kept": changed("bloom", note="\ud800\udfff\x00\x1b"),
    "heads 10^299": changed("bloom", num_attention_heads=HUGE),
    "heads 2^24": changed("bloom", num_attention_heads=1 << 24, n_embed=1 << 24),
    "layers 10^9": changed("bloom", n_layer=GREAT),
    "layers 2^24": changed("bloom", n_layer=1 << 24),
    "layers nan": changed("bloom", n_layer=mutate.NAN),
    "head of 2^24": changed("llama", head_dim=1 << 24),
    "rotary heads 2^24": changed("llama", num_attention_heads=1 << 24, hidden_size=1 << 24),
    "rotary classes a number": changed("llama", architectures=1e-320),
    "rotary classes an object": changed("llama", architectures={"a": "b"}),
    "rotary layers a list": changed("llama", num_hidden_layers=[1]),
    "rope_theta 10^299": changed("llama", rope_theta=HUGE),
    "rope_theta 1e308": changed("llama", rope_theta=1e308),
    "rope_theta infinite": changed("llama", rope_theta=mutate.INFINITY),
    "rope_theta nan": changed("llama", rope_theta=mutate.NAN),
    "rotary_pct 1e-320": changed("gpt_neox", rotary_pct=1e-320, rope_parameters=None),
    "vocab_size 10^299": changed("bloom", vocab_size=HUGE),
    "max_seq_len 10^299": changed("mpt", max_seq_len=HUGE),
    "max_seq_len a list": changed("mpt", max_seq_len=[1]),
    "seq_length huge": changed("bloom", seq_length=HUGE),
    "softmax_scale 10^299": changed("mpt", attn_config={"alibi": True, "softmax_scale": HUGE}),
    "clip_qkv 10^299": changed("mpt", attn_config={"alibi": True, "clip_qkv": HUGE}),
    "alibi_bias_max 10^299": changed("mpt", attn_config={"alibi": True, "alibi_bias_max": HUGE}),
    "embeddings_scale 10^299": changed("jais", embeddings_scale=HUGE),
    "width_scale products": changed("jais", width_scale=1e308, mup_width_scale=1e308, mup_output_alpha=1e308),
    "z_loss_weight 10^299": changed("baichuan", z_loss_weight=HUGE),
    "heads named by a list": changed("bloom", architectures=[["BloomForCausalLM"]]),
    "heads named by an object": changed("bloom", architectures=[{}]),
    "heads named by a number": changed("baichuan", architectures=5),
    "20000 classes": changed("bloom", architectures=["BloomForCausalLM"] * 20_000),
    "model_type a list": changed("bloom", model_type=["bloom"]),
    "model_type an object": changed("llama", model_type={}),
    "auto_map a text": changed("jina_bert", auto_map="x"),
    "auto_map elsewhere": changed("llama", auto_map={"AutoModelForCausalLM": "nobody/evil--evil.Model"}),
    "auto_map of objects": changed("mosaic_bert", auto_map={"AutoModel": {}}),
    "recorded model_type": changed(
        "converted_rotary",
        ntk_convert={"rotary": {"scaling": None, "source_config": {"model_type": "nothing"}}},
    ),
    "recorded model_type a list": changed(
        "converted_rotary", ntk_convert={"rotary": {"scaling": None, "source_config": {"model_type": []}}}
    ),
    "recorded length of text": changed(
        "converted",
        model_type="ntk_jais",
        n_embd=8,
        ntk_convert={},
        alibi_scaling={"type": "ntk", "train_seq_len": "x"},
    ),
    "recorded scaling 10^299": changed("converted", alibi_scaling={"type": "ntk", "factor": HUGE}),
    "recorded rate 10^299": changed(
        "converted", alibi_scaling={"type": "ntk", "train_seq_len": 64, "dynamic": "length", "rate": HUGE}
    ),
    "recorded length 10^299": changed(
        "converted", alibi_scaling={"type": "ntk", "train_seq_len": HUGE, "dynamic": "length"}
    ),
    "slopes of text": changed("converted", model_type="ntk_jais", n_embd=8, alibi_slopes=["a", "b"]),
    "slopes 10^299": changed("converted", model_type="ntk_jais", n_embd=8, alibi_slopes=[HUGE, 1]),
    "forged source": changed("converted_rotary", ntk_convert={"source": "\n\x1b[2J", "alibi_scaling": {}}),
}


def vary(folder: Path, rng: Random) -> None:
    family = rng.choice(sorted(CONFIGS))
    if rng.random() < 0.85:
        content = mutate.dumps(mutate.worse(CONFIGS[family], rng, POOL))
    else:
        content = mutate.worse_bytes(mutate.dumps(CONFIGS[family]), rng)
    (folder / "config.json").write_bytes(content)
