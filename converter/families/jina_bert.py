"""JinaBERT (Jina Embeddings v2): BERT without positions, a gated feed forward layer, symmetric ALiBi.

Facts and their sources:

* ``model_type`` is "bert" and ``position_embedding_type`` "alibi"; ``auto_map`` points into another
  repository, ``jinaai/jina-bert-implementation--modeling_bert.JinaBertModel`` (config.json of
  jinaai/jina-embeddings-v2-base-en; parsed the same way by huggingface/text-embeddings-inference).
* The bias is -m * |i - j| between positions, padding included, with the ALiBi paper's slopes; it is added
  after the QK scale. There are no other positions, and padded tokens are masked (the model's first code,
  ``modeling_jbert.py`` of the same repository; joelpaulkoch/transformers, branch add_jina_bert, from
  jina-bert-v2-qk-post-norm).
* Two layouts share the same class names. The plain one has ``mlp.gated_layers`` (the first half is the
  gate), ``mlp.wo`` and ``mlp.layernorm``; with ``feed_forward_type`` "original", which is the default, it
  has BERT's ``intermediate.dense`` and ``output`` instead (German_Semantic_V3; ggml-org/llama.cpp, pull
  request 18475). The other, qk-post-norm (jina-embeddings-v2-base-code), has ``layer_norm_q`` and
  ``layer_norm_k`` over the whole width and ``mlp.up_gated_layer``, whose second half is the gate. Its
  ``layer_norm_1`` gets the layer's input plus the attention block's output, which already contains that
  input. Its default ``feed_forward_type`` is "geglu".
* config.json reveals the layout only through the name of the repository with the code, so
  ``settings_from_tensors`` looks at the stored tensors' names too.
* A third layout is only refused: jinaai/jina-bert-flash-implementation (its config.json and file list, commit
  b78d159), to which ``convert_v2_weights.py`` there carries weights over. Its config has ``num_loras``, and
  no ``position_embedding_type``. No published model was found to have it but jina-clip-v1's text encoder.
* The embedding models name ``JinaBertForMaskedLM`` but store no such head (the loaders of vLLM and
  text-embeddings-inference skip it); rerankers store a ``classifier`` on top of the pooler.
* jina-colbert-v1-en is rejected for its class, ``HF_ColBERT``: the programs that load it (colbert-ai, PyLate)
  go by that name and by ``artifact.metadata``, and would not run the converted code. Jina calls it deprecated
  (jina.ai/models/jina-colbert-v1-en).
* Trained length: 512 (model cards of v2-base-en and v2-small-en: "trained using 512 sequence length,
  but extrapolates to 8k"); ``max_position_embeddings`` is 8192 there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from converter.config import Config, inner
from converter.errors import UnsupportedModel
from converter.families import encoder
from converter.families.family import Family, Trained, check_options
from converter.source.checkpoint import Tensor

OPTIONS: dict[str, tuple[Any, ...]] = {
    **encoder.OPTIONS,
    "position_embedding_type": ("alibi",),  # others have learned positions as well
    "feed_forward_type": (None, "geglu", "reglu", "original"),
    "emb_pooler": (None, "mean"),
}
CODE_REPOSITORIES = ("jinaai/jina-bert-implementation", "jinaai/jina-bert-v2-qk-post-norm")
QK_CODE = "qk-post-norm"
FLASH_CODE = "jina-bert-flash-implementation"
KNOWN_CODE = re.compile(r"(^|--)modeling_bert\.JinaBert\w+$")
FIRST = "JBert"
"""Prefix of the class names in the models' first revision, which had another layout."""


def claims(config: Config) -> bool:
    """Whether this is a "bert" with JinaBERT's code."""
    return config.get("model_type") == "bert" and any(
        name.startswith(("JinaBert", FIRST)) for name in encoder.class_names(config)
    )


def check_supported(config: Config) -> None:
    if any(name.startswith(FIRST) for name in encoder.class_names(config)):
        raise UnsupportedModel(
            "this is the first revision of a JinaBERT (its classes are called JBert...), whose tensors have "
            "another layout; convert the current revision of the repository"
        )
    if any(FLASH_CODE in place for place in inner(config, "auto_map").values() if isinstance(place, str)):
        raise UnsupportedModel(
            f"its code is {FLASH_CODE}, whose tensors are packed otherwise than JinaBERT's and may hold "
            "several adapters, and which is not known here; jina-embeddings-v2 and jina-reranker-v1 can be "
            "converted: convert a jina-embeddings-v2 model instead"
        )
    for auto, name in inner(config, "auto_map").items():
        if auto.startswith("AutoModel") and not (isinstance(name, str) and KNOWN_CODE.search(name)):
            raise UnsupportedModel(
                f"auto_map.{auto} is {name!r}: this is not JinaBERT's own code (modeling_bert.JinaBert...), "
                "and what it computes is not known here"
            )
    check_options({"position_embedding_type": "absolute", **config}, OPTIONS, "a JinaBERT")


def qk_post_norm(config: Config) -> bool:
    """Whether the config names the code of the second layout, or a checkpoint with that layout."""
    given = config.get("qk_post_norm")
    if isinstance(given, bool):
        return given
    places = [config.get("_name_or_path"), *inner(config, "auto_map").values()]
    return any(QK_CODE in place for place in places if isinstance(place, str))


def rewrite(config: dict[str, Any]) -> dict[str, Any]:
    layout = qk_post_norm(config)
    default = "geglu" if layout else "original"
    kept = dict(config)
    # For the original code, which makes a bias for so many tokens. The input limit may be another one now.
    kept.pop("model_max_length", None)
    if kept.get("_name_or_path") in CODE_REPOSITORIES:  # not where the model is from
        del kept["_name_or_path"]
    return {
        **kept,
        "qk_post_norm": layout,
        "feed_forward_type": config.get("feed_forward_type") or default,
    }


def settings_from_tensors(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Adds the layout, which the stored tensors reveal, to ``encoder.settings_from_tensors``."""
    layout = any(".layer_norm_q." in name for name in tensors)
    return {**encoder.settings_from_tensors(config, tensors), "qk_post_norm": layout}


CHECKPOINTS = (
    Trained(
        512,
        "card",
        tuple(f"jinaai/jina-embeddings-v2-{kind}" for kind in ("base-en", "small-en", "base-code")),
    ),
    Trained(512, "card, before commit 4b0e79b", ("jinaai/jina-embeddings-v2-base-de",)),
    Trained(
        None,
        "not in the cards, which name the longest input, 8192; arXiv 2402.17016 was not read",
        ("jinaai/jina-embeddings-v2-base-es", "jinaai/jina-embeddings-v2-base-zh"),
    ),
    Trained(
        None,
        "not in the cards, which name the longest input, 8192",
        ("jinaai/jina-reranker-v1-tiny-en", "jinaai/jina-reranker-v1-turbo-en"),
    ),
)

FAMILY = Family(
    name="jina_bert",
    title="JinaBERT",
    kind="encoder",
    model_types=(),
    claims=claims,
    sign="`bert` with `JinaBert...` classes",
    class_prefixes=("JinaBert",),
    check_supported=check_supported,
    checkpoints=CHECKPOINTS,
    length_hint="max_position_embeddings",
    length_doubt="is the length that the model is meant to reach, 16 times the trained one in Jina's own",
    rewrite=rewrite,
    settings_from_tensors=settings_from_tensors,
    base_prefix="bert",
    layers="encoder.layer",
    embeddings="embeddings.word_embeddings.weight",
    head=encoder.DECODER,
    # The first pattern is a second name of cls.predictions.bias.
    ignored_tensors=(r"^cls\.predictions\.decoder\.bias$", encoder.BUFFERS),
    tokenizer_class="BertTokenizerFast",
    stock=False,
    examples=("jinaai/jina-embeddings-v2-base-en", "jinaai/jina-embeddings-v2-base-code"),
)
