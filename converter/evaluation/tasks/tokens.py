"""Prompts in tokens: encodes a text, fills a length without exceeding it, and draws by a seed.

Tokenizers are not additive: a text may have more or fewer tokens than the sum of its parts. So the tokens of
every prompt are counted as a whole, and estimates only guide the search.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from converter.errors import SourceError, UsageError, option
from converter.evaluation.tasks.task import Item, Task

PROBE = 64
"""Units added in the first attempt, to estimate how many tokens a unit takes."""
MOST_UNITS = 8
"""Most units per token of room. A word or line takes a token or more, unless the tokenizer cannot read it."""

GOLDEN_RATIO = (5**0.5 - 1) / 2

Draft = Callable[[int], Item]
"""Number of units, such as lines -> prompt; more units make it longer."""


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """A prompt's tokens with those that the tokenizer adds, but without an end-of-sequence token.

    Some tokenizers append that token to every text. After it, a model would begin a new text instead of an
    answer. Raises ``SourceError`` if the tokenizer makes no token of the text.
    """
    # verbose=False: transformers would warn about texts beyond the trained length, which are wanted here.
    ids = tokenizer(text, verbose=False)["input_ids"]
    end = tokenizer.eos_token
    if end and ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(end):
        ids = ids[:-1]
    if not ids:
        raise SourceError(f"the tokenizer makes no token of the prompt {text[:40]!r}")
    return tuple(ids)


def texts_in_tokens(tokenizer: Any, texts: Sequence[str], length: int) -> list[tuple[int, ...]]:
    """The tokens of texts to embed, each cut to ``length``, special tokens included."""
    found = tokenizer(list(texts), truncation=True, max_length=length, verbose=False)["input_ids"]
    for ids, text in zip(found, texts, strict=True):
        if not ids:
            raise SourceError(f"the tokenizer makes no token of the text {text[:40]!r}")
    return [tuple(ids) for ids in found]


def fill(task: Task, drafts: Sequence[Draft], length: int, least: int) -> list[Item]:
    """Fills each draft with as many units as fit into ``length`` tokens, at least ``least``.

    Raises ``UsageError`` for a length that is too short, or a tokenizer with which no number of units fills
    it.
    """
    shortest = task.max_new_tokens + max((len(draft(least).ids) for draft in drafts), default=0)
    if length < shortest:
        raise too_short(task, length, shortest)
    return [_fullest(task, draft, length, least) for draft in drafts]


def too_short(task: Task, length: int, least: int) -> UsageError:
    """The error for a length that is too short for a prompt of ``task``."""
    return UsageError(
        f"{task.name} does not fit into {length} tokens, but takes at least {least}; give other "
        f"{option.tasks}, or longer lengths"
    )


def _fullest(task: Task, draft: Draft, length: int, least: int) -> Item:
    """The draft with the most units that fit; ``least`` units are known to fit.

    The search steps by the tokens left over divided by the tokens per unit so far, and halves the interval if
    a step would leave it.
    """
    room = length - task.max_new_tokens
    best, fits = draft(least), least
    shortest = len(best.ids)
    exceeds: int | None = None
    units = least + PROBE
    while True:
        item = draft(units)
        left = room - len(item.ids)
        step = max(1, int(abs(left) * (units - least) / max(1, len(item.ids) - shortest)))
        if left >= 0:
            if units > MOST_UNITS * room:
                raise UsageError(
                    f"the tokenizer makes hardly any tokens of the prompts of {task.name}; drop that task"
                )
            best, fits, units = item, units, units + step
        else:
            exceeds, units = units, units - step
        if exceeds == fits + 1:
            return best
        if exceeds is not None and not fits < units < exceeds:
            units = (fits + exceeds) // 2


def generator(*parts: object) -> random.Random:
    """A generator of its own for each combination of task, seed, length, item, ..."""
    return random.Random("/".join(map(str, parts)))


def depths(chance: random.Random) -> Iterator[float]:
    """An endless series of depths in [0, 1); the first n are spread evenly, for any n.

    They are multiples of the golden ratio modulo 1 from a random start: each new one falls into one of the
    largest gaps between those before it (the three-gap theorem).
    """
    depth = chance.random()
    while True:
        yield depth
        depth = (depth + GOLDEN_RATIO) % 1
