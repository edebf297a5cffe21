"""What the BERT-like families share."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from converter.errors import SourceError, UnsupportedModel
from converter.families.base import Config, Geometry, count, head_dim

# Buffers that old versions of transformers stored.
BUFFERS = r"(^|\.)embeddings\.(position_ids|token_type_ids)$"
POOLER, PREDICTIONS = re.compile(r"(^|\.)pooler\.dense\."), re.compile(r"^cls\.predictions\.")
ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu")
# Option -> the values under which the layers are those that the templates compute; None is the default,
# which is left out of a config or null in it.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, *ACTIVATIONS),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
}


def check(config: Config) -> None:
    """Refuses options of BERT that change its layers."""
    for key, good in OPTIONS.items():
        if config.get(key) not in good:
            fit = " or ".join(repr(value) for value in good if value is not None)
            raise UnsupportedModel(f"{key} is {config[key]!r}; only a model with {fit} can be converted")


def code(config: Config) -> Mapping[str, Any]:
    """``auto_map``; empty where the config has none.

    Raises:
        SourceError: it is not an object.
    """
    value = config.get("auto_map")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SourceError(f"config.json: auto_map is {value!r}, not an object")
    return value


def class_names(config: Config) -> list[str]:
    """Every class that the config names, in ``architectures`` or ``auto_map``."""
    named = config.get("architectures")
    entries = [*(named if isinstance(named, list) else []), *code(config).values()]
    return [entry.split(".")[-1] for entry in entries if isinstance(entry, str)]


def geometry(config: Config) -> Geometry:
    heads = count(config, "num_attention_heads")
    return Geometry(
        num_heads=heads,
        head_dim=head_dim(count(config, "hidden_size"), heads),
        num_layers=count(config, "num_hidden_layers"),
        num_kv_heads=heads,
    )


def raise_length(config: dict[str, Any], length: int) -> None:
    """``max_position_embeddings``, where tokenizers and serving tools cut texts; nothing else reads it."""
    config["max_position_embeddings"] = max(count(config, "max_position_embeddings", default=1), length)


def fit(config: Config, names: Collection[str]) -> dict[str, Any]:
    """Whether there is a pooler; and the trunk's class, if a prediction head is named but none is stored."""
    changes: dict[str, Any] = {"add_pooling_layer": any(POOLER.search(name) for name in names)}
    head, named = "ForMaskedLM", config.get("architectures") or []
    if any(name.endswith(head) for name in named) and not any(PREDICTIONS.search(name) for name in names):
        changes["architectures"] = [name.removesuffix(head) + "Model" for name in named]
    return changes
