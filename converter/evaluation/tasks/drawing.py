"""Seeded chance: the same seed gives the same prompts, whatever else is asked for beside them."""

from __future__ import annotations

import random
from collections.abc import Iterator

GOLDEN_RATIO = (5**0.5 - 1) / 2


def generator(*parts: object) -> random.Random:
    """A generator of its own for each combination of task, seed, length, item, ..."""
    return random.Random("/".join(map(str, parts)))


def depths(chance: random.Random) -> Iterator[float]:
    """Depths from 0 to below 1 without end; as many of the first as one takes are spread evenly.

    Multiples of the golden ratio modulo 1 from a random start: each falls into one of the largest gaps
    that those before it have left (the three-gap theorem).
    """
    depth = chance.random()
    while True:
        yield depth
        depth = (depth + GOLDEN_RATIO) % 1
