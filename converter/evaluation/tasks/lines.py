"""LongEval lines: a list of records, and a question about one of them.

From LongChat (github.com/DachengLi1/LongChat, longeval/utils.py, ``LRT-NL``): the sentences of the prompts
are those of its published test cases, to the space at their end. The names of the lines are drawn from our
own words, and are distinct.

The publishers take the last number of a chat model's reply. A base model goes on after the answer, with
lines of its own making, so here it is the first.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.errors import UsageError
from converter.evaluation.tasks.answers import first_number
from converter.evaluation.tasks.base import Item, Metric
from converter.evaluation.tasks.cases import Record, read_records
from converter.evaluation.tasks.drawing import depths, generator
from converter.evaluation.tasks.fitting import Draft, encode, fill, under_longest
from converter.evaluation.tasks.words import ADJECTIVES, NOUNS

NAME = "lines"
MAX_NEW_TOKENS = 32
"""Enough to repeat the line asked for."""
LARGEST_VALUE = 50_000
HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and "
    "contains a '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, "
    "memorize its corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the "
    "corresponding <REGISTER_CONTENT> of a certain line index. Now the record start:\n\n"
)
LINE = "line {name}: REGISTER_CONTENT is <{value}>\n"
QUESTION = (
    "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {name}? I need the number. "
)

MOST_OF_TWO_WORDS = len(ADJECTIVES) * len(NOUNS) // 2
MOST_LINES = MOST_OF_TWO_WORDS * len(ADJECTIVES)
"""Half of the names there are: drawing one that is not yet taken stays quick."""


@dataclass(frozen=True)
class Lines:
    """Generated prompts, with as many lines as fit a length, or a given number."""

    lines: int | None = None
    """Lines of each prompt, whatever its length in tokens: the published cases are named by it."""
    name: str = NAME
    metric: Metric = "accuracy"
    max_new_tokens: int = MAX_NEW_TOKENS

    def __post_init__(self) -> None:
        if self.lines is not None and not 1 <= self.lines <= MOST_LINES:
            raise UsageError(f"lines: {self.lines} lines are out of range; give 1 to {MOST_LINES}")

    def items(
        self, tokenizer: Any, lengths: Sequence[int], count: int, seed: int
    ) -> Mapping[int, Sequence[Item]]:
        """See ``Task.items``; with ``lines`` given, all under the tokens of the longest prompt."""
        if self.lines is not None:
            drafts = _drafts(tokenizer, f"{self.lines} lines", count, seed)
            return under_longest([draft(self.lines) for draft in drafts])
        return {
            length: fill(self, _drafts(tokenizer, str(length), count, seed), length, least=1)
            for length in lengths
        }

    def score(self, item: Item, text: str) -> float:
        """See ``Task.score``."""
        return float(first_number(text) in item.answers)


@dataclass(frozen=True)
class PublishedLines:
    """The prompts of a published file, as they are."""

    cases: tuple[Record, ...]
    name: str = NAME
    metric: Metric = "accuracy"
    max_new_tokens: int = MAX_NEW_TOKENS

    @classmethod
    def read(cls, path: Path) -> PublishedLines:
        """A published file, such as 200_lines.jsonl.

        Raises:
            SourceError: not such a file; names the line.
        """
        cases = read_records(path)
        for case in cases:
            case.text("prompt")
            case.text("correct_line")
            number = case.values.get("expected_number")
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise case.problem("expected_number", "a whole number")
        return cls(cases)

    def items(
        self,
        tokenizer: Any,
        lengths: Sequence[int],
        count: int,
        seed: int,
    ) -> Mapping[int, Sequence[Item]]:
        """See ``Task.items``; the first of the file, under the tokens of their longest prompt."""
        return under_longest([_published(tokenizer, case) for case in self.cases[:count]])

    def score(self, item: Item, text: str) -> float:
        """See ``Task.score``."""
        return float(first_number(text) in item.answers)


def _published(tokenizer: Any, case: Record) -> Item:
    prompt = case.text("prompt")
    place = prompt.find(case.text("correct_line"))
    depth = place / len(prompt) if place >= 0 else None
    return Item(encode(tokenizer, prompt), (str(case.values["expected_number"]),), depth)


def _drafts(tokenizer: Any, size: str, count: int, seed: int) -> list[Draft]:
    places = itertools.islice(depths(generator(NAME, seed, size, "depth")), count)
    return [
        functools.partial(_item, tokenizer, _Register(generator(NAME, seed, size, index)), depth)
        for index, depth in enumerate(places)
    ]


def _item(tokenizer: Any, register: _Register, depth: float, lines: int) -> Item:
    """The prompt with so many lines of the register, the one asked for after a part ``depth`` of them."""
    asked = int(depth * lines)
    records = register.first(lines)
    written = [LINE.format(name=name, value=value) for name, value in records]
    name, value = records[asked]
    text = "".join([HEADER, *written, QUESTION.format(name=name)])
    before = len(HEADER) + sum(map(len, written[:asked]))
    return Item(encode(tokenizer, text), (str(value),), before / len(text))


class _Register:
    """Names with values, as many as are asked for: a longer prompt begins with the lines of a shorter one."""

    def __init__(self, chance: random.Random) -> None:
        self._drawn: list[tuple[str, int]] = []
        self._more = _draw(chance)

    def first(self, lines: int) -> list[tuple[str, int]]:
        self._drawn += itertools.islice(self._more, max(0, lines - len(self._drawn)))
        return self._drawn[:lines]


def _draw(chance: random.Random) -> Iterator[tuple[str, int]]:
    """Distinct names, of two words as long as there are plenty, then of three, each with a value."""
    taken: set[str] = set()
    while True:
        third = [] if len(taken) < MOST_OF_TWO_WORDS else [chance.choice(ADJECTIVES)]
        name = "-".join([*third, chance.choice(ADJECTIVES), chance.choice(NOUNS)])
        if name not in taken:
            taken.add(name)
            yield name, chance.randint(1, LARGEST_VALUE)
