"""LongEmbed's synthetic tasks: one document among many holds the answer to a short query.

Zhu et al., "LongEmbed", 2024 (arXiv 2404.12096; github.com/dwzhu-pku/LongEmbed, README): for each length from
256 to 32768 tokens, 50 queries and 100 documents, half of which answer none. Passkeys belong to persons, and
the filler is the same in every document. A needle is a fact in an essay, and the query a question about it.
The score is accuracy@1, which equals the published nDCG@1. The sentences here are this project's own, so
values can be compared with each other but not with the published ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from converter.evaluation.tasks.records import WORDS
from converter.evaluation.tasks.task import Collection, Item, Metric, Retrieval, TaskType
from converter.evaluation.tasks.tokens import depths, fill, generator, texts_in_tokens

PER_QUERY = 2
"""Documents per query, as published."""
LONGEST = 1 << 24
"""Tokens without a limit."""
SLACK = 0.02
"""Part of a length that a document may leave unused; to fill it to the last word would take longer."""
_GIVEN = """
Ada Bruno Clara Dario Edith Felix Greta Hugo Irene Jonas Karin Leo Mara Nils Olga Pablo Quentin Rosa Simon
Tilda Ugo Vera Walter Xenia Yusuf Zoe
"""
_FAMILY = """
Abbott Barlow Castell Dorn Ekman Farrow Gruber Hallam Ibsen Jarvis Keller Lindqvist Moreau Novak Ortega Pryce
Quist Rossi Sandoval Thorne Ueda Vance Wexler Yates Zeller
"""
NAMES = [f"{given} {family}" for given in _GIVEN.split() for family in _FAMILY.split()]
MEADOW = (
    "The meadow is wide. A path leads to the river. Clouds pass over the hills. The mill has stopped. "
    "Somebody left a gate open."
)


@dataclass(frozen=True)
class LongEmbed(Retrieval):
    """Documents of a length that hold one sentence each, and queries for half of these sentences."""

    name: str
    pairs: Callable[[Random, int], list[tuple[str, str]]]
    """At most so many different queries, each with the sentence that answers it."""
    filler: Callable[[Random], Callable[[int], list[str]]]
    """Number of words -> that many words of one document; more words begin like fewer."""
    metric: Metric = "accuracy"

    def items(
        self, tokenizer: Any, lengths: Sequence[int], count: int, seed: int
    ) -> Mapping[int, Collection]:
        return {length: self._collection(tokenizer, length, count, seed) for length in lengths}

    def score(self, ranked: Sequence[int], grades: Mapping[int, int]) -> float:
        return float(ranked[0] in grades)

    def _collection(self, tokenizer: Any, length: int, count: int, seed: int) -> Collection:
        chance = generator(self.name, seed, length)
        pairs = self.pairs(chance, PER_QUERY * count)
        places = list(itertools.islice(depths(generator(self.name, seed, length, "depth")), len(pairs)))
        queries = texts_in_tokens(tokenizer, [query for query, _ in pairs], LONGEST)
        drafts = [
            partial(_item, tokenizer, answer, place, self.filler(chance))
            for (_, answer), place in zip(pairs, places, strict=True)
        ]
        documents = fill(self, drafts, length, least=0, slack=int(SLACK * length))
        asked = len(pairs) // PER_QUERY
        return Collection(
            queries=queries[:asked],
            documents=[document.ids for document in documents],
            relevant=[{number: 1} for number in range(asked)],
            depths=places[:asked],
        )


def _item(tokenizer: Any, answer: str, depth: float, filler: Callable[[int], list[str]], words: int) -> Item:
    """A document with so many words of filler, and the answer after the fraction ``depth`` of them."""
    text = filler(words)
    before = int(depth * words)
    whole = " ".join([*text[:before], answer, *text[before:]])
    return Item(texts_in_tokens(tokenizer, [whole], LONGEST)[0], (answer,), depth)


def passkeys(chance: Random, count: int) -> list[tuple[str, str]]:
    """Who has which passkey? Only the name tells the documents apart."""
    names = chance.sample(NAMES, min(count, len(NAMES)))
    keys = ((name, chance.randrange(10_000, 100_000)) for name in names)
    return [
        (
            f"What is the passkey of {name}?",
            f"The passkey of {name} is {key}. Remember it. {key} is the passkey of {name}.",
        )
        for name, key in keys
    ]


def meadow(_: Random) -> Callable[[int], list[str]]:
    """The same sentences again and again."""
    return lambda words: list(itertools.islice(itertools.cycle(MEADOW.split()), words))


def needles(chance: Random, count: int) -> list[tuple[str, str]]:
    """Facts."""
    facts = [(question, answer) for question, answer in WORDS["facts"]]
    return chance.sample(facts, min(count, len(facts)))


def hay(chance: Random) -> Callable[[int], list[str]]:
    """An essay about other things: the sentences in a new order in each round and document."""
    drawing = Random(chance.random())
    found: list[str] = []

    def words(count: int) -> list[str]:
        while len(found) < count:
            for sentence in drawing.sample(WORDS["sentences"], len(WORDS["sentences"])):
                found.extend(sentence.split())
        return found[:count]

    return words


TYPES = (
    TaskType(
        name="longembed_passkey",
        prompt="whose passkey? 50 queries, 100 documents that differ in a name and a key",
        right="the document comes first",
        origin="[LongEmbed](https://arxiv.org/abs/2404.12096)",
        generate=partial(LongEmbed, "longembed_passkey", passkeys, meadow),
        embeds=True,
    ),
    TaskType(
        name="longembed_needle",
        prompt="a question about a fact; 50 queries, 100 essays that hold one fact each",
        right="the document comes first",
        origin="LongEmbed",
        generate=partial(LongEmbed, "longembed_needle", needles, hay),
        embeds=True,
    ),
)
