"""MosaicGPT as mosaicml/examples v0.0.4 writes it, with the normalised queries and keys of mpt-1b.

The original has no class but the language model; the other heads are those that a user of the code
would add.
"""

from __future__ import annotations

from typing import Any

from tests.tiny.layout import HEAD_DIM, SPECIAL_IDS, VOCAB_SIZE, State, classes, own

PREFIX = "transformer."
HEADS = classes("MosaicGPT", CausalLM="MosaicGPT")


def config(num_heads: int) -> dict[str, Any]:
    return {
        "alibi": True,
        "alibi_bias_max": 8,
        "architectures": ["MosaicGPT"],
        "attn_clip_qkv": None,
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "attn_qk_ln": True,
        "attn_uses_sequence_id": False,
        "auto_map": {
            "AutoConfig": "configuration_mosaic_gpt.MosaicGPTConfig",
            "AutoModelForCausalLM": "mosaic_gpt.MosaicGPT",
        },
        "d_model": HEAD_DIM * num_heads,
        "emb_init_std": None,
        "emb_init_uniform_lim": None,
        "emb_pdrop": 0,
        "embedding_fraction": 1.0,
        "fan_mode": "fan_in",
        "init_device": "cpu",
        "init_div_is_residual": True,
        "init_gain": 0,
        "init_nonlinearity": "relu",
        "init_std": 0.02,
        "logit_scale": None,
        "low_precision_layernorm": True,
        "max_seq_len": 2048,
        "mlp_ratio": 4,
        "model_type": "mosaic_gpt",
        "n_heads": num_heads,
        "n_layers": 2,
        "no_bias": True,
        "param_init_fn": "kaiming_normal_",
        "prefix_lm": False,
        "resid_pdrop": 0,
        "softmax_scale": None,
        "use_cache": False,
        "verbose": 0,
        "vocab_size": VOCAB_SIZE,
        **SPECIAL_IDS,
    }


def describe(config: dict[str, Any], head: str, state: State) -> None:
    width, inner = config["d_model"], config["mlp_ratio"] * config["d_model"]
    state.embeddings("wte", config["vocab_size"], width)
    shapes: dict[str, tuple[int, ...]] = {}
    for n in range(config["n_layers"]):
        block = f"blocks.{n}"
        shapes |= {f"{block}.ln_1": (width,), f"{block}.attn.Wqkv": (3 * width, width)}
        if config["attn_qk_ln"]:
            shapes |= {f"{block}.attn.q_ln": (width,), f"{block}.attn.k_ln": (width,)}
        shapes |= {f"{block}.attn.out_proj": (width, width), f"{block}.ln_2": (width,)}
        shapes |= {f"{block}.mlp.mlp_up": (inner, width), f"{block}.mlp.mlp_down": (width, inner)}
    for name, shape in {**shapes, "ln_f": (width,)}.items():
        state.add(name, *shape, bias=not config["no_bias"])
    state.classifier(head, width, config)


TINY = own(
    PREFIX,
    HEADS,
    config,
    describe,
    layers="n_layers",
    queries=("Wqkv",),
    dropout={"attn_pdrop": 0.5},
    variants={
        "no-qk-ln": {"attn_qk_ln": False},
        "bias-max-16": {"alibi_bias_max": 16},
        "clip": {"attn_clip_qkv": 1.0},
        "scales": {"softmax_scale": 0.2, "logit_scale": "inv_sqrt_d_model"},
        "biases": {"no_bias": False, "mlp_ratio": 2},
    },
    tied=True,
    refused_ties=(False,),
)
