"""The versions of vLLM that the plugin is written for.

The extra ``vllm`` in pyproject.toml states the same range.
"""

from __future__ import annotations

from typing import Any

from packaging.version import Version
from transformers import AutoConfig, PretrainedConfig

from converter._version import __version__
from converter.families import FAMILIES

FIRST, BEYOND = Version("0.32"), Version("0.33.dev0")


def is_supported(version: str) -> bool:
    return FIRST <= Version(version) < BEYOND


def refuse_families(version: str) -> None:
    """Makes vLLM end with one line when it loads a converted model; other models are not affected."""
    reason = (
        f"ntk-convert {__version__} serves converted models with vLLM {FIRST} up to, and not with, "
        f"{BEYOND.base_version}; this is vLLM {version}. Install another version of one of the two"
    )

    class Refused(PretrainedConfig):
        def __init__(self, **_: Any):
            raise ValueError(reason)

    for family in FAMILIES:
        names = {"model_type": family.model_type}
        AutoConfig.register(family.model_type, type("Refused", (Refused,), names), exist_ok=True)
