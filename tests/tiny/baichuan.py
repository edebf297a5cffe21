"""Baichuan2-13B, or with ``norm_head=False`` Baichuan-13B, whose head is plain."""

from __future__ import annotations

from typing import Any

from tests.tiny.layout import HEAD_DIM, State, classes, own, published

PREFIX = "model."
HEADS = classes("Baichuan")


def config(num_heads: int) -> dict[str, Any]:
    return published(
        "baichuan",
        "baichuan-inc/Baichuan2-13B-Base",
        _name_or_path=None,
        gradient_checkpointing=[False],
        hidden_size=HEAD_DIM * num_heads,
        intermediate_size=88,
        num_attention_heads=num_heads,
        num_hidden_layers=2,
    )


def describe(config: dict[str, Any], head: str, state: State) -> None:
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    state.embeddings("embed_tokens", vocabulary, width)
    for n in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (width,),
            "self_attn.W_pack": (3 * width, width),
            "self_attn.o_proj": (width, width),
            "post_attention_layernorm": (width,),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }.items():
            state.add(f"layers.{n}.{name}", *shape, bias=False)
    state.add("norm", width, bias=False)
    if head == "CausalLM":
        state.above("lm_head", vocabulary, width, bias=False)
    state.classifier(head, width, config)


TINY = own(
    PREFIX,
    HEADS,
    config,
    describe,
    layers="num_hidden_layers",
    queries=("W_pack",),
    variants={"plain-head": {"norm_head": False}, "epsilon": {"rms_norm_eps": 0.1}},
    tied=False,
    refused_ties=(True,),
)
