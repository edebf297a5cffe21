"""What a task is, and how the command line and the documentation offer it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Metric = Literal["accuracy", "f1", "score", "ndcg@10"]
MOST_OTHERS = 4
"""Most documents per query that answer none, in a part of a collection; a large corpus would take long."""


@dataclass(frozen=True)
class Item:
    """One prompt, the same for every scaling."""

    ids: tuple[int, ...]
    """Token ids of the prompt, with the special tokens that the tokenizer adds."""
    answers: tuple[str, ...]
    """The right answers; any one is enough."""
    depth: float | None = None
    """Where in the prompt the answer is, from 0 (start) to 1 (end); None if that is not known."""


class Task(ABC):
    """A set of prompts, and a rule for scoring their answers."""

    name: str
    """Name on the command line, such as "passkey"."""
    metric: Metric
    """The usual name of what ``score`` returns; the result is its mean over the items."""
    max_new_tokens: int
    """Most tokens in an answer."""

    @abstractmethod
    def items(
        self, tokenizer: Any, lengths: Sequence[int], count: int, seed: int
    ) -> Mapping[int, Sequence[Item]]:
        """The prompts, by length.

        Args:
            tokenizer: the model's tokenizer, from transformers.
            lengths: most tokens that prompt and answer (``max_new_tokens``) may take together; may be empty
                for a task with ``own_lengths``.
            count: most prompts of each length.
            seed: the same seed gives the same prompts.

        Returns:
            Length in tokens -> prompts of at most that length.

        Raises:
            UsageError: a length is too short for a prompt of this task; the message names both.
            SourceError: the tokenizer makes no token of a prompt.
        """

    @property
    def own_lengths(self) -> bool:
        """Whether the prompts have fixed lengths, so that ``items`` ignores those that it is given."""
        return False

    @property
    def stated_lengths(self) -> Sequence[int]:
        """The lengths in tokens under which all prompts are counted, if a file states them; else empty."""
        return ()

    @abstractmethod
    def score(self, item: Item, text: str) -> float:
        """How good a continuation is, from 0 to 1."""


Ids = tuple[int, ...]


@dataclass(frozen=True)
class Collection:
    """Texts for an encoder: queries, and the documents among which it has to find the relevant ones."""

    queries: Sequence[Ids]
    """Token ids of each query, with the special tokens that the tokenizer adds; as those of documents."""
    documents: Sequence[Ids]
    relevant: Sequence[Mapping[int, int]]
    """For each query: index of a relevant document -> its grade, at least 1."""
    left_out: Sequence[int | None] = ()
    """For each query, a document that is not ranked for it, because it is the query itself; or empty."""

    @property
    def tokens(self) -> int:
        return sum(map(len, (*self.queries, *self.documents)))

    def __len__(self) -> int:
        return len(self.queries)

    def __getitem__(self, part: slice) -> Collection:
        """Some of the queries, with their documents and their share of those that answer none."""
        chosen = range(len(self))[part]
        answers: set[int] = set()
        for grades in self.relevant:
            answers.update(grades)
        others = [document for document in range(len(self.documents)) if document not in answers]
        first = chosen.start * len(others) // len(self)
        last = chosen.stop * len(others) // len(self)
        wanted = set(others[first:last][: MOST_OTHERS * len(chosen)])
        for query in chosen:
            wanted.update(self.relevant[query])
        kept = sorted(wanted)
        places = {document: place for place, document in enumerate(kept)}
        relevant = []
        left_out = []
        for query in chosen:
            grades = self.relevant[query]
            relevant.append({places[document]: grade for document, grade in grades.items()})
            if self.left_out:
                own = self.left_out[query]
                left_out.append(None if own is None else places.get(own))
        return Collection(
            queries=[self.queries[query] for query in chosen],
            documents=[self.documents[document] for document in kept],
            relevant=relevant,
            left_out=left_out,
        )


class Retrieval(ABC):
    """A task for encoders: they find the documents that are relevant to a query, by their embeddings."""

    name: str
    metric: Metric
    """The usual name of what ``score`` returns; the result is its mean over the queries."""
    max_new_tokens = 0
    own_lengths = False

    @abstractmethod
    def items(
        self, tokenizer: Any, lengths: Sequence[int], count: int, seed: int
    ) -> Mapping[int, Collection]:
        """Queries and documents, by length; see ``Task.items``.

        ``lengths`` are the most tokens of a document, and ``count`` the most queries of each length, which a
        task with published queries may ignore.
        """

    @abstractmethod
    def score(self, ranked: Sequence[int], grades: Mapping[int, int]) -> float:
        """How good a ranking is, from 0 to 1; ``grades``: relevant document -> its grade.

        ``ranked`` has at least the ten best documents, best first, if there are as many.
        """


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
    generate: Callable[[], Task | Retrieval] | None = None
    """Makes its own prompts, of any length; None if it reads them from a file."""
    read: Callable[[Path], Task | Retrieval] | None = None
    """Reads its prompts from a JSON Lines file, or a folder; None if it generates them."""
    folder: bool = False
    embeds: bool = False
    """Whether it is a ``Retrieval``, for encoders; other tasks are for causal language models."""
    file_help: str = ""

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"
