"""The families that can be converted, and what is refused by name."""

from __future__ import annotations

from converter.errors import AlreadyConverted, SourceError, UnsupportedModel
from converter.families import baichuan, bloom, falcon, jais, jina_bert, mosaic_bert, mosaic_gpt, mpt, refact
from converter.families.base import SLOPES, Config, Family, Geometry, count
from converter.rotary import models as rotary

__all__ = [
    "FAMILIES",
    "SLOPES",
    "Config",
    "Family",
    "Geometry",
    "check",
    "check_convertible",
    "check_kernels",
    "check_plain",
    "converted",
    "recognise",
]

FAMILIES: tuple[Family, ...] = (
    bloom.FAMILY,
    mpt.FAMILY,
    falcon.FAMILY,
    mosaic_gpt.FAMILY,
    jais.FAMILY,
    baichuan.FAMILY,
    refact.FAMILY,
    jina_bert.FAMILY,
    mosaic_bert.FAMILY,
)

# Model types that are asked for often and cannot be scaled, for a better answer than "unknown".
LEARNED = "bert biogpt gpt2 gpt_bigcode gpt_neo opt roberta xlm-roberta"


KERNELS = tuple(f"{start}{what}_implementation" for what in ("attn", "experts") for start in ("", "_"))
"""Keys that transformers obeys and that, with a name such as ``user/name``, mean code from the Hub."""
MOST_LABELS = 1 << 17


def recognise(config: Config) -> Family:
    """The family of a source or of a converted repository.

    Raises:
        SourceError: the config has no model_type.
        UnsupportedModel: no family has this model_type; says why where that is known.
    """
    for family in FAMILIES:
        if family.recognises(config):
            return family
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise SourceError(f"config.json: model_type is {model_type!r}, so the architecture is unknown")
    if model_type in rotary.MODELS:
        raise UnsupportedModel(
            f"model_type {model_type!r} has rotary positions, not ALiBi: a conversion changes its "
            "config.json alone, and a static one is exported by optimum: optimum-cli export onnx --model DIR"
        )
    if model_type in LEARNED.split():
        raise UnsupportedModel(
            f"model_type {model_type!r} has learned positions, not ALiBi: there are no slopes to scale, "
            "and none beyond its trained length"
        )
    known = ", ".join(dict.fromkeys(name for family in FAMILIES for name in family.model_types))
    raise UnsupportedModel(
        f"model_type {model_type!r} is not supported; the supported ones are: {known}; and, of rotary "
        f"models, {', '.join(rotary.MODELS)}"
    )


def converted(config: Config) -> bool:
    """Whether the config was written by this tool."""
    ours = any(config.get("model_type") == family.model_type for family in FAMILIES)
    origin = config.get("ntk_convert")
    rotary_origin = isinstance(origin, dict) and "rotary" in origin
    return ours or ("ntk_convert" in config and "alibi_scaling" in config) or rotary_origin


def check(config: Config) -> Family:
    """The family of a source that can be converted.

    Raises:
        AlreadyConverted: the source is itself a converted repository.
        UnsupportedModel: a quantised checkpoint, or whatever its family refuses.
        SourceError: impossible sizes.
    """
    family = recognise(config)
    check_convertible(config)
    if config.get("alibi_scaling") is not None and not family.own_scaling:
        raise UnsupportedModel(
            f"config.json has alibi_scaling {config['alibi_scaling']!r}, which {family.title} does not read; "
            "if the model was trained without it, remove it, else it is not known what it computes"
        )
    family.check(config)
    family.architectures(config)
    family.geometry(config)
    count(config, "vocab_size", default=1)
    return family


def check_convertible(config: Config) -> None:
    """What is refused of any source.

    Raises:
        AlreadyConverted: the source is itself a converted repository.
        UnsupportedModel, SourceError: see ``check_plain``.
    """
    if converted(config):
        origin = config.get("ntk_convert")
        source = origin.get("source") if isinstance(origin, dict) else None
        raise AlreadyConverted(
            f"the source is already converted (model_type {config.get('model_type')!r}); "
            f"convert its original{f' {source!r}' if source else ''} instead"
        )
    check_plain(config)


def check_plain(config: Config) -> None:
    """What is refused of any checkpoint, converted or not.

    Raises:
        UnsupportedModel: a quantised one, or code from the Hub in the place of the attention.
        SourceError: more labels than any model has, which transformers would name one by one.
    """
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            raise UnsupportedModel(f"the checkpoint is quantised ({key} is set); convert the unquantised one")
    check_kernels(config)
    labels = count(config, "num_labels", default=1)
    if labels > MOST_LABELS:
        raise SourceError(f"config.json: num_labels is {labels}, more than any model has ({MOST_LABELS})")


def check_kernels(config: Config) -> None:
    """Raises ``UnsupportedModel`` for code from the Hub in the place of the attention."""
    for key in KERNELS:
        if "/" in str(config.get(key)):
            raise UnsupportedModel(
                f"config.json names code of another repository ({key} is {config[key]!r}), which loading "
                "would download and run; remove the key"
            )
