"""MosaicBERT (``mosaicml/mosaic-bert-base``) as the original stores it.

DNABERT-2's config is the same less ``model_type``, ``architectures`` and ``pad_token_id``.
"""

from __future__ import annotations

from typing import Any

from tests.tiny.jina_bert import head_tensors
from tests.tiny.layout import HEAD_DIM, PAD, VOCAB_SIZE, Random, Tensors, Tiny, factory

PREFIX = "bert."
HEADS = {
    "MaskedLM": "BertForMaskedLM",
    "Model": "BertModel",
    "SequenceClassification": "BertForSequenceClassification",
    "TokenClassification": "BertForTokenClassification",
    "QuestionAnswering": "BertForQuestionAnswering",
}


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


def tensors(config: dict[str, Any], head: str, random: Random) -> Tensors:
    width, inner = config["hidden_size"], config["intermediate_size"]
    state: Tensors = {}

    def linear(name: str, outputs: int, inputs: int, bias: bool = True) -> None:
        state[f"{name}.weight"] = random(f"{name}.weight", outputs, inputs)
        if bias:
            state[f"{name}.bias"] = random(f"{name}.bias", outputs)

    def norm(name: str) -> None:
        for part in ("weight", "bias"):
            state[f"{name}.{part}"] = random(f"{name}.{part}", width)

    for kind, rows in (("word", config["vocab_size"]), ("token_type", config["type_vocab_size"])):
        name = f"{PREFIX}embeddings.{kind}_embeddings.weight"
        state[name] = random(name, rows, width, scale=0.3)
    norm(f"{PREFIX}embeddings.LayerNorm")
    for n in range(config["num_hidden_layers"]):
        layer = f"{PREFIX}encoder.layer.{n}"
        linear(f"{layer}.attention.self.Wqkv", 3 * width, width)
        linear(f"{layer}.attention.output.dense", width, width)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.mlp.gated_layers", 2 * inner, width, bias=False)
        linear(f"{layer}.mlp.wo", width, inner)
        norm(f"{layer}.mlp.layernorm")
    if head in ("Model", "SequenceClassification"):
        linear(f"{PREFIX}pooler.dense", width, width)
    above = head_tensors(config, head, random)
    if head == "MaskedLM":
        above["cls.predictions.decoder.bias"] = above.pop("cls.predictions.bias")
    return state | above


TINY = Tiny(
    write=factory(PREFIX, HEADS, config, tensors),
    tensors=tensors,
    layers="num_hidden_layers",
    queries=("Wqkv",),
    variants={"epsilon": {"layer_norm_eps": 0.3}, "act": {"hidden_act": "relu"}},
    zeroes_padding=True,
)
