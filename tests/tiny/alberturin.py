"""AlBERTurin (``AlBERTurin/AlBERTmini``) as the original names its tensors, with a head of its own."""

from __future__ import annotations

from typing import Any

from tests.tiny.layout import HEAD_DIM, State, classes, own, published

PREFIX = "encoder."
HEADS = classes("Matformer", "MaskedLM")


def config(num_heads: int) -> dict[str, Any]:
    return published(
        "alberturin",
        "AlBERTurin/AlBERTmini",
        hidden_size=HEAD_DIM * num_heads,
        num_attention_heads=num_heads,
        num_hidden_layers=2,
    )


def describe(config: dict[str, Any], head: str, state: State) -> None:
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    inner = int(width * config["ffn_factor"])
    state.embeddings("embed_tokens", vocabulary, width)
    for n in range(config["num_hidden_layers"]):
        layer = f"blocks.layers.{n}"
        state.add(f"{layer}.attn_norm", width, bias=False)
        state.add(f"{layer}.attn.qkv_proj", 3 * width, width, bias=False)
        state.add(f"{layer}.attn.o_proj", width, width, bias=False)
        state.add(f"{layer}.mlp_norm", width, bias=False)
        state.add(f"{layer}.mlp.gate_proj", inner, width, bias=False)
        state.add(f"{layer}.mlp.up_proj", inner, width, bias=False)
        state.add(f"{layer}.mlp.down_proj", width, inner, bias=False)
    state.add("blocks.norm", width, bias=False)
    if head == "MaskedLM":
        state.above("lm_head", vocabulary, width)
    else:  # one token's label and a whole text's have one name
        state.classifier(head.replace("Sequence", "Token"), width, config)


TINY = own(
    PREFIX,
    HEADS,
    config,
    describe,
    layers="num_hidden_layers",
    queries=("qkv_proj",),
    variants={"epsilon": {"rms_norm_eps": 0.3}, "width": {"ffn_factor": 2.6}},
    tied=False,
)
