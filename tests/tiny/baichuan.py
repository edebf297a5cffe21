"""Baichuan2-13B, or with ``norm_head=False`` Baichuan-13B, whose head is plain."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny.layout import HEAD_DIM, SPECIAL_IDS, VOCAB_SIZE, Random, Tiny, factory, head_tensors

PREFIX = "model."
HEADS = {
    "CausalLM": "BaichuanForCausalLM",
    "Model": "BaichuanModel",
    "SequenceClassification": "BaichuanForSequenceClassification",
    "TokenClassification": "BaichuanForTokenClassification",
    "QuestionAnswering": "BaichuanForQuestionAnswering",
}


def config(num_heads: int) -> dict[str, Any]:
    return {
        "_from_model_config": True,
        "auto_map": {
            "AutoConfig": "configuration_baichuan.BaichuanConfig",
            "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM",
        },
        **SPECIAL_IDS,
        "gradient_checkpointing": [False],
        "hidden_act": "silu",
        "hidden_size": HEAD_DIM * num_heads,
        "initializer_range": 0.02,
        "intermediate_size": 88,
        "model_max_length": 4096,
        "model_type": "baichuan",
        "num_attention_heads": num_heads,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "transformers_version": "4.29.2",
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
        "z_loss_weight": 0,
    }


def tensors(config: dict[str, Any], head: str, random: Random) -> dict[str, torch.Tensor]:
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for n in range(config["num_hidden_layers"]):
        layer = f"{PREFIX}layers.{n}"
        shapes[f"{layer}.input_layernorm.weight"] = (width,)
        shapes[f"{layer}.self_attn.W_pack.weight"] = (3 * width, width)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (width, width)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (inner, width)
        shapes[f"{layer}.mlp.up_proj.weight"] = (inner, width)
        shapes[f"{layer}.mlp.down_proj.weight"] = (width, inner)
    shapes[f"{PREFIX}norm.weight"] = (width,)
    if head == "CausalLM":
        shapes["lm_head.weight"] = (vocabulary, width)
    embeddings = f"{PREFIX}embed_tokens.weight"
    return (
        {embeddings: random(embeddings, vocabulary, width, scale=0.3)}
        | {name: random(name, *shape) for name, shape in shapes.items()}
        | head_tensors(width, head, config.get("num_labels", 2), random)
    )


TINY = Tiny(
    write=factory(PREFIX, HEADS, config, tensors),
    tensors=tensors,
    layers="num_hidden_layers",
    queries=("W_pack",),
    variants={"plain-head": {"norm_head": False}, "epsilon": {"rms_norm_eps": 0.1}},
    tied=False,
    refused_ties=(True,),
)
