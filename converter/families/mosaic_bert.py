"""MosaicBERT and DNABERT-2: BERT without positions, fused QKV, a gated feed forward layer, symmetric ALiBi.

Facts and their sources:

* mosaicml/examples, ``examples/benchmarks/bert/src/bert_layers.py``: the bias is -m * |i - j| between
  positions, padding included, with the ALiBi paper's slopes; it is added after the QK scale. ``Wqkv`` holds
  q, k, v in that order; GLU = exact GELU(first half of ``gated_layers``) * second half. Without token types,
  type 0 is added. The final hidden states of padded tokens are 0. The prediction head's norm has epsilon
  1e-12 whatever the config says; its decoder is tied and has its own bias. Classification goes through the
  pooler. ``alibi_starting_size`` is the initial size of a table that grows, and changes no result.
* The original loss skips label 0 too; here, as everywhere in transformers, it skips only -100.
* config.json of zhihan1996/DNABERT-2-117M has no model_type, architectures or pad_token_id (so BERT's
  defaults apply, "bert" and 0). Its ``position_embedding_type`` is "absolute", which the code ignores.
* The code was copied under other names of files and classes (ClinicalMosaic: ``automodel.py``,
  ``bert_layers_mosa.py``), and changed in what it returns (jaandoui/DNABERT2-AttentionExtracted),
  so the stored tensors decide. Other copies were rewritten under an unchanged config
  (guyiyangyoung/LLM-DNABERT2 adds rotary positions). Other class names, options that only such code reads,
  and stored rotary tensors are refused; a rewrite that left no trace in config or weights cannot be detected.
* ``MosaicBertForEmbeddingGeneration`` (ClinicalMosaic's repository, ``PatientTrajectoryForecasting``) is the
  backbone, of whose last layers it takes a mean; here only the backbone is converted.
* Trained lengths: model cards of mosaicml/mosaic-bert-base (128) and its -seqlen- variants. DNABERT-2 was
  trained on 700 base pairs (arXiv 2306.15006), about 5.5 to a token, by MosaicBERT's recipe, whose length is
  128; DNABERT-S was trained further at 2000 tokens.
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

KNOWN_CODE = re.compile(r"\.(Mosaic)?Bert(Model|For\w+)$")
LAYERS = tuple(
    f".{name}.weight" for name in ("attention.self.Wqkv", "mlp.gated_layers", "mlp.wo", "mlp.layernorm")
)
"""How the names of a MosaicBERT's tensors end, in every copy of its code."""
OPTIONS = {**encoder.OPTIONS, "position_embedding_type": ("absolute", "alibi")}
FOREIGN_KEYS = re.compile(r"rotary|(^|_)rope(_|$)|^(attention|bert|embedding|mlp)_layer$|^normalization$")


def claims(config: Config) -> bool:
    """Whether this is a "bert", or has no model_type, and gives the size of MosaicBERT's table of biases."""
    return config.get("model_type") in (None, "bert") and "alibi_starting_size" in config


def check_supported(config: Config) -> None:
    for auto, name in inner(config, "auto_map").items():
        known = isinstance(name, str) and (auto == "AutoConfig" or KNOWN_CODE.search(name))
        if not known or FOREIGN_KEYS.search(name.rpartition("--")[2]):
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
    check_options({"position_embedding_type": "absolute", **config}, OPTIONS, "a MosaicBERT")


def settings_from_tensors(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Ties the decoder unless one is stored, whatever the config says; the rest is that of all encoders."""
    for end in LAYERS:
        if not any(name.endswith(end) for name in tensors):
            raise UnsupportedModel(
                f"the weights have no tensor ...{end}: these layers are not MosaicBERT's, whose config.json "
                "they have, and what they compute is not known here"
            )
    tied = {} if encoder.DECODER in tensors else {"tie_word_embeddings": True}
    return encoder.settings_from_tensors(config, tensors) | tied


CHECKPOINTS = (
    Trained(128, "card", ("mosaicml/mosaic-bert-base",)),
    *(
        Trained(length, "card", (f"mosaicml/mosaic-bert-base-seqlen-{length}",))
        for length in (256, 512, 1024, 2048)
    ),
    Trained(
        128,
        "inferred: 700 bp (arXiv 2306.15006, as quoted), MosaicBERT's recipe (its author in "
        "github.com/MAGICS-LAB/DNABERT_2, issue 76)",
        ("zhihan1996/DNABERT-2-117M",),
    ),
    Trained(
        128,
        "of DNABERT-2, whose copies they are",
        ("czl/dnabert2", "jaandoui/DNABERT2-AttentionExtracted", "MBoemo/DNABERT-2-117M-Flash"),
    ),
    Trained(512, "card", ("Sifal/ClinicalMosaic",)),
    Trained(None, "neither its card nor its paper was read", ("YYLY66/mRNABERT",)),
    Trained(2000, "github.com/MAGICS-LAB/DNABERT_S, its scripts", ("zhihan1996/DNABERT-S",)),
    Trained(
        None,
        "not on github.com/buetnlpbio/BiRNA-BERT; bioRxiv 2024.07.02.601703 was not read",
        ("buetnlpbio/birna-bert",),
    ),
)

FAMILY = Family(
    name="mosaic_bert",
    title="MosaicBERT and DNABERT-2",
    kind="encoder",
    model_types=(),
    claims=claims,
    sign="`bert` or none, with `alibi_starting_size`",
    class_prefixes=("Bert",),
    class_aliases={"MosaicBertForEmbeddingGeneration": "Model"},
    check_supported=check_supported,
    checkpoints=CHECKPOINTS,
    length_hint="max_position_embeddings",
    length_doubt="is BERT's default, whatever the model was trained at",
    settings_from_tensors=settings_from_tensors,
    base_prefix="bert",
    layers="encoder.layer",
    embeddings="embeddings.word_embeddings.weight",
    head=encoder.DECODER,
    ignored_tensors=(encoder.BUFFERS,),
    tokenizer_class="BertTokenizerFast",
    stock=False,
    examples=("mosaicml/mosaic-bert-base", "zhihan1996/DNABERT-2-117M"),
)
