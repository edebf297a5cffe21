"""Windows of the user's text, as token ids."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from converter.errors import UsageError
from converter.texts.fasta import SUFFIXES, sequences

BLOCK = 1 << 16
"""Characters that are tokenised at once."""
PACKED = ".gz"
MOST_UNKNOWN = 0.25
"""Of the tokens. Proteins are unknown to a model of DNA, and so are the stretches of N in a genome."""


def read_windows(tokenizer: Any, files: Sequence[Path], length: int, count: int) -> NDArray[np.int64]:
    """The first windows of some text files, which are read one after another as one text.

    Args:
        tokenizer: a tokenizer from transformers; no special tokens are added.
        files: UTF-8 text files, packed with gzip if their names end in ``PACKED``; those whose names, without
            that, end in ``SUFFIXES`` must be FASTA.
        length: tokens per window.
        count: most windows to read.

    Returns:
        Token ids, int64 [windows, length]; at least one window.

    Raises:
        UsageError: a file cannot be read, the text is too short for one window, or the tokenizer does not
            know too much of it.
    """
    tokens: list[int] = []
    for block in _blocks(files):
        tokens += tokenizer(block, add_special_tokens=False, verbose=False)["input_ids"]
        if len(tokens) >= count * length:
            break
    found = min(len(tokens) // length, count)
    names = ", ".join(str(path) for path in files)
    if not found:
        raise UsageError(f"{names}: {len(tokens)} tokens, but one window takes {length}; give more text")
    windows = np.array(tokens[: found * length], dtype=np.int64).reshape(found, length)
    unknown = float((windows == getattr(tokenizer, "unk_token_id", None)).mean())
    if unknown > MOST_UNKNOWN:
        raise UsageError(
            f"{names}: {100 * unknown:.0f} % of the tokens are {tokenizer.unk_token}, which means unknown; "
            "give text of the kind that the model was trained on"
        )
    return windows


def _blocks(files: Sequence[Path]) -> Iterator[str]:
    """The text of all files in blocks."""
    for path in files:
        packed = path.suffix.lower() == PACKED
        fasta = (path.with_suffix("") if packed else path).suffix.lower() in SUFFIXES
        try:
            # Text that begins with a byte order mark is UTF-8 too.
            with (gzip.open if packed else open)(path, "rt", encoding="utf-8-sig") as file:
                yield from sequences(path, file, BLOCK) if fasta else _words(file)
        except UnicodeDecodeError as error:
            raise UsageError(f"`text` {path} is not UTF-8 text ({error.reason})") from error
        except (OSError, EOFError, zlib.error) as error:  # the last two of a damaged gzip file
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"`text` {path} cannot be read: {reason}") from error


def _words(file: TextIO) -> Iterator[str]:
    """A text in blocks that end at the end of a word."""
    rest = ""
    while block := file.read(BLOCK):
        head, space, tail = (rest + block).rpartition(" ")
        yield head
        rest = space + tail
    yield rest
