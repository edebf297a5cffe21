"""Seeded randomness: the same seed gives the same prompts, whatever other tasks and lengths are requested."""

from __future__ import annotations

import random
from collections.abc import Iterator

GOLDEN_RATIO = (5**0.5 - 1) / 2


def generator(*parts: object) -> random.Random:
    """A separate generator for each combination of task, seed, length, item, ..."""
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
