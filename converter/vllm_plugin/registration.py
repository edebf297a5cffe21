"""Tells vLLM about converted decoders: their configs, sizes and models."""

from __future__ import annotations

from importlib import import_module

from transformers import AutoConfig, AutoTokenizer
from vllm import ModelRegistry
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)

from converter.families import FAMILIES
from converter.vllm_plugin.checks import check_architectures, check_scaling, head_size

PACKAGE = __package__
TOKENIZERS = {"baichuan": "NtkBaichuanTokenizer", "mpt": "NtkReplitTokenizer"}
"""Family -> the tokenizer class that its repositories may hold code for, in the templates too."""
DECODERS = tuple(family for family in FAMILIES if family.kind == "decoder")


class Sizes(ModelArchConfigConvertorBase):
    """What vLLM wants to know of a converted config, and the first place that can refuse it."""

    def get_architectures(self) -> list[str]:
        architectures: list[str] = super().get_architectures()
        check_architectures(architectures, [family.language_model for family in DECODERS])
        check_scaling(self.hf_config)
        return architectures

    def get_head_size(self) -> int:
        return head_size(self.hf_config)

    def get_total_num_kv_heads(self) -> int:
        heads: int = self.hf_config.num_key_value_heads
        return heads

    def derive_max_model_len_and_key(self) -> tuple[float, str | None]:
        """No limit: ALiBi has no last position, and the config's own number is the trained length."""
        return float("inf"), None


def register_families() -> None:
    """Registers every family of decoders; may be called more than once."""
    for family in DECODERS:
        configuration = import_module(f"{PACKAGE}.templates.configuration_ntk_{family.name}")
        config_class = getattr(configuration, f"Ntk{family.camel}Config")
        # A registered class wins over the repository's own code, so vLLM needs no --trust-remote-code.
        AutoConfig.register(family.model_type, config_class, exist_ok=True)
        MODEL_ARCH_CONFIG_CONVERTORS[family.model_type] = Sizes
        if tokenizer := TOKENIZERS.get(family.name):
            tokenization = import_module(f"{PACKAGE}.templates.tokenization_ntk_sentencepiece")
            tokenizer_class = getattr(tokenization, tokenizer)
            AutoTokenizer.register(config_class, slow_tokenizer_class=tokenizer_class, exist_ok=True)
        module = f"{PACKAGE}.families.{family.name}"
        ModelRegistry.register_model(family.language_model, f"{module}:{family.language_model}")
