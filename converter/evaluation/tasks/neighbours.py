"""Does an old index stay valid? How the neighbours of texts change against the unscaled model.

The texts are short ones that users have already embedded, so they are cut to the trained length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.errors import SourceError
from converter.evaluation.tasks.base import Ids, TaskType
from converter.evaluation.tasks.records import read_records
from converter.evaluation.tasks.tokens import texts_in_tokens

FEWEST, MOST = 12, 2000
"""Texts: ten neighbours among fewer say nothing; more would take long, as all are compared with all."""


@dataclass(frozen=True)
class Neighbours:
    """Texts whose nearest neighbours among each other are compared with those of the unscaled model."""

    lines: tuple[str, ...]
    name: str = "neighbours"

    @classmethod
    def read(cls, path: Path) -> Neighbours:
        """Reads JSON Lines with a string under ``text`` in each, such as BEIR's ``corpus.jsonl``."""
        lines = tuple(record.text("text") for record in read_records(path)[:MOST])
        if len(lines) < FEWEST:
            raise SourceError(f"{path.name} has {len(lines)} texts; give at least {FEWEST}")
        return cls(lines)

    def texts(self, tokenizer: Any, length: int) -> Sequence[Ids]:
        """The texts in tokens, cut to ``length``."""
        return texts_in_tokens(tokenizer, self.lines, length)


TYPES = (
    TaskType(
        name="neighbours",
        prompt="your texts, `--neighbours FILE`, cut to the trained length",
        right="the same nearest neighbour, the same ten, the same vector (cosine) as without scaling",
        origin="you",
        read=Neighbours.read,
        file_help="Texts whose neighbours should stay the same, in a JSON Lines file.",
        embeds=True,
    ),
)
