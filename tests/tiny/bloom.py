"""A tiny BLOOM."""

from __future__ import annotations

from typing import Any

from tests.tiny import stock
from tests.tiny.layout import HEAD_DIM, Tiny


def sizes(num_heads: int) -> dict[str, Any]:
    return {"n_head": num_heads, "hidden_size": HEAD_DIM * num_heads, "n_layer": 2}


TINY = Tiny(
    write=stock.factory("Bloom", sizes),
    tensors=stock.maker("Bloom"),
    layers="n_layer",
    queries=("query_key_value",),
    dropout={"attention_dropout": 0.5},
    variants={
        "residual-after-norm": {"apply_residual_connection_post_layernorm": True},
        "untied": {"tie_word_embeddings": False},
    },
)
