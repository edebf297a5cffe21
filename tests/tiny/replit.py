"""replit-code-v1_5-3b: llm-foundry's own MPT with grouped-query attention, as its v0.3 writes it."""

from __future__ import annotations

from typing import Any

from tests.tiny.layout import HEAD_DIM, SPECIAL_IDS, State, classes, own, published

PREFIX = "transformer."
HEADS = classes("MPT")


def config(num_heads: int) -> dict[str, Any]:
    # The real one has 24 heads over 8; other numbers are not all divisible by 3.
    shared = next(size for size in (3, 4, 2, 1) if num_heads % size == 0)
    return published(
        "mpt",
        "replit/replit-code-v1_5-3b",
        attn_config={"kv_n_heads": num_heads // shared},
        d_model=HEAD_DIM * num_heads,
        n_heads=num_heads,
        n_layers=2,
        **SPECIAL_IDS,
    )


def describe(config: dict[str, Any], head: str, state: State) -> None:
    width, vocabulary = config["d_model"], config["vocab_size"]
    options, ffn = config["attn_config"], config.get("ffn_config", {"ffn_type": "mptmlp"})
    heads = {"grouped_query_attention": options.get("kv_n_heads"), "multiquery_attention": 1}
    keys = heads.get(options.get("attn_type"), config["n_heads"]) * width // config["n_heads"]
    inner = ffn.get("ffn_hidden_size") or config["expansion_ratio"] * width
    bias = not config["no_bias"]
    norms_have_bias = bias and "rmsnorm" not in config["norm_type"]
    state.embeddings("wte", vocabulary, width)
    for n in range(config["n_layers"]):
        block = f"blocks.{n}"
        state.add(f"{block}.norm_1", width, bias=norms_have_bias)
        state.add(f"{block}.attn.Wqkv", width + 2 * keys, width, bias=bias)
        if options["qk_ln"]:
            state.add(f"{block}.attn.q_ln", width, bias=bias)
            state.add(f"{block}.attn.k_ln", keys, bias=bias)
        state.add(f"{block}.attn.out_proj", width, width, bias=bias)
        state.add(f"{block}.norm_2", width, bias=norms_have_bias)
        state.add(f"{block}.ffn.up_proj", inner, width, bias=bias)
        state.add(f"{block}.ffn.down_proj", width, inner, bias=bias)
        if ffn["ffn_type"] == "mptglu":
            state.add(f"{block}.ffn.gate_proj", inner, width, bias=bias)
    state.add("norm_f", width, bias=norms_have_bias)
    if head == "CausalLM" and not config.get("tie_word_embeddings", True):
        state.above("lm_head", vocabulary, width, bias=False)
    state.classifier(head, width, config)


TINY = own(
    PREFIX,
    HEADS,
    config,
    describe,
    layers="n_layers",
    queries=("Wqkv",),
    kv_heads=1,
    dropout={"attn_config": {"attn_type": "multiquery_attention", "attn_pdrop": 0.5}},
    variants={
        "multi-query": {"attn_config": {"attn_type": "multiquery_attention", "kv_n_heads": None}},
        "qk-ln": {"attn_config": {"qk_ln": True}},
        "untied": {"tie_word_embeddings": False},
        "rmsnorm": {"norm_type": "rmsnorm", "no_bias": False},
        "glu": {"ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 80}},
        "silu": {"ffn_config": {"ffn_act_fn": {"name": "silu"}}},
        "krutrim": {"attn_config": {"clip_qkv": 1.0}, "ffn_config": {"ffn_act_fn": {"name": "relu"}}},
    },
)
