"""Tells vLLM about converted models: their configs, sizes and classes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig
from vllm import ModelRegistry
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)

from converter.families import FAMILIES
from converter.families.family import Family
from converter.vllm_plugin.checks import check_architectures, check_scaling, head_size

PACKAGE = __package__
TOKENIZERS = {"baichuan": "NtkBaichuanTokenizer", "mpt": "NtkReplitTokenizer"}
"""Family -> the tokenizer class that its repositories may hold code for, in the templates too."""
HEADS = ("Model", "ForSequenceClassification", "ForTokenClassification")
"""The suffixes of the classes that vLLM serves, beside those of the language model."""


def classes(family: Family) -> list[str]:
    """The converted classes of a family that vLLM serves."""
    return [family.language_model, *(f"Ntk{family.camel}{head}" for head in HEADS)]


class Sizes(ModelArchConfigConvertorBase):
    """What vLLM wants to know of a converted config, and the first place that can refuse it."""

    def get_architectures(self) -> list[str]:
        [family] = (each for each in FAMILIES if each.model_type == self.hf_config.model_type)
        architectures: list[str] = super().get_architectures()
        check_architectures(architectures, classes(family))
        if family.kind == "decoder":
            check_scaling(self.hf_config)
        return architectures

    def get_head_size(self) -> int:
        decodes = hasattr(self.hf_config, "head_dim")
        return head_size(self.hf_config) if decodes else super().get_head_size()

    def get_total_num_kv_heads(self) -> int:
        heads: int = getattr(self.hf_config, "num_key_value_heads", self.hf_config.num_attention_heads)
        return heads

    def derive_max_model_len_and_key(self) -> tuple[float, str | None]:
        """No limit: ALiBi has no last position, and the config's own number is the trained length."""
        return float("inf"), None


def update(config: PretrainedConfig, changes: dict[str, Any]) -> None:
    """``PretrainedConfig.update``, which --hf-overrides calls; refuses to make another model of a config."""
    if changes.get("model_type", config.model_type) != config.model_type:
        raise ValueError(
            f"--hf-overrides names the model_type {changes['model_type']}; drop that: the class of another "
            "model would ignore the ALiBi scaling"
        )
    PretrainedConfig.update(config, changes)


def register_families() -> None:
    """Registers every family; may be called more than once."""
    for family in FAMILIES:
        configuration = import_module(f"{PACKAGE}.templates.configuration_ntk_{family.name}")
        config_class = getattr(configuration, f"Ntk{family.camel}Config")
        config_class.update = update
        # A registered class wins over the repository's own code, so vLLM needs no --trust-remote-code.
        AutoConfig.register(family.model_type, config_class, exist_ok=True)
        MODEL_ARCH_CONFIG_CONVERTORS[family.model_type] = Sizes
        if tokenizer := TOKENIZERS.get(family.name):
            tokenization = import_module(f"{PACKAGE}.templates.tokenization_ntk_sentencepiece")
            tokenizer_class = getattr(tokenization, tokenizer)
            AutoTokenizer.register(config_class, slow_tokenizer_class=tokenizer_class, exist_ok=True)
        for name in classes(family):
            ModelRegistry.register_model(name, f"{PACKAGE}.families.{family.name}:{name}")
