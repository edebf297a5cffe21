"""Passkey retrieval: a number hidden in filler text.

Mohtashami and Jaggi, "Landmark Attention", 2023 (arXiv 2305.16300), with the sentences of their code
(github.com/epfml/landmark-attention, llama/run_test.py). Their code uses keys from 1 to 50000 and cuts the
filler at any character; here every key has five digits, the filler ends with a whole word, and the depths are
spread evenly.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from converter.evaluation.tasks.files import number_is
from converter.evaluation.tasks.task import Item, Metric, Task, TaskType
from converter.evaluation.tasks.tokens import depths, encode, fill, generator

INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KEY = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"


@dataclass(frozen=True)
class Passkey(Task):
    """An answer is right if the first number in the continuation is the key."""

    name: str = "passkey"
    metric: Metric = "accuracy"
    max_new_tokens: int = 10
    """As published; five digits and a space take at most six tokens."""

    def items(
        self, tokenizer: Any, lengths: Sequence[int], count: int, seed: int
    ) -> Mapping[int, Sequence[Item]]:
        return {length: self._items(tokenizer, length, count, seed) for length in lengths}

    def score(self, item: Item, text: str) -> float:
        return number_is(text, item.answers[0])

    def _items(self, tokenizer: Any, length: int, count: int, seed: int) -> list[Item]:
        chance = generator(self.name, seed, length)
        drafts = [
            functools.partial(_item, tokenizer, chance.randrange(10_000, 100_000), depth)
            for depth in itertools.islice(depths(generator(self.name, seed, length, "depth")), count)
        ]
        return fill(self, drafts, length, least=0)


def _item(tokenizer: Any, key: int, depth: float, words: int) -> Item:
    """The prompt with so many words of filler, and the key after the fraction ``depth`` of them."""
    before = int(depth * words)
    start = f"{INTRODUCTION}\n{_filler(before)}\n"
    text = f"{start}{KEY.format(key=key)}\n{_filler(words - before)}\n{QUESTION}"
    return Item(encode(tokenizer, text), (str(key),), len(start) / len(text))


def _filler(words: int) -> str:
    return " ".join(itertools.islice(itertools.cycle(FILLER.split()), words))


TYPES = (
    TaskType(
        name="passkey",
        prompt="a five-digit key in repeated filler text, at depths spread evenly",
        right="the first number generated",
        origin="[Mohtashami and Jaggi, 2023](https://arxiv.org/abs/2305.16300)",
        generate=Passkey,
    ),
)
