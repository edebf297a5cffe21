"""Products of parameters, of which only some combinations run."""

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


def dealt(first: Iterable[Any], *others: Iterable[Any], each: int = 1) -> list[Any]:
    """Every combination of ``others`` with some of ``first``, and each of ``first`` with ``each`` or more.

    They are dealt out like cards. Families share the code of slopes, caches and kernels, so a mistake there
    shows with any family; a mistake of one family shows in most of its combinations.
    """
    rows, cards = [*first], [*itertools.product(*others)]
    each = min(max(each, -(-len(cards) // len(rows))), len(cards))
    # Such a step visits all of them, and neighbours differ in most parameters.
    step = next(step for step in itertools.count(int(GOLDEN * len(cards))) if math.gcd(step, len(cards)) == 1)
    hands = [range(row * each, (row + 1) * each) for row in range(len(rows))]
    return [
        pytest.param(value, *cards[number * step % len(cards)])
        for value, hand in zip(rows, hands, strict=True)
        for number in hand
    ]
