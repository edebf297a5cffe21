"""MosaicBERT (``mosaicml/mosaic-bert-base``) as the original stores it.

DNABERT-2's config is the same less ``model_type``, ``architectures`` and ``pad_token_id``.
"""

from __future__ import annotations

from typing import Any

from tests.tiny.jina_bert import embeddings, gated_layers, heads
from tests.tiny.layout import HEAD_DIM, State, classes, own, published

PREFIX = "bert."
HEADS = classes("Bert", "MaskedLM")


def config(num_heads: int) -> dict[str, Any]:
    width = HEAD_DIM * num_heads
    return published(
        "mosaic_bert",
        "mosaicml/mosaic-bert-base-seqlen-512",
        _name_or_path="mosaicml/mosaic-bert",
        attention_probs_dropout_prob=0.0,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=num_heads,
        num_hidden_layers=2,
    )


def describe(config: dict[str, Any], head: str, state: State) -> None:
    width = config["hidden_size"]
    embeddings(config, state)
    for n in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{n}"
        state.add(f"{layer}.attention.self.Wqkv", 3 * width, width)
        state.add(f"{layer}.attention.output.dense", width, width)
        state.add(f"{layer}.attention.output.LayerNorm", width)
        gated_layers(f"{layer}.mlp", config, state)
    heads(config, head, state, "cls.predictions.decoder.bias")


TINY = own(
    PREFIX,
    HEADS,
    config,
    describe,
    layers="num_hidden_layers",
    queries=("Wqkv",),
    variants={"epsilon": {"layer_norm_eps": 0.3}, "act": {"hidden_act": "relu"}},
    bert=True,
    zeroes_padding=True,
)
