"""MosaicBERT and DNABERT-2: BERT without positions, fused QKV, a gated feed forward layer, symmetric ALiBi.

Facts, and where they are from:

* mosaicml/examples, ``examples/benchmarks/bert/src/bert_layers.py``: bias -m * |i - j| between slots
  with the ALiBi paper's slopes, after the QK scale; ``Wqkv`` holds q, k, v in that order; GLU =
  exact GELU(first half of ``gated_layers``) * second half; token type 0 is added if none are given; the
  hidden states of padded tokens are 0 in the end; the prediction head's norm has epsilon 1e-12
  whatever the config says, its decoder is tied and has a bias of its own; classification goes through
  the pooler. ``alibi_starting_size`` is the size of a table that grows, and changes nothing.
* Its loss skips label 0 too; here, as everywhere in transformers, -100 alone.
* config.json of zhihan1996/DNABERT-2-117M has no model_type, architectures or pad_token_id (BERT's
  defaults, "bert" and 0, hold) and says ``position_embedding_type`` "absolute", which its code ignores.
* ``bert_layers.py`` was rewritten in many copies under an unchanged config (guyiyangyoung/LLM-DNABERT2
  adds rotary positions). Classes of other names, options that such code reads, and stored rotary
  tensors are refused; code that was changed and left no trace in config or weights cannot be told.
* Trained lengths: model cards of mosaicml/mosaic-bert-base (128) and its -seqlen- variants.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from converter import slopes
from converter.errors import UnsupportedModel
from converter.families import encoder
from converter.families.base import Config, Family

KNOWN_CODE = re.compile(r"(^|--)bert_layers\.Bert(Model|For\w+)$")
DECODER = "cls.predictions.decoder.weight"
FOREIGN_KEYS = re.compile(r"rotary|(^|_)rope(_|$)|^(attention|bert|embedding|mlp)_layer$|^normalization$")


def claims(config: Config) -> bool:
    """A "bert", or a config without a model_type, that sizes MosaicBERT's table of biases."""
    return config.get("model_type") in (None, "bert") and "alibi_starting_size" in config


def check(config: Config) -> None:
    for auto, name in encoder.code(config).items():
        if not isinstance(name, str) or (auto != "AutoConfig" and not KNOWN_CODE.search(name)):
            raise UnsupportedModel(
                f"auto_map.{auto} is {name!r}: this is not MosaicBERT's own code (bert_layers.Bert...), and "
                "what it computes is not known here"
            )
    for key, value in config.items():
        if FOREIGN_KEYS.search(key) and value not in (None, False):
            raise UnsupportedModel(
                f"{key} is {value!r}: MosaicBERT has no such option; the code of this model was rewritten, "
                "and what it computes is not known here"
            )
    kind = config.get("position_embedding_type", "absolute")
    if kind not in ("absolute", "alibi"):
        raise UnsupportedModel(
            f"position_embedding_type is {kind!r}, not MosaicBERT's ALiBi; there are no slopes to scale"
        )
    encoder.check(config)


def stock_slopes(config: Config) -> slopes.Slopes:
    return slopes.stock_slopes(encoder.geometry(config).num_heads)


def fit(config: Config, names: Collection[str]) -> dict[str, Any]:
    """As for every encoder; and the decoder is tied, whatever the key says, unless one is stored."""
    tied = {} if DECODER in names else {"tie_word_embeddings": True}
    return encoder.fit(config, names) | tied


FAMILY = Family(
    name="mosaic_bert",
    title="MosaicBERT and DNABERT-2",
    camel="MosaicBert",
    kind="encoder",
    model_types=(),
    claims=claims,
    sign="`bert` or none, with `alibi_starting_size`",
    class_prefixes=("Bert",),
    check=check,
    geometry=encoder.geometry,
    stock_slopes=stock_slopes,
    train_lengths={
        "mosaicml/mosaic-bert-base": 128,
        **{f"mosaicml/mosaic-bert-base-seqlen-{length}": length for length in (256, 512, 1024, 2048)},
    },
    length_hint="max_position_embeddings",
    length_doubt="is BERT's default, whatever the model was trained at",
    fit=fit,
    raise_length=encoder.raise_length,
    base_prefix="bert",
    layers="encoder.layer",
    embeddings="embeddings.word_embeddings.weight",
    unread=(encoder.BUFFERS,),
    tokenizer_class="BertTokenizerFast",
    stock=False,
    examples=("mosaicml/mosaic-bert-base", "zhihan1996/DNABERT-2-117M"),
)
