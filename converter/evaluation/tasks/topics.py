"""LongEval topics: what was the topic of the first of several conversations?

The prompts are the unchanged published test cases of LongChat (github.com/DachengLi1/LongChat, longeval).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.evaluation.tasks.answers import words
from converter.evaluation.tasks.base import Item, Metric, TaskType
from converter.evaluation.tasks.cases import Record, read_records
from converter.evaluation.tasks.fitting import encode, under_longest


@dataclass(frozen=True)
class Topics:
    """An answer is right if the continuation names the topic.

    Case, punctuation and a leading "The" do not matter, but every word of the topic must appear. The
    publishers let a language model judge, which also accepts paraphrases, so their accuracy may be higher.
    """

    cases: tuple[Record, ...]
    name: str = "topics"
    metric: Metric = "accuracy"
    max_new_tokens: int = 50
    """As published."""

    @classmethod
    def read(cls, path: Path) -> Topics:
        """Reads a published file.

        Raises:
            SourceError: it is not such a file; the message names the line.
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
        """See ``Task.items``; takes the file's first prompts, all listed under the longest's length."""
        return under_longest([_item(tokenizer, case) for case in self.cases[:count]])

    def score(self, item: Item, text: str) -> float:
        """See ``Task.score``."""
        return float(any(f" {_core(topic)} " in f" {' '.join(words(text))} " for topic in item.answers))


def _item(tokenizer: Any, case: Record) -> Item:
    prompt, topic = case.text("prompt"), _first(case)
    place = prompt.lower().find(topic.lower())
    return Item(encode(tokenizer, prompt), (topic,), place / len(prompt) if place >= 0 else None)


def _first(case: Record) -> str:
    """The topic that the prompt asks for."""
    return case.texts("topics")[0]


def _core(topic: str) -> str:
    """A topic's words without a leading "the"."""
    found = words(topic)
    return " ".join(found[1:] if found[:1] == ["the"] else found)


TYPES = (
    TaskType(
        name="topics",
        prompt="several conversations, `--topics FILE`, and the question which topic came first",
        right="the topic is named, whatever its case and punctuation",
        origin="LongEval",
        read=Topics.read,
        file_help="LongEval's published topics.",
    ),
)
