"""Windows of a text, and the loss in them by length and by position.

The text is cut into windows of the longest length, without overlap, and each window into pieces of every
shorter length. So all lengths predict the same tokens, but with more or less of the text before each token.
The first token of a piece is not predicted (Press et al., ICLR 2022, section 3, "nonoverlapping").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from converter.errors import UsageError
from converter.evaluation.fasta import SUFFIXES, sequences
from converter.evaluation.results import Bucket

BUCKETS = 16
"""Parts of equal width into which a window is divided for the loss by position."""
BLOCK = 1 << 16
"""Characters that are tokenised at once."""


def read_windows(tokenizer: Any, files: Sequence[Path], length: int, count: int) -> NDArray[np.int64]:
    """The first windows of some text files, which are read one after another as one text.

    Args:
        tokenizer: a tokenizer from transformers; no special tokens are added.
        files: UTF-8 text files; those that end in .fa or .fasta must be FASTA.
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


def pieces(windows: NDArray[Any], length: int) -> NDArray[Any]:
    """The windows cut into pieces, [windows * pieces, length]; a shorter remainder is dropped."""
    count = windows.shape[1] // length
    return windows[:, : count * length].reshape(-1, length)


def window_losses(losses: NDArray[np.float64], windows: int) -> tuple[float, ...]:
    """The mean loss of each window in nats per token, from the losses of all pieces [pieces, length - 1]."""
    return tuple(float(loss) for loss in losses.reshape(windows, -1).mean(axis=1))


def by_position(losses: NDArray[np.float64]) -> tuple[Bucket, ...]:
    """The mean loss by position, from losses [windows, length - 1] of the positions from 1 on."""
    length = losses.shape[1] + 1
    edges = np.unique(np.linspace(1, length, min(BUCKETS, losses.shape[1]) + 1).astype(int))
    return tuple(
        Bucket(int(start), int(end), float(losses[:, start - 1 : end - 1].mean()))
        for start, end in pairwise(edges)
    )


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
