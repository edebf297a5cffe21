"""The user's texts: the tokenizer, loaded without remote code, windows of files, and vectors of texts."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer

from converter.errors import SourceError, UsageError, option, reason
from converter.source.open import open_folder
from converter.source.sentence_transformers import Pooling
from converter.source.tokenizer import TEMPLATE, TOKENIZER_CONFIG, our_class
from converter.verification import unlogged
from converter.verification.imported import ImportedRepository, templates

BLOCK = 1 << 16
"""Characters that are tokenised at once."""
FEWEST_FILES = 6
"""Files from which windows are taken as independent."""
MOST_UNKNOWN = 0.25
"""Of the tokens. Proteins are unknown to a model of DNA, and so are the stretches of N in a genome."""


def load_tokenizer(folder: Path, name: str, imported: ImportedRepository | None) -> Any:
    """Loads the tokenizer in ``folder`` without running its repository's code.

    ``name`` is for messages; ``imported`` is the converted repository whose tokenizer it is, or None for a
    rotary model. Raises ``SourceError`` if it does not load.
    """
    try:
        ours = our_class(open_folder(folder).object(TOKENIZER_CONFIG))
        with unlogged():
            if ours is not None:
                with templates() as load:
                    return getattr(load(TEMPLATE.removesuffix(".py")), ours).from_pretrained(folder)
            # Pass the config, or transformers would look for one and may not know its class.
            known = {} if imported is None else {"config": imported.build_config()}
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **known)
    except Exception as error:  # a damaged file can raise anything
        raise SourceError(f"the tokenizer of {name} does not load ({reason(error)})") from error


def read_windows(
    tokenizer: Any,
    files: Sequence[Path],
    length: int,
    count: int,
    say: Callable[[str], object] = str,
) -> NDArray[np.int64]:
    """The first windows of some UTF-8 files, read as one text: token ids, int64 [at most count, length].

    Files are packed with gzip if their names end in .gz. No special tokens are added. ``say`` is called with
    a line if fewer than ``FEWEST_FILES`` files give several windows: those of one text are alike, and the
    tests of differences take windows as independent. Raises ``UsageError`` for a file that cannot be read,
    text too short for one window, or text of which the tokenizer does not know too much.
    """
    tokens: list[int] = []
    read: set[Path] = set()
    for path, block in _blocks(files):
        read.add(path)
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
    if found > 1 and len(read) < FEWEST_FILES:
        say(
            f"all {found} windows come from {len(read)} file{'s' * (len(read) > 1)}: parts of one text are "
            f"alike, so p and the intervals promise too much; {FEWEST_FILES} files or more are better"
        )
    return windows


def _blocks(files: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """The text of all files in blocks, each with its file."""
    for path in files:
        packed = path.suffix.lower() == ".gz"
        try:
            # Text that begins with a byte order mark is UTF-8 too.
            with (gzip.open if packed else open)(path, "rt", encoding="utf-8-sig") as file:
                for block in _words(file):
                    yield path, block
        except UnicodeDecodeError as error:
            raise UsageError(f"{option.text} {path} is not UTF-8 text ({error.reason})") from error
        except (OSError, EOFError, zlib.error) as error:  # the last two of a damaged gzip file
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{option.text} {path} cannot be read: {reason}") from error


def _words(file: TextIO) -> Iterator[str]:
    """A text in blocks that end at the end of a word, or of a line in a text without spaces.

    A block without either, such as a genome, ends anywhere: it would else grow until the end of the text.
    """
    rest = ""
    while block := file.read(BLOCK):
        text = rest + block
        end = text.rfind(" ", 1)
        if end < 0:
            end = text.rfind("\n") + 1 or len(text)
        yield text[:end]
        rest = text[end:]
    yield rest


def pooled(states: torch.Tensor, real: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """One vector of each text, not normalised, [rows, modes * hidden]; states are [rows, tokens, hidden].

    ``real`` is the mask. Every mode but ``max`` is a weighted sum of the states.
    """
    place = real.cumsum(1)
    last = real.sum(1, keepdim=True)
    weights = {"cls": place == 1, "lasttoken": place == last, "weightedmean": place}

    def vector(mode: str) -> torch.Tensor:
        if mode == "max":
            return states.masked_fill(real[..., None] == 0, -torch.inf).amax(1)
        weight = weights.get(mode, real) * real
        count = weight.sum(1, keepdim=True)
        return (states * weight[..., None]).sum(1) / (count**0.5 if mode == "mean_sqrt_len_tokens" else count)

    return torch.cat([vector(mode) for mode in pooling.modes], dim=-1)
