"""The families that can be converted, and what is refused by name."""

from __future__ import annotations

from converter.errors import AlreadyConverted, SourceError, UnsupportedModel
from converter.families import bloom, falcon, mpt
from converter.families.base import HEADS, Config, Family, Geometry, count

__all__ = ["FAMILIES", "HEADS", "Config", "Family", "Geometry", "check", "converted", "recognise"]

FAMILIES: tuple[Family, ...] = (bloom.FAMILY, mpt.FAMILY, falcon.FAMILY)

# Model types that are asked for often and have no ALiBi, for a better answer than "unknown".
ROTARY = """
    codegen cohere deepseek_v2 deepseek_v3 gemma gemma2 gemma3_text glm gpt_neox gptj granite internlm2
    llama mistral mixtral modernbert olmo olmo2 persimmon phi phi3 qwen qwen2 qwen2_moe qwen3 qwen3_moe
    stablelm starcoder2
"""
LEARNED = "bert biogpt gpt2 gpt_bigcode gpt_neo opt roberta xlm-roberta"


def recognise(config: Config) -> Family:
    """The family of a source or of a converted repository.

    Raises:
        SourceError: the config has no model_type.
        UnsupportedModel: no family has this model_type; says why where that is known.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise SourceError(f"config.json: model_type is {model_type!r}, so the architecture is unknown")
    for family in FAMILIES:
        if model_type in family.model_types or model_type == family.model_type:
            return family
    if model_type in ROTARY.split():
        raise UnsupportedModel(
            f"model_type {model_type!r} has rotary positions, not ALiBi: there are no slopes to scale; "
            "transformers scales it by rope_scaling in its config.json"
        )
    if model_type in LEARNED.split():
        raise UnsupportedModel(
            f"model_type {model_type!r} has learned positions, not ALiBi: there are no slopes to scale, "
            "and none beyond its trained length"
        )
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise UnsupportedModel(f"model_type {model_type!r} is not supported; the supported ones are: {known}")


def converted(config: Config) -> bool:
    """Whether the config was written by this tool."""
    ours = any(config.get("model_type") == family.model_type for family in FAMILIES)
    return ours or ("ntk_convert" in config and "alibi_scaling" in config)


def check(config: Config) -> Family:
    """The family of a source that can be converted.

    Raises:
        AlreadyConverted: the source is itself a converted repository.
        UnsupportedModel: a quantised checkpoint, or whatever its family refuses.
        SourceError: impossible sizes.
    """
    family = recognise(config)
    if converted(config):
        origin = config.get("ntk_convert")
        source = origin.get("source") if isinstance(origin, dict) else None
        raise AlreadyConverted(
            f"the source is already converted (model_type {config.get('model_type')!r}); "
            f"convert its original{f' {source!r}' if source else ''} instead"
        )
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            raise UnsupportedModel(f"the checkpoint is quantised ({key} is set); convert the unquantised one")
    family.check(config)
    family.architectures(config)
    family.geometry(config)
    for size in ("vocab_size", "num_labels"):
        count(config, size, default=1)
    return family
