"""Generated prompts that hide a number: passkey retrieval, and LongEval lines.

Passkey: Mohtashami and Jaggi, "Landmark Attention", 2023 (arXiv 2305.16300), with the sentences of their code
(github.com/epfml/landmark-attention, llama/run_test.py). Their code uses keys from 1 to 50000 and cuts the
filler at any character; here every key has five digits, and the filler ends with a whole word.

Lines: from LongChat (github.com/DachengLi1/LongChat, longeval/utils.py, ``LRT-NL``): the prompts have exactly
the sentences of its published test cases, including the space at the end. The names of the lines are drawn
from this project's own word lists. The publishers score the last number in a chat model's reply. A base model
continues after the answer with lines that it makes up, so the first number is scored here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from converter.evaluation.tasks.files import LINES_TOKENS, number_is, read_lines
from converter.evaluation.tasks.records import WORDS
from converter.evaluation.tasks.task import Item, Metric, Task, TaskType
from converter.evaluation.tasks.tokens import depths, encode, fill, generator

PASSKEY_TOKENS = 10
"""As published; five digits and a space take at most six tokens."""
INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KEY = "The pass key is {key}. Remember it. {key} is the pass key."
KEY_QUESTION = "What is the pass key? The pass key is"

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
LARGEST_VALUE = 50_000
ADJECTIVES, NOUNS = WORDS["adjectives"], WORDS["nouns"]
MOST_OF_TWO_WORDS = len(ADJECTIVES) * len(NOUNS) // 2
"""Half of all possible names, so that drawing an unused one stays fast."""

Writer = Callable[[int], tuple[str, int, int]]
"""Number of units, such as lines -> text, the number in it, and the characters before what holds it."""


@dataclass(frozen=True)
class HiddenNumber(Task):
    """Prompts that hide a number at depths spread evenly; right is the first number in the continuation."""

    name: str
    max_new_tokens: int
    least: int
    """Fewest units of a prompt."""
    write: Callable[[Random, float], Writer]
    """Chance, and the depth at which the number is -> prompts of any size."""
    metric: Metric = "accuracy"

    def items(
        self, tokenizer: Any, lengths: Sequence[int], count: int, seed: int
    ) -> Mapping[int, Sequence[Item]]:
        return {length: self._items(tokenizer, length, count, seed) for length in lengths}

    def score(self, item: Item, text: str) -> float:
        return number_is(text, item.answers[0])

    def _items(self, tokenizer: Any, length: int, count: int, seed: int) -> list[Item]:
        def draft(write: Writer, units: int) -> Item:
            text, number, before = write(units)
            return Item(encode(tokenizer, text), (str(number),), before / len(text))

        places = itertools.islice(depths(generator(self.name, seed, length, "depth")), count)
        drafts = [
            partial(draft, self.write(generator(self.name, seed, length, index), depth))
            for index, depth in enumerate(places)
        ]
        return fill(self, drafts, length, self.least)


def passkey(chance: Random, depth: float) -> Writer:
    """The units are words of filler; the key stands after the fraction ``depth`` of them."""
    key = chance.randrange(10_000, 100_000)

    def write(words: int) -> tuple[str, int, int]:
        before = int(depth * words)
        start = f"{INTRODUCTION}\n{_filler(before)}\n"
        return f"{start}{KEY.format(key=key)}\n{_filler(words - before)}\n{KEY_QUESTION}", key, len(start)

    return write


def _filler(words: int) -> str:
    return " ".join(itertools.islice(itertools.cycle(FILLER.split()), words))


def lines(chance: Random, depth: float) -> Writer:
    """The units are lines, of which the one at ``depth`` is asked for; more lines begin like fewer."""
    drawn: list[tuple[str, int]] = []
    more = _records(chance)

    def write(count: int) -> tuple[str, int, int]:
        drawn.extend(itertools.islice(more, max(0, count - len(drawn))))
        written = [LINE.format(name=name, value=value) for name, value in drawn[:count]]
        asked = int(depth * count)
        name, value = drawn[asked]
        text = "".join([HEADER, *written, QUESTION.format(name=name)])
        return text, value, len(HEADER) + sum(map(len, written[:asked]))

    return write


def _records(chance: Random) -> Iterator[tuple[str, int]]:
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
        name="passkey",
        prompt="a five-digit key in repeated filler text, at depths spread evenly",
        right="the first number generated",
        origin="[Mohtashami and Jaggi, 2023](https://arxiv.org/abs/2305.16300)",
        generate=partial(HiddenNumber, "passkey", PASSKEY_TOKENS, 0, passkey),
    ),
    TaskType(
        name="lines",
        prompt="as many `line NAME: REGISTER_CONTENT is <N>` as fit, and a question about one of them; or "
        "the published cases, `--lines FILE`",
        right="the first number generated",
        origin="LongEval ([LongChat](https://github.com/DachengLi1/LongChat))",
        generate=partial(HiddenNumber, "lines", LINES_TOKENS, 1, lines),
        read=read_lines,
        file_help="LongEval's published lines; generated by default.",
    ),
)
