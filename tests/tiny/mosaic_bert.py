"""MosaicBERT (``mosaicml/mosaic-bert-base``) as the original stores it.

DNABERT-2's config is the same less ``model_type``, ``architectures`` and ``pad_token_id``.
"""

from __future__ import annotations

from typing import Any

from tests.tiny.jina_bert import embeddings, gated_layers, heads
from tests.tiny.layout import HEAD_DIM, PAD, VOCAB_SIZE, State, classes, own

PREFIX = "bert."
HEADS = classes("Bert", "MaskedLM")


def config(num_heads: int) -> dict[str, Any]:
    width = HEAD_DIM * num_heads
    return {
        "_name_or_path": "mosaicml/mosaic-bert",
        "alibi_starting_size": 512,
        "attention_probs_dropout_prob": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_bert.BertConfig",
            "AutoModelForMaskedLM": "bert_layers.BertForMaskedLM",
        },
        "classifier_dropout": None,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": width,
        "initializer_range": 0.02,
        "intermediate_size": 2 * width,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "model_type": "bert",
        "num_attention_heads": num_heads,
        "num_hidden_layers": 2,
        "pad_token_id": PAD,
        "position_embedding_type": "absolute",
        "transformers_version": "4.28.1",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


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
    zeroes_padding=True,
)
