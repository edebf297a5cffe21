"""Python source code, byte by byte: the text for the small language models.

The corpus is the standard library of the running Python, so nothing is downloaded, and everybody with the
same Python has the same text. One file in ten, chosen by a hash of its name, is held out. The evaluation
reads one piece of each of these, as long as its longest window. So every window comes from a different file,
and windows are as independent of each other as files are.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")  # with the same ids as in BLOOM's tokenizer
# The characters that Hugging Face's byte-level tokenizers use for the 256 bytes.
TOKENS = (*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
# Left out: installed packages, tests (not every installation has them), and tables of numbers.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """The two parts of the text."""

    training: str
    """All other files, one after another."""
    held_out: str
    """A piece from the middle of each held-out file that is long enough."""


def read_corpus(piece: int = 2048) -> Corpus:
    """The standard library's Python files; of each held-out one that has so many characters, a piece."""
    training, held_out = [], []
    for name, path in files():
        text = path.read_text(encoding="utf-8").rstrip() + "\n"
        if hashlib.sha256(name.encode()).digest()[0] % 10 > 0:
            training.append(text)
        elif len(text) >= piece:
            start = (len(text) - piece) // 2
            held_out.append(text[start : start + piece])
    return Corpus("".join(training), "".join(held_out))


def files() -> Iterator[tuple[str, Path]]:
    """Name and path of each of the standard library's files, training and held out."""
    root = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    for name in sorted(name.as_posix() for name in names if not _LEFT_OUT & {*name.parts}):
        # These files record how Python was built, and differ between machines.
        if not name.startswith(("_sysconfigdata", "config-")):
            yield name, root / name


def build_tokenizer() -> Tokenizer:
    """A tokenizer that makes one token of each byte."""
    ids = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(special)
    return tokenizer


def training_batch(rng: np.random.Generator, ids: Ids, *, sequences: int, length: int) -> tuple[Ids, Ids]:
    """Draw random pieces of a text in tokens, [tokens].

    Returns:
        `input_ids` and `targets`, int64 arrays of shape [sequences, length]; the target at a position is the
        next token.
    """
    starts = rng.integers(len(ids) - length, size=(sequences, 1))
    places = starts + np.arange(length)
    return ids[places], ids[places + 1]
