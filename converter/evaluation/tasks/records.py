"""Reads test cases from JSON Lines files, with one JSON object per line. The files may come from anybody."""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.errors import SourceError
from converter.source.jsonfile import parse_object, read_bytes

WORDS: dict[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
"""What generated prompts are made of: adjectives and nouns."""
LARGEST_FILE = 256 << 20
"""Most bytes in a file. LongBench's TREC has 8 MB."""


@dataclass(frozen=True)
class Record:
    """One line of a file."""

    where: str
    """The file and line, for error messages."""
    values: dict[str, Any]

    def text(self, key: str) -> str:
        """A string; raises ``SourceError`` if it is missing, or not a string."""
        if not _is_text(self.values.get(key)):
            raise self.problem(key, "a string")
        return str(self.values[key])

    def texts(self, key: str) -> tuple[str, ...]:
        """A non-empty list of strings; raises ``SourceError`` if it is missing, or not such a list."""
        values = self.values.get(key)
        if not isinstance(values, list) or not values or not all(map(_is_text, values)):
            raise self.problem(key, "a list of strings")
        return tuple(values)

    def problem(self, key: str, expected: str) -> SourceError:
        """The error for a value that is missing or of the wrong kind."""
        found = "is missing" if key not in self.values else f"is {repr(self.values[key])[:60]}"
        return SourceError(f"{self.where}: {key!r} {found}; it must be {expected}")


def read_records(path: Path) -> tuple[Record, ...]:
    """All lines of ``path`` except blank ones; raises ``SourceError``, which names the line."""
    records = []
    content = read_bytes(path, LARGEST_FILE).removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(content.splitlines(), start=1):
        where = f"{path.name}, line {number}"
        if line.strip():
            records.append(Record(where, parse_object(line, where, "correct that line")))
    if not records:
        raise SourceError(f"{path.name} is empty; it must hold one JSON object per line")
    return tuple(records)


def _is_text(value: object) -> bool:
    """Whether ``value`` is a string that can be encoded as UTF-8; JSON also allows lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
