"""Code that the BERT-like families share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from converter.config import Config, inner
from converter.source.checkpoint import Tensor

# Buffers that old versions of transformers stored.
BUFFERS = r"(^|\.)embeddings\.(position_ids|token_type_ids)$"
CLASSIFIER = "classifier.weight"
DECODER = "cls.predictions.decoder.weight"
POOLER, PREDICTIONS = re.compile(r"(^|\.)pooler\.dense\."), re.compile(r"^cls\.predictions\.")
ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu")
# Option -> the values for which the templates compute the right layers; see ``family.check_options``.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, *ACTIVATIONS),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
}


def class_names(config: Config) -> list[str]:
    """All class names in the config's ``architectures`` and ``auto_map``."""
    named = config.get("architectures")
    entries = [*(named if isinstance(named, list) else []), *inner(config, "auto_map").values()]
    return [entry.split(".")[-1] for entry in entries if isinstance(entry, str)]


def settings_from_tensors(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Whether a pooler is stored; and the right class, if the config names one without the stored head.

    Some configs name a masked language model whose head is not stored. Those of jina-reranker-v1 name the
    backbone, though a classifier on top of the pooler is stored.
    """
    pooler = any(POOLER.search(name) for name in tensors)
    changes: dict[str, Any] = {"add_pooling_layer": pooler}
    named = config.get("architectures") or []
    bare, predictions, labels = "Model", "ForMaskedLM", tensors.get(CLASSIFIER)
    if any(name.endswith(predictions) for name in named) and not any(map(PREDICTIONS.search, tensors)):
        changes["architectures"] = [name.removesuffix(predictions) + bare for name in named]
    elif pooler and labels is not None and named and all(name.endswith(bare) for name in named):
        changes["architectures"] = [name.removesuffix(bare) + "ForSequenceClassification" for name in named]
        if len(config.get("id2label") or ()) != labels.shape[0]:
            changes["num_labels"] = labels.shape[0]
    return changes
