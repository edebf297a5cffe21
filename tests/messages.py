"""What messages must say: the words that a user needs, and never how a sentence is worded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

Words = str | tuple[str, ...]
"""What a message must have: a word, or several, all of them and in any order."""


def says(message: object, *words: Words) -> None:
    """Fails if one of the words is not in the message, which may be an error."""
    for word in words:
        if isinstance(word, tuple):
            says(message, *word)
        else:
            assert word in str(message), f"{word!r} is not in {str(message)!r}"


@contextmanager
def raises(
    error: type[BaseException] | tuple[type[BaseException], ...], *words: Words
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """``pytest.raises`` for an error that says all of these words."""
    with pytest.raises(error) as raised:
        yield raised
    says(raised.value, *words)


def errors(err: str) -> str:
    """What a run said, without the lines of stages that took long, as on a busy machine ("verifying ...").

    A line feed, after the terminal's ^C, comes before an error.
    """
    said = [line for line in err.splitlines() if line and not line.endswith(" ...")]
    return "\n".join(said)
