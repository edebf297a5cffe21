"""Test cases from JSON Lines files, which anybody may have written: one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.errors import SourceError
from converter.jsonfile import LARGEST, parse_object

LARGEST_FILE = 256 << 20
"""Bytes. LongBench's TREC has 8 MB."""


@dataclass(frozen=True)
class Record:
    """One line of a file."""

    where: str
    """File and line, for messages."""
    values: dict[str, Any]

    def text(self, key: str) -> str:
        """A string.

        Raises:
            SourceError: missing, or no string.
        """
        if not _is_text(self.values.get(key)):
            raise self.problem(key, "a string")
        return str(self.values[key])

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, not empty.

        Raises:
            SourceError: missing, or something else.
        """
        values = self.values.get(key)
        if not isinstance(values, list) or not values or not all(map(_is_text, values)):
            raise self.problem(key, "a list of strings")
        return tuple(values)

    def problem(self, key: str, expected: str) -> SourceError:
        """What to say of a value that is not what it must be."""
        found = "is missing" if key not in self.values else f"is {repr(self.values[key])[:60]}"
        return SourceError(f"{self.where}: {key!r} {found}; it must be {expected}")


def read_records(path: Path) -> tuple[Record, ...]:
    """All lines of ``path`` but blank ones.

    Raises:
        SourceError: unreadable, empty, too large, or a line that is no JSON object; names the line.
    """
    records = tuple(
        Record(where, parse_object(line, where)) for where, line in _lines(path) if not line.isspace()
    )
    if not records:
        raise SourceError(f"{path.name} is empty; it must hold one JSON object a line")
    return records


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each line with what messages call it; no more of the file is read than is allowed."""
    size = number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(LARGEST + 1):
                number += 1
                size += len(line)
                where = f"{path.name}, line {number}"
                if len(line) > LARGEST:
                    raise SourceError(f"{where} has more than {LARGEST} bytes, too many for a test case")
                if size > LARGEST_FILE:
                    raise SourceError(f"{path.name} has more than {LARGEST_FILE} bytes; give a part of it")
                yield where, line
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error


def _is_text(value: object) -> bool:
    """Whether ``value`` is a string that can be written as UTF-8: JSON also spells halves of characters."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
