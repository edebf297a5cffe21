"""Products of parameters: ``make test`` runs a part of each, and ``make test-slow`` the rest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest

GOLDEN = (5**0.5 - 1) / 2


def quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """The values as parameters; all but the chosen ones are slow tests."""
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.slow) for value in values]


def dealt(first: Iterable[Any], *others: Iterable[Any], each: int = 4) -> list[Any]:
    """Every combination of the parameters; all but ``each`` for each of ``first`` are slow tests.

    The combinations of ``others`` are dealt out like cards: each combination runs with some of ``first``, and
    each of ``first`` with several combinations. Families share the code of slopes, caches and kernels, so a
    mistake there shows with any family; a mistake of one family shows in most of its combinations.
    """
    rows, cards = [*first], [*itertools.product(*others)]
    each = max(each, -(-len(cards) // len(rows)))
    # Such a step visits all of them, and neighbours differ in most parameters.
    step = next(step for step in itertools.count(int(GOLDEN * len(cards))) if math.gcd(step, len(cards)) == 1)
    cards = [cards[number * step % len(cards)] for number in range(len(cards))]
    result = []
    for row, value in enumerate(rows):
        now = {(row * each + number) % len(cards) for number in range(each)}
        for number, card in enumerate(cards):
            result.append(pytest.param(value, *card, marks=[] if number in now else pytest.mark.slow))
    return result
