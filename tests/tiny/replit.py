"""replit-code-v1_5-3b: llm-foundry's own MPT with grouped-query attention, as its v0.3 writes it."""

from __future__ import annotations

from typing import Any

from tests.tiny.layout import HEAD_DIM, SPECIAL_IDS, VOCAB_SIZE, State, classes, own

PREFIX = "transformer."
HEADS = classes("MPT")


def config(num_heads: int) -> dict[str, Any]:
    # The real one has 24 heads over 8; other numbers are not all divisible by 3.
    shared = next(size for size in (3, 4, 2, 1) if num_heads % size == 0)
    return {
        "architectures": ["MPTForCausalLM"],
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "attn_impl": "triton",
            "attn_pdrop": 0.0,
            "attn_type": "grouped_query_attention",
            "attn_uses_sequence_id": False,
            "clip_qkv": None,
            "kv_n_heads": num_heads // shared,
            "prefix_lm": False,
            "qk_ln": False,
            "softmax_scale": None,
        },
        "auto_map": {
            "AutoConfig": "configuration_mpt.MPTConfig",
            "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM",
        },
        "d_model": HEAD_DIM * num_heads,
        "emb_pdrop": 0.0,
        "embedding_fraction": 1.0,
        "expansion_ratio": 4,
        "fc_type": "torch",
        "ffn_config": {"fc_type": "torch", "ffn_type": "mptmlp"},
        "init_config": {"name": "kaiming_normal_", "fan_mode": "fan_in", "init_nonlinearity": "relu"},
        "init_device": "cpu",
        "learned_pos_emb": False,
        "logit_scale": None,
        "max_seq_len": 4096,
        "model_type": "mpt",
        "n_heads": num_heads,
        "n_layers": 2,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "resid_pdrop": 0.0,
        "use_cache": False,
        "vocab_size": VOCAB_SIZE,
        **SPECIAL_IDS,
    }


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
