"""Damages JSON values and bytes at random."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

NAN, INFINITY = float("nan"), float("inf")
DEEP: list[Any] = []
for _ in range(60):
    DEEP = [DEEP]
TEXTS = (
    "",
    "x",
    "0",
    "\x00",
    "\n\x1b[2Jerror: forged",
    "\ud800",
    "é" * 300,
    "x" * 100_000,
    "../../outside/secret.json",
    "/etc/passwd",
    "nobody/nothing--module.Class",
    "module.Class",
    "{{ 1 }}",
    "%s%n",
)
NUMBERS = (0, -1, 1, 3, 7, 1 << 16, 1 << 24, 1 << 31, 1 << 63, 10**30, 10**299, -(10**299))
FLOATS = (0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, NAN, INFINITY, -INFINITY)
OTHERS = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    [{}],
    {"": None},
    {"type": []},
    [0] * 5000,
    ["x"] * 5000,
    DEEP,
)
NASTY: tuple[Any, ...] = (*TEXTS, *NUMBERS, *FLOATS, *OTHERS)
TOKENS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
)
TOKENS += (
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 400,
    b"[" * 70,
    b'{"a":' * 70,
    b"null",
    b"\n",
    b"\r",
    b"\xef\xbb\xbf",
)


def worse(value: Any, rng: Random, pool: list[tuple[str, Any]] | None = None) -> Any:
    """A copy of a JSON value with one to four places changed.

    Args:
        value: the value to copy; it is not modified.
        rng: the random generator.
        pool: meaningful keys and values to insert too.
    """
    result = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 4))):
        parent, key = _place(result, rng)
        if parent is None:
            return nasty(rng)
        choice = rng.random()
        if choice < 0.15 and isinstance(parent, dict):
            del parent[key]
        elif choice < 0.35 and isinstance(parent, dict) and pool:
            name, other = rng.choice(pool)
            parent[name] = copy.deepcopy(other)
        elif choice < 0.45 and isinstance(parent, dict) and pool:
            parent[rng.choice(pool)[0]] = nasty(rng)
        elif choice < 0.5 and isinstance(parent, dict):
            parent[rng.choice(TEXTS)] = nasty(rng)
        elif choice < 0.55:
            parent[key] = rng.choice(([parent[key]], {"x": parent[key]}, [parent[key]] * 2))
        elif choice < 0.65 and isinstance(parent[key], (int, float)):
            parent[key] = rng.choice(
                (
                    -parent[key],
                    parent[key] + 1,
                    parent[key] * 2,
                    float(min(parent[key], 1e300)),
                    str(parent[key]),
                )
            )
        else:
            parent[key] = nasty(rng)
    return result


def nasty(rng: Random) -> Any:
    """A value that code rarely expects."""
    return copy.deepcopy(rng.choice(NASTY))


def worse_bytes(content: bytes, rng: Random) -> bytes:
    """``content`` with one to four changes: cut, inserted, repeated or with a flipped bit."""
    result = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(result) + 1)
        end = min(len(result), at + rng.choice((1, 1, 2, 8, 64)))
        choice = rng.randrange(5)
        if choice == 0:
            result[at:] = b""
        elif choice == 1:
            result[at:end] = b""
        elif choice == 2:
            result[at:at] = rng.choice(TOKENS)
        elif choice == 3:
            result[at:at] = result[at:end] * rng.choice((1, 2, 100))
        elif at < len(result):
            result[at] ^= 1 << rng.randrange(8)
    return bytes(result)


def dumps(value: Any) -> bytes:
    """JSON in Python's lenient form, with NaN and lone surrogates."""
    return json.dumps(value).encode()


def _place(value: Any, rng: Random) -> tuple[Any, Any]:
    """A random place in a JSON value: the object or list that contains it, and its key or index there."""
    parent, key = None, None
    while isinstance(value, (dict, list)) and value and (parent is None or rng.random() < 0.6):
        parent, key = (
            value,
            rng.choice(sorted(value)) if isinstance(value, dict) else rng.randrange(len(value)),
        )
        value = parent[key]
    return parent, key
