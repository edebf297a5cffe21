"""The user's own prompts, from a JSON Lines file.

Each line holds one object with ``prompt`` (a string) and ``answer`` (a string, or a list of strings, any of
which is right). Optional are ``length`` (tokens; the prompt is counted under this length) and ``depth`` (0 to
1, where in the prompt the answer is).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.config import is_count, is_number
from converter.evaluation.tasks.answers import starts_with
from converter.evaluation.tasks.base import Item, Metric, TaskType
from converter.evaluation.tasks.cases import Record, read_records
from converter.evaluation.tasks.fitting import encode, under_longest


@dataclass(frozen=True)
class Case:
    """One line of the file."""

    prompt: str
    answers: tuple[str, ...]
    length: int | None
    depth: float | None


@dataclass(frozen=True)
class Prompts:
    """A continuation is right if it begins with an answer and not with a longer word or number."""

    cases: tuple[Case, ...]
    name: str = "prompts"
    metric: Metric = "accuracy"

    @classmethod
    def read(cls, path: Path) -> Prompts:
        """Reads a file of prompts.

        Raises:
            SourceError: it is not such a file; the message names the line.
        """
        return cls(tuple(_case(record) for record in read_records(path)))

    @property
    def max_new_tokens(self) -> int:
        """Enough for the longest answer with any tokenizer: a token covers at least one byte."""
        return 2 + max(len(answer.encode()) for case in self.cases for answer in case.answers)

    def items(
        self,
        tokenizer: Any,
        lengths: Sequence[int],
        count: int,
        seed: int,
    ) -> Mapping[int, Sequence[Item]]:
        """See ``Task.items``; the first prompts of each ``length``.

        Prompts without one are listed under the length of the longest of them.
        """
        labels = sorted({case.length for case in self.cases if case.length is not None})
        groups = {label: self._first(tokenizer, label, count) for label in labels}
        for longest, others in under_longest(self._first(tokenizer, None, count)).items():
            groups[longest] = [*groups.get(longest, ()), *others][:count]
        return groups

    def score(self, item: Item, text: str) -> float:
        """See ``Task.score``."""
        return float(any(starts_with(text, answer) for answer in item.answers))

    def _first(self, tokenizer: Any, label: int | None, count: int) -> list[Item]:
        cases = [case for case in self.cases if case.length == label][:count]
        return [Item(encode(tokenizer, case.prompt), case.answers, case.depth) for case in cases]


def _case(record: Record) -> Case:
    answer = record.values.get("answer")
    answers = record.texts("answer") if isinstance(answer, list) else (record.text("answer"),)
    answers = tuple(each.strip() for each in answers)
    if not all(answers):
        raise record.problem("answer", "text that is not blank")
    length, depth = record.values.get("length"), record.values.get("depth")
    if length is not None and not is_count(length):
        raise record.problem("length", "a number of tokens, at least 1")
    if depth is not None:
        if not is_number(depth) or not 0 <= depth <= 1:
            raise record.problem("depth", "a number from 0 to 1")
        depth = float(depth)
    return Case(record.text("prompt"), answers, length, depth)


TYPES = (
    TaskType(
        name="prompts",
        prompt="your own, `--prompts FILE`",
        right="the output begins with the answer",
        origin="you",
        read=Prompts.read,
        file_help="Your own prompts, in a JSON Lines file.",
    ),
)
