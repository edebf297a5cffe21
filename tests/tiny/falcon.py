"""A tiny Falcon, by default as Falcon-RW is: ALiBi, sequential layers, biases."""

from __future__ import annotations

from typing import Any

from tests.tiny import stock
from tests.tiny.layout import HEAD_DIM, Tiny


def sizes(num_heads: int) -> dict[str, Any]:
    return {
        "num_attention_heads": num_heads,
        "hidden_size": HEAD_DIM * num_heads,
        "num_hidden_layers": 2,
        "alibi": True,
        "parallel_attn": False,
        "multi_query": False,
        "bias": True,
    }


TINY = Tiny(
    write=stock.factory("Falcon", sizes),
    # Configs of RefinedWebModel, as Falcon was called first, have the old keys.
    tensors=stock.maker("Falcon", {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}),
    layers="num_hidden_layers",
    queries=("query_key_value",),
    dropout={"attention_dropout": 0.5},
    variants={
        "no-bias": {"bias": False, "ffn_hidden_size": 80},
    },
)
