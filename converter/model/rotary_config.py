"""The config.json of a rotary model: as its source has it, as a conversion writes it, and the way between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from converter.config import (
    PROVENANCE,
    SOURCE_CONFIG,
    Provenance,
    ResultConfig,
    SourceConfig,
    without_implementation,
)
from converter.rotary import settings
from converter.rotary.settings import Rotary
from converter.scaling.scaling import Scaling
from converter.source.tokenizer import with_known_class


def result_config(
    rotary: Rotary, source: SourceConfig, scaling: Scaling, origin: Provenance
) -> dict[str, Any]:
    """What a conversion with this scaling writes; its record has the source's values of what it changed."""
    result = settings.scaled_config(source, rotary, scaling, origin.train_length)
    changed = [key for key in {**source, **result} if source.get(key) != result.get(key)]
    record = {"scaling": scaling.to_json(), SOURCE_CONFIG: {key: source.get(key) for key in changed}}
    return {**result, PROVENANCE: replace(origin, rotary=record).to_json()}


def source_config(result: ResultConfig, origin: Provenance) -> SourceConfig:
    """What the source of a result has, by the record of its conversion, which must have one."""
    assert origin.rotary is not None
    replaced = origin.rotary[SOURCE_CONFIG]
    before = {**settings.undo_saving(with_known_class(result)), **replaced}
    missing = [PROVENANCE, *(key for key, value in replaced.items() if value is None)]
    kept = {key: value for key, value in before.items() if key not in missing}
    return SourceConfig(without_implementation(kept))
