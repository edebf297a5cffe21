"""JinaBERT (``jinaai/jina-embeddings-v2-base-en``) as the original stores it.

With ``**code(QK_CODE)`` it is the other layout, of ``jina-embeddings-v2-base-code``: as in the original, the
repository that holds the code is the only difference between the two configs.
"""

from __future__ import annotations

from typing import Any

from tests.tiny.layout import HEAD_DIM, State, classes, own, published

PREFIX = "bert."
HEADS = classes("JinaBert", "MaskedLM")
PLAIN_CODE, QK_CODE = "jinaai/jina-bert-implementation", "jinaai/jina-bert-v2-qk-post-norm"


def code(repository: str) -> dict[str, Any]:
    """The keys that name the repository with the code."""
    modeling = f"{repository}--modeling_bert.JinaBert"
    return {
        "_name_or_path": repository,
        "auto_map": {
            "AutoConfig": f"{repository}--configuration_bert.JinaBertConfig",
            "AutoModelForMaskedLM": f"{modeling}ForMaskedLM",
            "AutoModel": f"{modeling}Model",
            "AutoModelForSequenceClassification": f"{modeling}ForSequenceClassification",
        },
    }


def config(num_heads: int) -> dict[str, Any]:
    width = HEAD_DIM * num_heads
    return published(
        "jina_bert",
        "jinaai/jina-embeddings-v2-base-en",
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=num_heads,
        num_hidden_layers=2,
    )


def describe(config: dict[str, Any], head: str, state: State) -> None:
    width, inner = config["hidden_size"], config["intermediate_size"]
    qk = QK_CODE in config["auto_map"]["AutoConfig"]
    gated = (config.get("feed_forward_type") or ("geglu" if qk else "original")).endswith("glu")
    embeddings(config, state)
    for n in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{n}"
        for part in ("query", "key", "value"):
            state.add(f"{layer}.attention.self.{part}", width, width)
        if qk:
            state.add(f"{layer}.attention.self.layer_norm_q", width)
            state.add(f"{layer}.attention.self.layer_norm_k", width)
        state.add(f"{layer}.attention.output.dense", width, width)
        state.add(f"{layer}.attention.output.LayerNorm", width)
        if qk:
            state.add(f"{layer}.layer_norm_1", width)
            state.add(f"{layer}.layer_norm_2", width)
            up = ("up_gated_layer", 2 * inner) if gated else ("up_layer", inner)
            state.add(f"{layer}.mlp.{up[0]}", up[1], width, bias=False)
            state.add(f"{layer}.mlp.down_layer", width, inner)
        elif gated:
            gated_layers(f"{layer}.mlp", config, state)
        else:
            state.add(f"{layer}.intermediate.dense", inner, width)
            state.add(f"{layer}.output.dense", width, inner)
            state.add(f"{layer}.output.LayerNorm", width)
    heads(config, head, state, "cls.predictions.bias")


def embeddings(config: dict[str, Any], state: State) -> None:
    width = config["hidden_size"]
    state.embeddings("embeddings.word_embeddings", config["vocab_size"], width)
    state.embeddings("embeddings.token_type_embeddings", config["type_vocab_size"], width)
    state.add("embeddings.LayerNorm", width)


def gated_layers(name: str, config: dict[str, Any], state: State) -> None:
    width, inner = config["hidden_size"], config["intermediate_size"]
    state.add(f"{name}.gated_layers", 2 * inner, width, bias=False)
    state.add(f"{name}.wo", width, inner)
    state.add(f"{name}.layernorm", width)


def heads(config: dict[str, Any], head: str, state: State, prediction_bias: str) -> None:
    """The pooler, and the tensors above the trunk, as BERT names them."""
    width, transform = config["hidden_size"], "cls.predictions.transform"
    if head in ("Model", "SequenceClassification"):
        state.add("pooler.dense", width, width)
    if head == "MaskedLM":
        state[prediction_bias] = state.random("cls.predictions.bias", config["vocab_size"])
        state.above(f"{transform}.dense", width, width)
        state.above(f"{transform}.LayerNorm", width)
    else:  # one token's label and a whole text's have one name
        state.classifier(head.replace("Sequence", "Token"), width, config)


QK = code(QK_CODE)
TINY = own(
    PREFIX,
    HEADS,
    config,
    describe,
    layers="num_hidden_layers",
    queries=("query", "value"),
    variants={
        "reglu": {"feed_forward_type": "reglu"},
        "original": {"feed_forward_type": "original", "hidden_act": "relu"},
        "no-type": {"feed_forward_type": None},
        "act": {"hidden_act": "silu"},
        "epsilon": {"layer_norm_eps": 0.3},
        "qk-reglu": {**QK, "feed_forward_type": "reglu"},
        "qk-original": {**QK, "feed_forward_type": "original"},
    },
    layouts={"qk": QK},
    bert=True,
)
