"""LongEval topics: which of several conversations was the first?

From the published test cases of LongChat (github.com/DachengLi1/LongChat, longeval). Their prompts are
taken as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.evaluation.tasks.answers import words
from converter.evaluation.tasks.base import Item, Metric
from converter.evaluation.tasks.cases import Record, read_records
from converter.evaluation.tasks.fitting import encode, under_longest


@dataclass(frozen=True)
class Topics:
    """The topic is right if the continuation names it.

    Case, punctuation and a leading "The" do not matter; every word of the topic does. The publishers let a
    language model judge, which lets other words for the same pass, so their accuracy may be higher.
    """

    cases: tuple[Record, ...]
    name: str = "topics"
    metric: Metric = "accuracy"
    max_new_tokens: int = 50
    """As published."""

    @classmethod
    def read(cls, path: Path) -> Topics:
        """A published file.

        Raises:
            SourceError: not such a file; names the line.
        """
        cases = read_records(path)
        for case in cases:
            if not _core(_first(case)):
                raise case.problem("topics", "a list of topics")
            case.text("prompt")
        return cls(cases)

    def items(
        self,
        tokenizer: Any,
        lengths: Sequence[int],
        count: int,
        seed: int,
    ) -> Mapping[int, Sequence[Item]]:
        """See ``Task.items``; the first of the file, under the tokens of their longest prompt."""
        return under_longest([_item(tokenizer, case) for case in self.cases[:count]])

    def score(self, item: Item, text: str) -> float:
        """See ``Task.score``."""
        return float(any(f" {_core(topic)} " in f" {' '.join(words(text))} " for topic in item.answers))


def _item(tokenizer: Any, case: Record) -> Item:
    prompt, topic = case.text("prompt"), _first(case)
    place = prompt.lower().find(topic.lower())
    return Item(encode(tokenizer, prompt), (topic,), place / len(prompt) if place >= 0 else None)


def _first(case: Record) -> str:
    """The topic that is asked for."""
    return case.texts("topics")[0]


def _core(topic: str) -> str:
    """A topic's words but for a leading article."""
    found = words(topic)
    return " ".join(found[1:] if found[:1] == ["the"] else found)
