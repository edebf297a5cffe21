"""Refact-1.6B, as its present revision stores it or, with ``packed_projections=False``, as its first."""

from __future__ import annotations

from typing import Any

from tests.tiny.layout import HEAD_DIM, SPECIAL_IDS, State, classes, own, published

PREFIX = "transformer."
HEADS = classes("GPTRefact")  # the original has the language model and the trunk only


def config(num_heads: int) -> dict[str, Any]:
    return published(
        "refact",
        "smallcloudai/Refact-1_6B-fim",
        activation_function="gelu_new",
        do_sample=None,
        n_embd=HEAD_DIM * num_heads,
        n_head=num_heads,
        n_layer=2,
        **SPECIAL_IDS,
    )


def describe(config: dict[str, Any], head: str, state: State) -> None:
    width, vocabulary = config["n_embd"], config["vocab_size"]
    head_dim, packed = width // config["n_head"], config.get("packed_projections", True)
    inner = -(-int(2 * (config.get("n_inner") or 4 * width) / 3) // 256) * 256
    shapes = {
        "ln_1": (width,),
        "attn.q": (width, width),
        "attn.c_proj": (width, width),
        "ln_2": (width,),
        "mlp.c_proj": (width, inner),
    }
    if packed:
        shapes |= {"attn.kv": (2 * head_dim, width), "mlp.gate_up_proj": (2 * inner, width)}
    else:
        shapes |= dict.fromkeys(("attn.k", "attn.v"), (head_dim, width))
        shapes |= dict.fromkeys(("mlp.linear_1", "mlp.linear_3"), (inner, width))
    state.embeddings("wte", vocabulary, width)
    for n in range(config["n_layer"]):
        for name, shape in shapes.items():
            state.add(f"h.{n}.{name}", *shape, bias=False)
    if head != "Model":
        state.above("ln_f", width, bias=not packed)
    if head == "CausalLM":
        state.above("lm_head", vocabulary, width, bias=False)
    state.classifier(head, width, config)


TINY = own(
    PREFIX,
    HEADS,
    config,
    describe,
    layers="n_layer",
    queries=("attn.q",),
    kv_heads=1,
    variants={"first-revision": {"packed_projections": False}, "width": {"n_inner": 600}},
    tied=False,
)
