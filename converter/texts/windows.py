"""Windows of the user's text, as token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from converter.errors import UsageError
from converter.texts.fasta import SUFFIXES, sequences

BLOCK = 1 << 16
"""Characters that are tokenised at once."""


def read_windows(tokenizer: Any, files: Sequence[Path], length: int, count: int) -> NDArray[np.int64]:
    """The first windows of some text files, which are read one after another as one text.

    Args:
        tokenizer: a tokenizer from transformers; no special tokens are added.
        files: UTF-8 text files; those whose names end in ``SUFFIXES`` must be FASTA.
        length: tokens per window.
        count: most windows to read.

    Returns:
        Token ids, int64 [windows, length]; at least one window.

    Raises:
        UsageError: a file cannot be read, or the text is too short for one window.
    """
    tokens: list[int] = []
    for block in _blocks(files):
        tokens += tokenizer(block, add_special_tokens=False, verbose=False)["input_ids"]
        if len(tokens) >= count * length:
            break
    found = min(len(tokens) // length, count)
    if not found:
        names = ", ".join(str(path) for path in files)
        raise UsageError(f"{names}: {len(tokens)} tokens, but one window takes {length}; give more text")
    return np.array(tokens[: found * length], dtype=np.int64).reshape(found, length)


def _blocks(files: Sequence[Path]) -> Iterator[str]:
    """The text of all files in blocks."""
    for path in files:
        try:
            with path.open(encoding="utf-8") as file:
                fasta = path.suffix.lower() in SUFFIXES
                yield from sequences(path, file, BLOCK) if fasta else _words(file)
        except UnicodeDecodeError as error:
            raise UsageError(f"`text` {path} is not UTF-8 text ({error.reason})") from error
        except OSError as error:
            raise UsageError(f"`text` {path} cannot be read: {error.strerror}") from error


def _words(file: TextIO) -> Iterator[str]:
    """A text in blocks that end at the end of a word."""
    rest = ""
    while block := file.read(BLOCK):
        head, space, tail = (rest + block).rpartition(" ")
        yield head
        rest = space + tail
    yield rest
