"""The limits beyond which a source's small files make programs truncate texts; they follow the scaling.

``max_seq_length`` in sentence_bert_config.json is sentence-transformers' limit for an encoder,
``model_max_length`` in tokenizer_config.json is that of the tokenizer in transformers. Both in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from converter.config import is_count
from converter.errors import SourceError
from converter.source.base import Source
from converter.source.jsonfile import read_object
from converter.source.tokenizer import TOKENIZER_CONFIG, Tokenizer

SENTENCE_CONFIG = "sentence_bert_config.json"
KEYS = {SENTENCE_CONFIG: "max_seq_length", TOKENIZER_CONFIG: "model_max_length"}


@dataclass(frozen=True)
class Raised:
    """The files whose limits are raised."""

    files: Mapping[str, dict[str, Any]]
    """Name -> new content."""
    note: str | None
    """What was raised, a sentence without its full stop; None if there are no such files."""


def raise_limits(source: Source, tokenizer: Tokenizer, reach: int | None, *, decoder: bool) -> Raised:
    """Raises limits that are lower than ``reach``; none is lowered or added.

    A value that is not a positive integer is left as it is, and so is a file that cannot be read.

    Args:
        source: the checkpoint; from the Hub, the files are downloaded.
        tokenizer: what becomes of its tokenizer.
        reach: tokens that the scaling reaches; None if it is not known.
        decoder: whether the model is causal; then only the tokenizer's limit is raised.
    """
    files: dict[str, dict[str, Any]] = {}
    raised = []
    for name in (TOKENIZER_CONFIG,) if decoder else KEYS:
        content = {} if reach is None else _content(source, tokenizer, name)
        key = KEYS[name]
        before = content.get(key)
        if reach is not None and is_count(before) and before < reach:
            files[name] = {**content, key: reach}
            raised.append(f"{key} in {name} from {before}")
    if not raised:
        return Raised({}, None)
    note = (
        f"the input limit was raised to the {reach} tokens that the scaling reaches: {' and '.join(raised)}"
    )
    return Raised(files, note)


def _content(source: Source, tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """The content that the result would have otherwise; empty if there is none or it cannot be read."""
    if name == TOKENIZER_CONFIG and tokenizer.settings is not None:
        return tokenizer.settings
    if name not in source.files:
        return {}
    source.fetch([name])
    try:
        return read_object(source.folder / name)
    except SourceError:
        return {}
