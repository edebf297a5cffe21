"""The text of an answer that is generated token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 8
"""Tokens of the prompt that are decoded with the first token of the answer."""


class AnswerText:
    """Turns tokens into text that can be shown, up to the first of the texts to stop at.

    A token's text depends on the token before it, and may end within a character. So the newest tokens are
    decoded together, and text is held back while a text to stop at may begin in it.

    Args:
        decode: from token ids to text.
        stop: the texts to stop at, none of them empty.
        after: the tokens of the prompt: whether an answer begins with a space depends on its last ones.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: Sequence[str] = (),
        after: Sequence[int] = (),
    ):
        self.decode = decode
        self.stop = stop
        self.stopped = False
        """Whether a text to stop at was found; it is not part of the answer."""
        self._tokens = list(after[-CONTEXT:])
        self._context = 0
        """The first of the tokens that are decoded with the next one."""
        self._done = len(self._tokens)
        """Tokens whose text is known, or not part of the answer."""
        self._held = ""

    def add(self, token: int) -> str:
        """The text that can be shown after one more token; "" within a character."""
        self._tokens.append(token)
        more = self._undecoded()
        if more.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context, self._done = self._done, len(self._tokens)
        return self._show(more)

    def end(self) -> str:
        """The rest of the text, after the last token."""
        shown = self._show(self._undecoded())
        if not self.stopped:
            shown += self._held
        self._held = ""
        return shown

    def _undecoded(self) -> str:
        """The text of the tokens that is not known yet."""
        known = self.decode(self._tokens[self._context : self._done])
        return self.decode(self._tokens[self._context :])[len(known) :]

    def _show(self, more: str) -> str:
        text = self._held + more
        found = [place for place in map(text.find, self.stop) if place >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        kept = max((beginning(text, stop) for stop in self.stop), default=0)
        shown = len(text) - kept
        self._held = text[shown:]
        return text[:shown]


def beginning(text: str, stop: str) -> int:
    """How many characters at the end of a text are the first ones of ``stop``."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
