"""LongEval lines: a list of records, and a question about one of them.

From LongChat (github.com/DachengLi1/LongChat, longeval/utils.py, ``LRT-NL``): the prompts have exactly the
sentences of its published test cases, including the space at the end. The names of the lines are distinct,
and are drawn from this project's own word lists.

The publishers score the last number in a chat model's reply. A base model continues after the answer with
lines that it makes up, so the first number is scored here.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from converter.errors import UsageError
from converter.evaluation.tasks.files import LINES_TOKENS, number_is, read_lines
from converter.evaluation.tasks.records import WORDS
from converter.evaluation.tasks.task import Item, Metric, Task, TaskType
from converter.evaluation.tasks.tokens import Draft, depths, encode, fill, generator

NAME = "lines"
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

ADJECTIVES, NOUNS = WORDS["adjectives"], WORDS["nouns"]
MOST_OF_TWO_WORDS = len(ADJECTIVES) * len(NOUNS) // 2
MOST_LINES = MOST_OF_TWO_WORDS * len(ADJECTIVES)
"""Half of all possible names, so that drawing an unused one stays fast."""


@dataclass(frozen=True)
class Lines(Task):
    """Generated prompts with as many lines as fit a length, or with a given number of lines."""

    lines: int | None = None
    """Lines in each prompt, whatever its length in tokens; published files are named after this number."""
    name: str = NAME
    metric: Metric = "accuracy"
    max_new_tokens: int = LINES_TOKENS

    def __post_init__(self) -> None:
        if self.lines is not None and not 1 <= self.lines <= MOST_LINES:
            raise UsageError(f"lines: {self.lines} lines are out of range; give 1 to {MOST_LINES}")

    def items(
        self, tokenizer: Any, lengths: Sequence[int], count: int, seed: int
    ) -> Mapping[int, Sequence[Item]]:
        """See ``Task.items``; if ``lines`` is given, all prompts are listed under the longest's length."""
        if self.lines is not None:
            drafts = _drafts(tokenizer, f"{self.lines} lines", count, seed)
            items = [draft(self.lines) for draft in drafts]
            return {max(len(item.ids) for item in items): items}
        return {
            length: fill(self, _drafts(tokenizer, str(length), count, seed), length, least=1)
            for length in lengths
        }

    def score(self, item: Item, text: str) -> float:
        return number_is(text, item.answers[0])


def _drafts(tokenizer: Any, size: str, count: int, seed: int) -> list[Draft]:
    places = itertools.islice(depths(generator(NAME, seed, size, "depth")), count)
    return [
        functools.partial(_item, tokenizer, _Register(generator(NAME, seed, size, index)), depth)
        for index, depth in enumerate(places)
    ]


def _item(tokenizer: Any, register: _Register, depth: float, lines: int) -> Item:
    """The prompt with the first ``lines`` lines of the register; it asks for the one at ``depth``."""
    asked = int(depth * lines)
    records = register.first(lines)
    written = [LINE.format(name=name, value=value) for name, value in records]
    name, value = records[asked]
    text = "".join([HEADER, *written, QUESTION.format(name=name)])
    before = len(HEADER) + sum(map(len, written[:asked]))
    return Item(encode(tokenizer, text), (str(value),), before / len(text))


class _Register:
    """An endless list of names with values: a longer prompt begins with the lines of a shorter one."""

    def __init__(self, chance: random.Random) -> None:
        self._drawn: list[tuple[str, int]] = []
        self._more = _draw(chance)

    def first(self, lines: int) -> list[tuple[str, int]]:
        self._drawn += itertools.islice(self._more, max(0, lines - len(self._drawn)))
        return self._drawn[:lines]


def _draw(chance: random.Random) -> Iterator[tuple[str, int]]:
    """Distinct names with values; names have two words while plenty are left, then three."""
    taken: set[str] = set()
    while True:
        third = [] if len(taken) < MOST_OF_TWO_WORDS else [chance.choice(ADJECTIVES)]
        name = "-".join([*third, chance.choice(ADJECTIVES), chance.choice(NOUNS)])
        if name not in taken:
            taken.add(name)
            yield name, chance.randint(1, LARGEST_VALUE)


TYPES = (
    TaskType(
        name=NAME,
        prompt="as many `line NAME: REGISTER_CONTENT is <N>` as fit, and a question about one of them; or "
        "the published cases, `--lines FILE`",
        right="the first number generated",
        origin="LongEval ([LongChat](https://github.com/DachengLi1/LongChat))",
        generate=Lines,
        size_help="Lines in each prompt, instead of as many as fit.",
        read=read_lines,
        file_help="LongEval's published lines; generated by default.",
    ),
)
