"""JinaBERT (``jinaai/jina-embeddings-v2-base-en``) as the original stores it.

With ``**code(QK_CODE)`` it is the other layout, of ``jina-embeddings-v2-base-code``: as in the original, the
repository that holds the code is the only difference between the two configs.
"""

from __future__ import annotations

from typing import Any

from tests.tiny.layout import HEAD_DIM, PAD, VOCAB_SIZE, Random, Tensors, Tiny, factory

PREFIX = "bert."
HEADS = {
    "MaskedLM": "JinaBertForMaskedLM",
    "Model": "JinaBertModel",
    "SequenceClassification": "JinaBertForSequenceClassification",
    "TokenClassification": "JinaBertForTokenClassification",
    "QuestionAnswering": "JinaBertForQuestionAnswering",
    "ColBERT": "HF_ColBERT",
}
PROJECTION_DIM = 24
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
    return {
        **code(PLAIN_CODE),
        "model_max_length": 8192,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout": None,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": width,
        "initializer_range": 0.02,
        "intermediate_size": 2 * width,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 8192,
        "model_type": "bert",
        "num_attention_heads": num_heads,
        "num_hidden_layers": 2,
        "pad_token_id": PAD,
        "position_embedding_type": "alibi",
        "transformers_version": "4.26.0",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
        "feed_forward_type": "geglu",
        "emb_pooler": "mean",
    }


def tensors(config: dict[str, Any], head: str, random: Random) -> Tensors:
    width, inner = config["hidden_size"], config["intermediate_size"]
    qk = QK_CODE in config["auto_map"]["AutoConfig"]
    gated = (config.get("feed_forward_type") or ("geglu" if qk else "original")).endswith("glu")
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
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", width, width)
        if qk:
            norm(f"{layer}.attention.self.layer_norm_q")
            norm(f"{layer}.attention.self.layer_norm_k")
        linear(f"{layer}.attention.output.dense", width, width)
        norm(f"{layer}.attention.output.LayerNorm")
        if qk:
            norm(f"{layer}.layer_norm_1")
            norm(f"{layer}.layer_norm_2")
            up = ("up_gated_layer", 2 * inner) if gated else ("up_layer", inner)
            linear(f"{layer}.mlp.{up[0]}", up[1], width, bias=False)
            linear(f"{layer}.mlp.down_layer", width, inner)
        elif gated:
            linear(f"{layer}.mlp.gated_layers", 2 * inner, width, bias=False)
            linear(f"{layer}.mlp.wo", width, inner)
            norm(f"{layer}.mlp.layernorm")
        else:
            linear(f"{layer}.intermediate.dense", inner, width)
            linear(f"{layer}.output.dense", width, inner)
            norm(f"{layer}.output.LayerNorm")
    if head in ("Model", "SequenceClassification", "ColBERT"):
        linear(f"{PREFIX}pooler.dense", width, width)
    return state | head_tensors(config, head, random)


def head_tensors(config: dict[str, Any], head: str, random: Random) -> Tensors:
    """The tensors above the trunk, as BERT names them."""
    width, state = config["hidden_size"], {}
    if head == "MaskedLM":
        transform = "cls.predictions.transform"
        state["cls.predictions.bias"] = random("cls.predictions.bias", config["vocab_size"])
        state[f"{transform}.dense.weight"] = random(f"{transform}.dense.weight", width, width)
        for name in ("dense.bias", "LayerNorm.weight", "LayerNorm.bias"):
            state[f"{transform}.{name}"] = random(f"{transform}.{name}", width)
        return state
    if head == "ColBERT":
        return {"linear.weight": random("linear.weight", PROJECTION_DIM, width)}
    labels = config.get("num_labels", 2)
    name, outputs = {
        "SequenceClassification": ("classifier", labels),
        "TokenClassification": ("classifier", labels),
        "QuestionAnswering": ("qa_outputs", 2),
    }.get(head, ("", 0))
    if name:
        state[f"{name}.weight"] = random(f"{name}.weight", outputs, width)
        state[f"{name}.bias"] = random(f"{name}.bias", outputs)
    return state


QK = code(QK_CODE)
TINY = Tiny(
    write=factory(PREFIX, HEADS, config, tensors),
    tensors=tensors,
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
)
