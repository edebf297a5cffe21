"""Reading a JSON object from a file that anybody may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from converter.errors import SourceError

LARGEST = 64 << 20
"""Bytes. The index of a 72-shard BLOOM has 30 kB; beyond this it is no config or index."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        SourceError: unreadable, too large, no UTF-8, no JSON, nested too deeply, or no object.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise SourceError(f"{path.name} has {size} bytes, too many for a JSON file of its kind")
        return parse_object(path.read_bytes(), path.name)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error


def parse_object(raw: bytes, name: str) -> dict[str, Any]:
    """The JSON object in ``raw``; ``name`` is what the messages call it.

    Raises:
        SourceError: see ``read_object``; also for a key that stands twice in one object.
    """
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise SourceError(f"{name} holds a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = next(key for key, _ in pairs if sum(other == key for other, _ in pairs) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return result
