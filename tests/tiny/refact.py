"""Refact-1.6B, as its present revision stores it or, with ``packed_projections=False``, as its first."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny.layout import HEAD_DIM, SPECIAL_IDS, VOCAB_SIZE, Random, Tiny, factory, head_tensors

PREFIX = "transformer."
# The original has the first two only.
HEADS = {
    "CausalLM": "GPTRefactForCausalLM",
    "Model": "GPTRefactModel",
    "SequenceClassification": "GPTRefactForSequenceClassification",
    "TokenClassification": "GPTRefactForTokenClassification",
    "QuestionAnswering": "GPTRefactForQuestionAnswering",
}


def config(num_heads: int) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "attention_softmax_in_fp32": True,
        "attn_pdrop": 0.1,
        "auto_map": {
            "AutoConfig": "configuration_gpt_refact.GPTRefactConfig",
            "AutoModelForCausalLM": "modeling_gpt_refact.GPTRefactForCausalLM",
        },
        **SPECIAL_IDS,
        "embd_pdrop": 0.1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "model_type": "gpt_refact",
        "multi_query": True,
        "n_embd": HEAD_DIM * num_heads,
        "n_head": num_heads,
        "n_inner": None,
        "n_layer": 2,
        "n_positions": 4096,
        "resid_pdrop": 0.1,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "transformers_version": "4.31.0",
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


def tensors(config: dict[str, Any], head: str, random: Random) -> dict[str, torch.Tensor]:
    width, vocabulary = config["n_embd"], config["vocab_size"]
    head_dim = width // config["n_head"]
    inner = -(-int(2 * (config.get("n_inner") or 4 * width) / 3) // 256) * 256
    shapes: dict[str, tuple[int, ...]] = {}
    for n in range(config["n_layer"]):
        block = f"{PREFIX}h.{n}"
        shapes[f"{block}.ln_1.weight"] = (width,)
        shapes[f"{block}.attn.q.weight"] = (width, width)
        shapes[f"{block}.attn.c_proj.weight"] = (width, width)
        shapes[f"{block}.ln_2.weight"] = (width,)
        shapes[f"{block}.mlp.c_proj.weight"] = (width, inner)
        if config.get("packed_projections", True):
            shapes[f"{block}.attn.kv.weight"] = (2 * head_dim, width)
            shapes[f"{block}.mlp.gate_up_proj.weight"] = (2 * inner, width)
        else:
            shapes[f"{block}.attn.k.weight"] = (head_dim, width)
            shapes[f"{block}.attn.v.weight"] = (head_dim, width)
            shapes[f"{block}.mlp.linear_1.weight"] = (inner, width)
            shapes[f"{block}.mlp.linear_3.weight"] = (inner, width)
    if head != "Model":
        shapes["ln_f.weight"] = (width,)
        if not config.get("packed_projections", True):
            shapes["ln_f.bias"] = (width,)
    if head == "CausalLM":
        shapes["lm_head.weight"] = (vocabulary, width)
    embeddings = f"{PREFIX}wte.weight"
    return (
        {embeddings: random(embeddings, vocabulary, width, scale=0.3)}
        | {name: random(name, *shape) for name, shape in shapes.items()}
        | head_tensors(width, head, config.get("num_labels", 2), random)
    )


TINY = Tiny(
    write=factory(PREFIX, HEADS, config, tensors),
    tensors=tensors,
    layers="n_layer",
    queries=("attn.q",),
    kv_heads=1,
    variants={"first-revision": {"packed_projections": False}, "width": {"n_inner": 600}},
    tied=False,
)
