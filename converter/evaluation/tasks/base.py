"""What every task says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Metric = Literal["accuracy", "f1", "score"]


@dataclass(frozen=True)
class Item:
    """One prompt, the same for every scaling."""

    ids: tuple[int, ...]
    """The prompt in tokens, with what the tokenizer adds."""
    answers: tuple[str, ...]
    """Any of them is right."""
    depth: float | None = None
    """Where in the prompt the answer stands, 0 the start and 1 the end; None where that is not known."""


class Task(Protocol):
    """A set of prompts, and what counts as right."""

    @property
    def name(self) -> str:
        """As on the command line: "passkey"."""
        ...

    @property
    def metric(self) -> Metric:
        """What ``score`` gives, in the field's word; its mean over the items is the result."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Tokens that an answer may take."""
        ...

    def items(
        self, tokenizer: Any, lengths: Sequence[int], count: int, seed: int
    ) -> Mapping[int, Sequence[Item]]:
        """The prompts, by their length.

        Args:
            tokenizer: transformers' of the model.
            lengths: tokens that prompt and answer (``max_new_tokens``) together may take. A task whose
                prompts have lengths of their own ignores them.
            count: prompts of each length, at most.
            seed: the same seed gives the same prompts.

        Returns:
            Length in tokens -> prompts of at most that length.

        Raises:
            UsageError: a file that cannot be used, or a length into which no prompt fits; names both.
        """
        ...

    def score(self, item: Item, text: str) -> float:
        """How good a continuation is, from 0 to 1."""
        ...
