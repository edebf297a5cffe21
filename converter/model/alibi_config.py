"""The config.json of an ALiBi model: as its source has it, as a conversion writes it, and the way between.

What only the tensors tell is added by ``Model.read_tensor_settings``, and stays on the way back.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from converter.config import (
    PROVENANCE,
    Config,
    Provenance,
    ResultConfig,
    SourceConfig,
    with_value,
    without_implementation,
)
from converter.errors import SourceError
from converter.families.family import Family
from converter.scaling.scaling import Scaling
from converter.source.source import CONFIG
from converter.source.tokenizer import Tokenizer, with_known_class

ADDED_KEYS = ("alibi_scaling", "auto_map", PROVENANCE)
"""Keys that a conversion adds."""


def result_config(
    family: Family,
    source: SourceConfig,
    scaling: Scaling,
    origin: Provenance,
    tokenizer: Tokenizer,
    limit: int | None,
) -> dict[str, Any]:
    """What a conversion with this scaling writes; ``limit`` is the input limit in tokens, None to keep it."""
    result = family.template_config(source)
    if tokenizer.here and (tokenizer.ours or "tokenizer_class" not in result):
        result["tokenizer_class"] = tokenizer.ours or family.tokenizer_class
    result |= {
        "architectures": family.architectures(source),
        "model_type": family.model_type,
        "auto_map": family.auto_map,
        "alibi_scaling": scaling.to_json(),
        PROVENANCE: origin.to_json(),
    }
    if limit is not None:
        result = copy.deepcopy(result)  # the length may be inside an object shared with the source
        family.set_length(result, limit)
    return result


def source_config(family: Family, result: ResultConfig, origin: Provenance) -> SourceConfig:
    """What the source of a result has, in the names of keys that the templates read.

    The class and the model_type are a source's, and so is the input limit, if a conversion changed it. Raises
    ``SourceError`` for a class that no conversion writes.
    """
    kept = with_known_class(without_implementation(result))
    source = {
        **family.restored,
        **{key: value for key, value in kept.items() if key not in ADDED_KEYS},
        "model_type": next(iter(family.model_types), "bert"),  # encoders share that one, see ``claims``
        "architectures": source_classes(family, kept),
    }
    limits: Mapping[str, Any] = origin.limits or {}
    if family.length_hint is not None and CONFIG in limits:
        source = with_value(source, family.length_hint, limits[CONFIG])
    return SourceConfig(source)


def source_classes(family: Family, result: Config) -> list[str]:
    """The source's classes for those that a result names; by default its language model."""
    named = result.get("architectures") or [family.language_model]
    known = isinstance(named, list) and all(
        isinstance(name, str) and name in family.classes for name in named
    )
    if not known:
        raise SourceError(
            f"config.json: architectures is {named!r:.200}, and a converted {family.title} has one of "
            f"{', '.join(family.classes)}; correct it"
        )
    return [family.classes[name] for name in named]
