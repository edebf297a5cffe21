"""Sequences from FASTA files, as text for models of DNA or proteins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from converter.errors import UsageError

SUFFIXES = (".fa", ".fasta", ".fna", ".fas")
LINE = re.compile(r"[A-Za-z*-]*")
"""IUPAC's letters, gaps and stops."""


def sequences(path: Path, lines: Iterable[str], size: int) -> Iterator[str]:
    """The sequences in upper case, without headers, which begin with ``>``; the lines of each are joined.

    A sequence is cut after about ``size`` characters. Raises ``UsageError`` that names the line.
    """
    joined: list[str] = []
    letters, started = 0, False
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        header = line.startswith(">")
        if line and not header and not (started and LINE.fullmatch(line)):
            found = "characters that no sequence has" if started else "no header (>) before it"
            raise UsageError(f"`text` {path} is not FASTA: line {number} has {found}")
        if joined and (header or letters >= size):
            yield "".join(joined)
            joined, letters = [], 0
        started = started or header
        if not header:
            joined.append(line.upper())
            letters += len(line)
    yield "".join(joined)
