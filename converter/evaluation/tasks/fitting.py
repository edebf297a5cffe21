"""Prompts in tokens: encoding a text, and filling a length without exceeding it.

Tokenizers are not additive: a text may have fewer tokens than its parts, or more. So every prompt is
counted as a whole, and estimates only say where to look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from converter.errors import SourceError, UsageError
from converter.evaluation.tasks.base import Item, Task

PROBE = 64
"""Units of the first attempt, whose tokens tell those of one unit."""
MOST_UNITS = 8
"""For each token there is room for; words and lines take one or more, of a tokenizer that knows them."""

Draft = Callable[[int], Item]
"""A prompt by its number of units, such as lines: more of them make it longer."""


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """A prompt's tokens, with those that the tokenizer adds, but open at its end.

    Some tokenizers append an end-of-sequence token to every text. A model that saw it would begin a new
    text instead of an answer.

    Raises:
        SourceError: the tokenizer makes nothing of the text.
    """
    # verbose: transformers would warn of texts beyond the trained length, which are the point here.
    ids = tokenizer(text, verbose=False)["input_ids"]
    end = tokenizer.eos_token
    if end and ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(end):
        ids = ids[:-1]
    if not ids:
        raise SourceError(f"the tokenizer makes no token of the prompt {text[:40]!r}")
    return tuple(ids)


def under_longest(items: Sequence[Item]) -> Mapping[int, Sequence[Item]]:
    """Prompts that have lengths of their own, all under the tokens of the longest."""
    return {max(len(item.ids) for item in items): items} if items else {}


def fill(task: Task, drafts: Sequence[Draft], length: int, least: int) -> list[Item]:
    """Each draft with as many units as fit.

    Args:
        task: its name and the tokens of an answer.
        drafts: one an item.
        length: tokens that prompt and answer together may take.
        least: units without which a prompt makes no sense.

    Raises:
        UsageError: a draft does not fit even with ``least`` units, or no number of them fills the
            length.
    """
    shortest = task.max_new_tokens + max((len(draft(least).ids) for draft in drafts), default=0)
    if length < shortest:
        raise too_short(task, length, shortest)
    return [_fullest(task, draft, length, least) for draft in drafts]


def too_short(task: Task, length: int, least: int) -> UsageError:
    """What to say of a length into which a prompt of ``task`` does not fit."""
    return UsageError(
        f"{task.name} does not fit into {length} tokens; give longer lengths (at least {least}), "
        "or other --tasks"
    )


def _fullest(task: Task, draft: Draft, length: int, least: int) -> Item:
    """The draft with the most units that fit; ``least`` of them are known to.

    One unit more would not fit. The search goes by the tokens that are left and those of a unit so far, and
    halves the interval where that leads out of it.
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
