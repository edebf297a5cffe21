"""The file of ``--slopes``: a fitted scaling, as ``alibi_scaling`` in config.json has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converter.errors import SourceError, option
from converter.scaling.request import RECORD, SLOPES_FILE, GivenSlopes
from converter.scaling.scaling import FITTED, read_scaling
from converter.source.jsonfile import parse_object, read_bytes
from converter.source.source import plain_text

SLOPES_KEYS = {"type", "exponents", "temperatures", "factor", "train_seq_len", "dynamic", "rate"}


def read_slopes_file(slopes: str | Path | Mapping[str, Any]) -> GivenSlopes:
    """Reads fitted slopes from a JSON file, or its content; a ``SourceError`` if there are none."""
    if isinstance(slopes, Mapping):
        name = shown = SLOPES_FILE
        content = dict(slopes)
    else:
        if not isinstance(slopes, str | Path):
            raise SourceError(f"{option.slopes} {slopes!r:.80} is neither a file nor its content")
        path = Path(slopes)
        if not path.is_file():
            raise SourceError(f"{option.slopes} {slopes} is not a file; name a JSON file of fitted slopes")
        name, shown = path.name, str(slopes)
        content = parse_object(read_bytes(path), shown, "correct it, or let fit write it again")
    record = content.pop(RECORD, None)
    if content.get("type") != FITTED:
        raise SourceError(f"{shown} is not a file of fitted slopes: its type is not {FITTED!r}")
    for key in content.keys() - SLOPES_KEYS:
        raise SourceError(
            f"{shown} has the unknown key {plain_text(str(key))}; remove it, or put it under {RECORD!r}"
        )
    return GivenSlopes(name, read_scaling(content, shown), record)
