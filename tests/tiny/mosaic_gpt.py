"""MosaicGPT as mosaicml/examples v0.0.4 writes it, with the normalised queries and keys of mpt-1b.

The original has no class but the language model; the other heads are those that a user of the code
would add.
"""

from __future__ import annotations

from typing import Any

from tests.tiny.layout import HEAD_DIM, SPECIAL_IDS, State, classes, own, published

PREFIX = "transformer."
HEADS = classes("MosaicGPT", CausalLM="MosaicGPT")


def config(num_heads: int) -> dict[str, Any]:
    return published(
        "mosaic_gpt",
        "anas-awadalla/mpt-1b-redpajama-200b",
        _name_or_path=None,
        tokenizer_name=None,
        d_model=HEAD_DIM * num_heads,
        n_heads=num_heads,
        n_layers=2,
        **SPECIAL_IDS,
    )


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
