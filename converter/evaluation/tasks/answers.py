"""Finds the answer in a continuation."""

from __future__ import annotations

import re

_NUMBER = re.compile("[0-9]+")


def first_number(text: str) -> str | None:
    """The digits of the first number in ``text``, without leading zeros; None if there is no number."""
    found = _NUMBER.search(text)
    return None if found is None else found.group().lstrip("0") or "0"


def words(text: str) -> list[str]:
    """The words of ``text`` in lower case; every character except letters and digits separates words."""
    return "".join(letter if letter.isalnum() else " " for letter in text.lower()).split()


def starts_with(text: str, answer: str) -> bool:
    """Whether ``text``, after leading space, begins with ``answer`` and not with a longer word or number."""
    text = text.lstrip()
    return text.startswith(answer) and not text[len(answer) : len(answer) + 1].isalnum()
