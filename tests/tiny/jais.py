"""JAIS (``jais-30b-v3`` and the jais-family) as the original stores it: GPT-2's layout with SwiGLU and muP.

BTLM differs in ``model_type`` and class names alone, and jais-13b in the spelling of the muP keys. The
buffers of the causal masks, which checkpoints saved by old versions of transformers have, are there too.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny.layout import HEAD_DIM, SPECIAL_IDS, VOCAB_SIZE, State, classes, own

PREFIX = "transformer."
HEADS = classes("JAIS", CausalLM="JAISLMHeadModel")


def config(num_heads: int) -> dict[str, Any]:
    width = HEAD_DIM * num_heads
    return {
        "activation_function": "swiglu",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "model_type": "jais",
        "mup_embeddings_scale": 3.0,
        "mup_output_alpha": 2.2,
        "mup_scale_qk_dot_by_d": True,
        "mup_width_scale": 0.25,
        "n_embd": width,
        "n_head": num_heads,
        "n_inner": 2 * width + 5,  # odd, as jais-13b's 13653 is
        "n_layer": 2,
        "n_positions": 64,
        "position_embedding_type": "alibi",
        "reorder_and_upcast_attn": False,
        "resid_pdrop": 0.0,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
        **SPECIAL_IDS,
    }


def describe(config: dict[str, Any], head: str, state: State) -> None:
    width, positions, vocabulary = config["n_embd"], config["n_positions"], config["vocab_size"]
    inner = config["n_inner"] or 4 * width

    def conv(name: str, inputs: int, outputs: int) -> None:
        """GPT-2's Conv1D, which stores [inputs, outputs]."""
        weight, bias = f"{PREFIX}{name}.weight", f"{PREFIX}{name}.bias"
        state[weight] = state.random(weight, inputs, outputs, fan_in=inputs)
        state[bias] = state.random(bias, outputs)

    state.embeddings("wte", vocabulary, width)
    for n in range(config["n_layer"]):
        state.add(f"h.{n}.ln_1", width)
        triangle = torch.ones(1, 1, positions, positions, dtype=torch.bool).tril()
        state[f"{PREFIX}h.{n}.attn.bias"] = triangle
        state[f"{PREFIX}h.{n}.attn.masked_bias"] = torch.tensor(-1e4)
        conv(f"h.{n}.attn.c_attn", width, 3 * width)
        conv(f"h.{n}.attn.c_proj", width, width)
        state.add(f"h.{n}.ln_2", width)
        conv(f"h.{n}.mlp.c_fc", width, inner)
        conv(f"h.{n}.mlp.c_fc2", width, inner)
        conv(f"h.{n}.mlp.c_proj", inner, width)
    state.add("ln_f", width)
    state[f"{PREFIX}relative_pe.slopes"] = torch.tensor(_slopes(config["n_head"]))[:, None]
    if head == "CausalLM" and not config.get("tie_word_embeddings", True):
        state["lm_head.weight"] = state.random("lm_head.weight", vocabulary, width, scale=0.3)
    state.classifier(head, width, config)


def _slopes(num_heads: int) -> list[float]:
    """The ALiBi paper's: a geometric series, filled up with every other member of the next finer one."""
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [256.0 ** (-(h + 1) / below) for h in range(below)]
    if below < num_heads:
        slopes += _slopes(2 * below)[0::2][: num_heads - below]
    return slopes


TINY = own(
    PREFIX,
    HEADS,
    config,
    describe,
    layers="n_layer",
    queries=("c_attn",),
    dropout={"attn_pdrop": 0.5},
    variants={
        "width": {"n_inner": None},
        "sqrt-d": {"mup_scale_qk_dot_by_d": False},
        "untied": {"tie_word_embeddings": False},
        "13b-spelling": {
            **dict.fromkeys(("mup_embeddings_scale", "mup_output_alpha", "mup_width_scale")),
            "mup_scale_qk_dot_by_d": None,
            "embeddings_scale": 1.5,
            "scale_qk_dot_by_d": True,
            "width_scale": 0.11,
        },
        "btlm": {"model_type": "btlm", "architectures": ["BTLMLMHeadModel"], "mup_embeddings_scale": 1.5},
    },
)
