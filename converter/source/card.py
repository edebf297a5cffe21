"""A checkpoint's model card: its text, and its front matter. Anybody may have written it."""

from __future__ import annotations

import re
from typing import Any

from converter.source.source import CARD, Source

LARGEST_CARD = 1 << 20
"""Bytes; a larger card is not read."""
FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
DEEPEST = 50
"""Front matter with more levels is not read."""


def read_card(source: Source, errors: str = "replace") -> str:
    """The text of a checkpoint's card; empty if it has none, or one that is too large.

    ``errors`` says what becomes of bytes that are not UTF-8. From the Hub, the card is downloaded. Raises
    ``SourceError`` if it cannot be read.
    """
    if CARD not in source.files:
        return ""
    with source.open(CARD) as file:
        content = file.read(LARGEST_CARD + 1)
    if len(content) > LARGEST_CARD:
        return ""
    return content.decode(errors=errors)


def split_front_matter(card: str) -> tuple[str, str]:
    """The front matter of a card, with the lines that enclose it, and the text after it."""
    found = FRONT_MATTER.match(card)
    if found is None:
        return "", card
    return card[: found.end()], card[found.end() :]


def read_front_matter(card: str) -> dict[str, Any]:
    """The front matter of a card; empty if it cannot be read, or could take time or space without limit.

    huggingface_hub's ``ModelCard`` is not used, because anybody may have written the card: it reads 1 MB in
    18 seconds, follows aliases that multiply, and fails on deep lists, numbers as keys, a key such as
    ``self`` and bytes that are not UTF-8. Versions before 1.0 split a text in ``tags`` into its letters.
    """
    found = FRONT_MATTER.match(card)
    if found is None:
        return {}
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # Python's takes seconds for long results
    try:
        values = yaml.load(found[1], loader) if _is_bounded(found[1], loader) else None
    except Exception:  # PyYAML also raises errors that are not its own
        return {}
    if not isinstance(values, dict):
        return {}
    return {str(key): value for key, value in values.items()}


def _is_bounded(front_matter: str, loader: Any) -> bool:
    """Whether it has few levels and no alias, by which a few lines can stand for billions of values."""
    import yaml

    depth = 0
    for event in yaml.parse(front_matter, loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEEPEST or isinstance(event, yaml.AliasEvent):
            return False
    return True
