"""What a task is, and how the command line and the documentation offer it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Metric = Literal["accuracy", "f1", "score"]


@dataclass(frozen=True)
class Item:
    """One prompt, the same for every scaling."""

    ids: tuple[int, ...]
    """Token ids of the prompt, with the special tokens that the tokenizer adds."""
    answers: tuple[str, ...]
    """The right answers; any one is enough."""
    depth: float | None = None
    """Where in the prompt the answer is, from 0 (start) to 1 (end); None if that is not known."""


class Task(Protocol):
    """A set of prompts, and a rule for scoring their answers."""

    @property
    def name(self) -> str:
        """Name on the command line, such as "passkey"."""
        ...

    @property
    def metric(self) -> Metric:
        """The usual name of what ``score`` returns; the result is its mean over the items."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Most tokens in an answer."""
        ...

    def items(
        self, tokenizer: Any, lengths: Sequence[int], count: int, seed: int
    ) -> Mapping[int, Sequence[Item]]:
        """The prompts, by length.

        Args:
            tokenizer: the model's tokenizer, from transformers.
            lengths: most tokens that prompt and answer (``max_new_tokens``) may take together. A task whose
                prompts have fixed lengths ignores them.
            count: most prompts of each length.
            seed: the same seed gives the same prompts.

        Returns:
            Length in tokens -> prompts of at most that length.

        Raises:
            UsageError: a length is too short for a prompt of this task; the message names both.
            SourceError: the tokenizer makes no token of a prompt.
        """
        ...

    def score(self, item: Item, text: str) -> float:
        """How good a continuation is, from 0 to 1."""
        ...


@dataclass(frozen=True)
class TaskType:
    """How a task is made: the module of a task lists its own in ``TYPES``."""

    name: str
    """As in ``--tasks``, and with dashes for underscores the option that takes its file."""
    prompt: str
    """What the model is asked, for the documentation."""
    right: str
    """Which answers are right, for the documentation."""
    origin: str
    """Who published it, for the documentation."""
    generate: Callable[[], Task] | None = None
    """Makes its own prompts, of any length; None if it reads them from a file."""
    generate_sized: Callable[[int], Task] | None = None
    """The same with prompts of a given size, for ``--num-NAME``; None if there is no such option."""
    size_help: str = ""
    """Help text of that option."""
    read: Callable[[Path], Task] | None = None
    """Reads its prompts from a JSON Lines file; None if it generates them."""
    file_help: str = ""
    """Help text of the option that takes the file."""
    tunes: bool = False
    """Whether ``tune`` takes that file too."""

    @property
    def option(self) -> str:
        """The option that takes its file."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def size_option(self) -> str:
        """The option that sets the size of generated prompts."""
        return f"--num-{self.name.replace('_', '-')}"
