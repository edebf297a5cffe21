"""Reading JSON from untrusted files.

Size, number of values, nesting and digits are limited, so a hostile file cannot exhaust memory or time.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from converter.errors import SourceError

LARGEST = 32 << 20
"""Bytes. The index of BLOOM in 72 shards has 30 kB, that of 256 experts in 61 layers 9 MB."""
MOST_VALUES = 4 << 20
"""Values on all levels together; each takes about 100 bytes of memory, however short it is in the file."""
DEEPEST = 64
"""Levels of lists and objects. Configs have about five; recursion over this many is safe."""
LONGEST_NUMBER = 300
"""Digits of an integer: it can still be converted to a float, so comparing and multiplying cannot fail."""
AGAIN = "download it again"
"""The remedy for a damaged file that came from elsewhere."""
POINTER = b"version https://git-lfs"
"""The start of the text that a clone has in the place of a large file."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, or a ``SourceError``; see ``parse``."""
    return parse_object(read_bytes(path), path.name)


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """The content of a small file, or a ``SourceError``; ``largest`` is in bytes."""
    try:
        with path.open("rb") as file:
            return limited(file, path.name, largest)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error


def limited(file: BinaryIO, name: str, largest: int) -> bytes:
    """What is left to read of a file, or a ``SourceError`` if that is more than ``largest`` bytes."""
    content = file.read(largest + 1)
    if len(content) > largest:
        raise SourceError(f"{name} has more than {largest} bytes, too many for a file of its kind")
    return content


def check_pointer(path: Path, file: BinaryIO | None = None) -> None:
    """Raises ``SourceError`` for the text that a clone without git-lfs has in the place of a large file.

    ``file`` is the file at its start, if it is open.
    """
    try:
        with path.open("rb") if file is None else nullcontext(file) as opened:
            pointer = opened.read(len(POINTER)) == POINTER
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error
    if pointer:
        raise SourceError(
            f"{path.name} is a git-lfs pointer, not the file itself; run git lfs pull in {path.parent}"
        )


def parse_object(raw: bytes, name: str, remedy: str = AGAIN) -> dict[str, Any]:
    """The JSON object in ``raw``, which messages call ``name``, or a ``SourceError``; see ``parse``."""
    return as_object(parse(raw, name, remedy), name)


def as_object(value: object, name: str) -> dict[str, Any]:
    """A JSON value that must be an object, or a ``SourceError`` that calls its file ``name``."""
    if not isinstance(value, dict):
        raise SourceError(f"{name} holds a JSON {type(value).__name__}, not an object")
    return value


def parse(raw: bytes, name: str, remedy: str = AGAIN) -> Any:
    """The JSON value in ``raw``, or a ``SourceError`` that calls it ``name``, also beyond a limit."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if not _finite(value):
                raise SourceError(f"{name}: {key[:200]!r} is not a finite number; correct it there")
            if key in found:
                raise ValueError(f"the key {key[:200]!r} occurs twice in one object")
            found[key] = value
        return found

    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MOST_VALUES:
        raise SourceError(f"{name} has more than {MOST_VALUES} values, too many for a file of its kind")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_int=_integer)
        too_deep = _deeper(value, DEEPEST)
    except RecursionError:
        too_deep = True
    except ValueError as error:
        raise SourceError(f"{name} is not valid JSON ({error}); {remedy}") from error
    if too_deep:
        raise SourceError(f"{name} is not valid JSON (nested deeper than {DEEPEST} levels); {remedy}")
    return value


def _deeper(value: object, levels: int) -> bool:
    """Whether lists or objects in ``value`` are nested deeper than ``levels``."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(levels):
        children = (parent.values() if isinstance(parent, dict) else parent for parent in level)
        level = [child for each in children for child in each if isinstance(child, (dict, list))]
    return bool(level)


def _finite(value: object) -> bool:
    """False for NaN and infinity, which Python reads from such words and from 1e999, and lists with them."""
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)
