"""What slopes are fitted on: windows of text of mixed lengths, or prompts with their answers.

Both keep two parts back: the descent stops by the loss of one, and the result is judged by the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from converter.evaluation.trainable import IGNORE, Batch

FILLER = 0
"""Token id that fills rows: masked, or after the end, where no token before it sees it."""
MASKED = 0.15
"""Share of the tokens that are masked for a model that predicts masked tokens, as in BERT."""

Rows = Callable[[int], int]
"""Tokens in a row -> how many rows to run at once."""
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """Windows of text; every token is predicted from those before it, or masked ones from all others."""

    learned: Ids
    """[windows, tokens], as the next two."""
    stopping: Ids
    judging: Ids
    lengths: Sequence[int]
    """Of the pieces to learn from; one is drawn for each batch."""
    rows: Rows
    mask: int | None = None
    """Token id that masks a token, for a model that predicts masked tokens."""
    name: str = "text"

    @property
    def predicted(self) -> int:
        """How many tokens there are to learn from, those that only give context aside."""
        return int(self.learned.size * (1 if self.mask is None else MASKED))

    def draw(self, rng: np.random.Generator) -> Batch:
        """A batch to learn from."""
        length = int(rng.choice(self.lengths))
        count, longest = self.rows(length), self.learned.shape[1]
        rows = rng.integers(len(self.learned), size=count)[:, None]
        starts = rng.integers(longest - length + 1, size=count)[:, None]
        return self._batch(self.learned[rows, starts + np.arange(length)], rng)

    def kept(self, items: Any) -> Sequence[Batch]:
        """Windows as batches, the same in every call."""
        rng, step = np.random.default_rng(0), self.rows(items.shape[1])
        return [self._batch(items[start : start + step], rng) for start in range(0, len(items), step)]

    def _batch(self, ids: Ids, rng: np.random.Generator) -> Batch:
        if self.mask is None:
            return next_tokens(ids)
        chosen = rng.random(ids.shape) < MASKED
        chosen[:, 0] |= ~chosen.any(axis=1)
        return masked_tokens(ids, chosen, self.mask)


@dataclass(frozen=True)
class Answered:
    """A prompt and its right answer."""

    ids: tuple[int, ...]
    """Both, as the model should go on."""
    start: int
    """Where the answer starts; at least 1."""


@dataclass(frozen=True)
class Prompts:
    """Prompts; only the tokens of the answers are predicted."""

    learned: Sequence[Answered]
    stopping: Sequence[Answered]
    judging: Sequence[Answered]
    rows: Rows
    name: str = "prompts"

    @property
    def predicted(self) -> int:
        return sum(len(each.ids) - each.start for each in self.learned)

    def draw(self, rng: np.random.Generator) -> Batch:
        """A batch to learn from: neighbours by length, so that rows need little filling."""
        shuffled = [self.learned[index] for index in rng.permutation(len(self.learned))]
        ordered = sorted(shuffled, key=lambda each: len(each.ids))
        last = int(rng.integers(len(ordered))) + 1
        return answers(ordered[max(0, last - self.rows(len(ordered[last - 1].ids))) : last])

    def kept(self, items: Any) -> Sequence[Batch]:
        """Prompts as batches, the longest first."""
        found = batches([len(each.ids) for each in items], self.rows)
        return [answers([items[place] for place in places]) for places in found]


Samples = Windows | Prompts
"""Batches to learn from, and items to stop and to judge by."""


def next_tokens(ids: Ids) -> Batch:
    """A batch in which each token [rows, tokens] is predicted from those before it."""
    targets = np.full_like(ids, IGNORE)
    targets[:, :-1] = ids[:, 1:]
    return Batch(torch.from_numpy(ids), torch.from_numpy(targets))


def masked_tokens(ids: Ids, chosen: NDArray[np.bool_], mask: int) -> Batch:
    """A batch in which the chosen tokens are masked, and predicted from all others; all [rows, tokens]."""
    targets = np.where(chosen, ids, IGNORE)
    return Batch(torch.from_numpy(np.where(chosen, mask, ids)), torch.from_numpy(targets))


def answers(prompts: Sequence[Answered]) -> Batch:
    """A batch in which the answers' tokens are predicted; shorter rows are filled at their end."""
    ids, _ = filled([each.ids for each in prompts], torch.device("cpu"))
    targets = torch.full_like(ids, IGNORE)
    for row, each in enumerate(prompts):
        targets[row, each.start - 1 : len(each.ids) - 1] = torch.tensor(each.ids[each.start :])
    return Batch(ids, targets)


def batches(lengths: Sequence[int], rows: Rows) -> Iterator[list[int]]:
    """The places of rows of these lengths, batch by batch; the longest come first."""
    left = sorted(range(len(lengths)), key=lengths.__getitem__)
    while left:
        taken = left[-rows(lengths[left[-1]]) :]
        del left[-len(taken) :]
        yield taken


def filled(
    rows: Sequence[Sequence[int]], device: torch.device, *, left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of rows, int64 [rows, longest], filled on the right, or else on the ``left``."""
    longest = max(map(len, rows))
    ids = np.full((len(rows), longest), FILLER, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(rows):
        where = slice(longest - len(tokens), None) if left else slice(len(tokens))
        ids[row, where], mask[row, where] = tokens, 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
