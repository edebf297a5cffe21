"""The ALiBi families that can be converted. A new one is a module here and its name in ``NAMES``.

Its graph is found by that name too, in ``converter/onnx/families``; its reference and its tiny
checkpoint in ``tests``. docs/contributing.md lists the files.
"""

from __future__ import annotations

from importlib import import_module

from converter.config import PROVENANCE, ROTARY, Config
from converter.errors import SourceError, UnsupportedModel
from converter.families.family import SLOPES, Family
from converter.rotary import models as rotary

__all__ = ["FAMILIES", "SLOPES", "Family", "converted_family", "recognise"]

NAMES = (
    "bloom",
    "mpt",
    "falcon",
    "mosaic_gpt",
    "jais",
    "baichuan",
    "refact",
    "jina_bert",
    "mosaic_bert",
    "alberturin",
)
"""Module names; the first family that recognises a config converts it."""
FAMILIES: tuple[Family, ...] = tuple(import_module(f"{__name__}.{name}").FAMILY for name in NAMES)

LEARNED_SCALE = (
    "learns a scale for its ALiBi bias and stores it (alibi_scale), in layers that no family here has, so "
    "its slopes are not those of a formula and cannot be scaled here"
)
REFUSED = {
    **dict.fromkeys(("data2vec2", "data2vec_multi", "emotion2vec"), LEARNED_SCALE),
    **dict.fromkeys(
        ["bert", "biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "roberta", "xlm-roberta"],
        "has learned positions, not ALiBi: there are no slopes to scale, and none beyond its trained length",
    ),
    **dict.fromkeys(
        ["deberta", "deberta-v2", "longt5", "mpnet", "mt5", "switch_transformers", "t5", "umt5", "xlnet"],
        "has relative positions that were learned, not ALiBi: there are no slopes to scale",
    ),
    **dict.fromkeys(
        rotary.MODELS,
        "has rotary positions, not ALiBi: a conversion changes its config.json alone, and a static one is "
        "exported by optimum: optimum-cli export onnx --model DIR",
    ),
    "jina_clip": "is a text encoder with ALiBi and an image encoder in one checkpoint; the text encoder's "
    "sizes are in another repository, and its tensors are packed otherwise than JinaBERT's, so it cannot be "
    "taken out; convert a jina-embeddings-v2 model instead",
    "llava_mpt": "is an MPT with a projector for images, and the result could read no images; to convert its "
    "language model alone, save that as an MPT: leave out the tensors of mm_projector and vision_tower, and "
    "write model_type mpt and architectures MPTForCausalLM into config.json",
}
"""model_type -> what is said of a model whose code has ALiBi, or that is often asked for."""


def recognise(config: Config) -> Family:
    """The family of a source or of a converted repository.

    Raises ``SourceError`` without a model_type, ``UnsupportedModel`` for one that no family has.
    """
    for family in FAMILIES:
        if family.recognises(config):
            return family
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise SourceError(f"config.json: model_type is {model_type!r}, so the architecture is unknown")
    if model_type in REFUSED:
        raise UnsupportedModel(f"model_type {model_type!r} {REFUSED[model_type]}")
    known = ", ".join(dict.fromkeys(name for family in FAMILIES for name in family.model_types))
    raise UnsupportedModel(
        f"model_type {model_type!r} is not supported; the supported ones are: {known}; and the rotary ones, "
        "which ntk-convert families lists"
    )


def converted_family(config: Config) -> Family | None:
    """The family of a config that this tool wrote, or that was saved of such a model; None for any other.

    Raises ``SourceError`` for the record of a conversion in the config of another class.
    """
    named = config.get("architectures") or config.get("auto_map")
    listed = list(named.values()) if isinstance(named, dict) else named
    classes = {str(name).rpartition(".")[2] for name in (listed if isinstance(listed, list) else [])}
    for family in FAMILIES:
        # A BERT saved by transformers' BertConfig has its model_type, and our class.
        if config.get("model_type") == family.model_type or classes & family.classes.keys():
            return family
    record = config.get(PROVENANCE)
    if record is None or (isinstance(record, dict) and ROTARY in record):
        return None
    if "alibi_scaling" in config:
        raise SourceError(
            f"config.json has the record of a conversion, and model_type {config.get('model_type')!r}: the "
            "model was saved by the stock class, which computes without the scaling, so it was trained "
            f"unscaled; to scale it anew, remove {PROVENANCE} and alibi_scaling from config.json"
        )
    raise SourceError(
        f"config.json is damaged: it has {PROVENANCE}'s record, but not the converted model's settings; "
        "convert the original again"
    )
