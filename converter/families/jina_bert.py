"""JinaBERT (Jina Embeddings v2): BERT without positions, a gated feed forward layer, symmetric ALiBi.

Facts, and where they are from:

* ``model_type`` is "bert" and ``position_embedding_type`` "alibi"; ``auto_map`` points into another
  repository, ``jinaai/jina-bert-implementation--modeling_bert.JinaBertModel`` (config.json of
  jinaai/jina-embeddings-v2-base-en; parsed the same way by huggingface/text-embeddings-inference).
* Bias: -m * |i - j| between slots, the ALiBi paper's slopes, added after the QK scale; no other
  positions. Padded tokens are masked (the model's first code, ``modeling_jbert.py`` of the same
  repository; joelpaulkoch/transformers, branch add_jina_bert, from jina-bert-v2-qk-post-norm).
* Two layouts under the same class names. Plain: ``mlp.gated_layers`` (the first half is the gate),
  ``mlp.wo``, ``mlp.layernorm``; with ``feed_forward_type`` "original", which is the default, BERT's
  ``intermediate.dense`` and ``output`` instead (German_Semantic_V3; ggml-org/llama.cpp, pull request
  18475). qk-post-norm (jina-embeddings-v2-base-code): ``layer_norm_q`` and ``layer_norm_k`` over the
  whole width, ``mlp.up_gated_layer`` whose second half is the gate, and ``layer_norm_1`` of the layer's
  input plus the attention block's output, which holds that input already. There the default of
  ``feed_forward_type`` is "geglu".
* config.json does not say which layout it is other than by the name of the repository with the code,
  so ``fit`` looks at the stored names too.
* The embedding models name ``JinaBertForMaskedLM`` and store no such head (vLLM's and
  text-embeddings-inference's loaders skip it); rerankers store ``classifier`` over the pooler.
* Trained length: 512 (model cards of v2-base-en and v2-small-en: "trained using 512 sequence length,
  but extrapolates to 8k"); ``max_position_embeddings`` is 8192 there.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from converter import slopes
from converter.errors import UnsupportedModel
from converter.families import encoder
from converter.families.base import Config, Family

FEED_FORWARD = ("geglu", "reglu", "original")
QK_CODE = "qk-post-norm"


KNOWN_CODE = re.compile(r"(^|--)modeling_bert\.JinaBert\w+$")
FIRST = "JBert"
"""How the classes of the models' first revision, whose layout was another, start."""


def claims(config: Config) -> bool:
    """A "bert" whose code is JinaBERT's."""
    return config.get("model_type") == "bert" and any(
        name.startswith(("JinaBert", FIRST)) for name in encoder.class_names(config)
    )


def check(config: Config) -> None:
    if any(name.startswith(FIRST) for name in encoder.class_names(config)):
        raise UnsupportedModel(
            "this is the first revision of a JinaBERT (its classes are called JBert...), whose tensors have "
            "another layout; convert the present revision of the repository"
        )
    for auto, name in encoder.code(config).items():
        if auto.startswith("AutoModel") and not (isinstance(name, str) and KNOWN_CODE.search(name)):
            raise UnsupportedModel(
                f"auto_map.{auto} is {name!r}: this is not JinaBERT's own code (modeling_bert.JinaBert...), "
                "and what it computes is not known here"
            )
    kind = config.get("position_embedding_type", "absolute")
    if kind != "alibi":
        raise UnsupportedModel(
            f"position_embedding_type is {kind!r}: only a JinaBERT with 'alibi' can be converted; this one "
            "has learned positions as well"
        )
    forward = config.get("feed_forward_type")
    if forward not in (None, *FEED_FORWARD):
        raise UnsupportedModel(
            f"feed_forward_type is {forward!r}; only a JinaBERT with {', '.join(FEED_FORWARD)} can be "
            "converted"
        )
    if config.get("emb_pooler") not in (None, "mean"):
        raise UnsupportedModel(f"emb_pooler is {config['emb_pooler']!r}; only 'mean' can be converted")
    encoder.check(config)


def stock_slopes(config: Config) -> slopes.Slopes:
    return slopes.stock_slopes(encoder.geometry(config).num_heads)


def qk_post_norm(config: Config) -> bool:
    """Whether the code that the config names, or came from, is that of the second layout."""
    given = config.get("qk_post_norm")
    if isinstance(given, bool):
        return given
    places = [config.get("_name_or_path"), *encoder.code(config).values()]
    return any(QK_CODE in place for place in places if isinstance(place, str))


def normalise(config: Config) -> dict[str, Any]:
    layout = qk_post_norm(config)
    default = "geglu" if layout else "original"
    return {
        **config,
        "qk_post_norm": layout,
        "feed_forward_type": config.get("feed_forward_type") or default,
    }


def fit(config: Config, names: Collection[str]) -> dict[str, Any]:
    """What the names of the stored tensors tell: the layout, and see ``encoder.fit``."""
    layout = any(".layer_norm_q." in name for name in names)
    return {**encoder.fit(config, names), "qk_post_norm": layout}


FAMILY = Family(
    name="jina_bert",
    title="JinaBERT",
    camel="JinaBert",
    kind="encoder",
    model_types=(),
    claims=claims,
    sign="`bert` with `JinaBert...` classes",
    class_prefixes=("JinaBert",),
    check=check,
    geometry=encoder.geometry,
    stock_slopes=stock_slopes,
    train_lengths={"jinaai/jina-embeddings-v2-base-en": 512, "jinaai/jina-embeddings-v2-small-en": 512},
    length_hint="max_position_embeddings",
    length_doubt="is the length that the model is meant to reach, 16 times the trained one in Jina's own",
    normalise=normalise,
    fit=fit,
    raise_length=encoder.raise_length,
    base_prefix="bert",
    layers="encoder.layer",
    embeddings="embeddings.word_embeddings.weight",
    # The first is a second name of cls.predictions.bias.
    unread=(r"^cls\.predictions\.decoder\.bias$", encoder.BUFFERS),
    tokenizer_class="BertTokenizerFast",
    stock=False,
    examples=("jinaai/jina-embeddings-v2-base-en", "jinaai/jina-embeddings-v2-base-code"),
)
