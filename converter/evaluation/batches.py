"""Batches of token rows: what is predicted in them, and how rows of several lengths are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

IGNORE = -100
"""The target of a token after which nothing is predicted, as in torch."""
PADDING = 0
"""Token id that pads rows: masked, or after the end, where no token before it sees it."""
MASKED_SHARE = 0.15
"""Share of the tokens that are masked for a model that predicts masked tokens, as in BERT."""

Rows = Callable[[int], int]
"""Tokens in a row -> how many rows to run at once, at least 1."""
Ids = NDArray[np.int64]


class Batch(NamedTuple):
    """Rows of tokens, and what is predicted from each."""

    ids: torch.Tensor
    """int64 [rows, tokens]."""
    targets: torch.Tensor
    """int64 [rows, tokens]: the token to predict from each hidden state, or ``IGNORE``."""

    def on(self, device: torch.device) -> Batch:
        return Batch(self.ids.to(device), self.targets.to(device))


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt and its right answer."""

    ids: tuple[int, ...]
    """The prompt's tokens, then the answer's."""
    start: int
    """Where the answer starts; at least 1."""


def next_tokens(ids: Ids) -> Batch:
    """A batch in which each token [rows, tokens] is predicted from those before it."""
    targets = np.full_like(ids, IGNORE)
    targets[:, :-1] = ids[:, 1:]
    return Batch(torch.from_numpy(ids), torch.from_numpy(targets))


def masked_tokens(ids: Ids, chosen: NDArray[np.bool_], mask: int) -> Batch:
    """A batch in which the chosen tokens are masked, and predicted from all others; all [rows, tokens]."""
    masked = np.where(chosen, mask, ids)
    targets = np.where(chosen, ids, IGNORE)
    return Batch(torch.from_numpy(masked), torch.from_numpy(targets))


def answers(prompts: Sequence[AnsweredPrompt]) -> Batch:
    """A batch in which the answers' tokens are predicted; shorter rows are padded at their end."""
    ids, _ = padded([prompt.ids for prompt in prompts], torch.device("cpu"))
    targets = torch.full_like(ids, IGNORE)
    for row, prompt in enumerate(prompts):
        # The hidden state of a token predicts the next one.
        first, end = prompt.start - 1, len(prompt.ids) - 1
        targets[row, first:end] = torch.tensor(prompt.ids[prompt.start :])
    return Batch(ids, targets)


def batches_by_length(lengths: Sequence[int], rows: Rows) -> Iterator[list[int]]:
    """The places of rows of these lengths, batch by batch; the longest come first."""
    places = sorted(range(len(lengths)), key=lambda place: lengths[place])
    while places:
        longest = lengths[places[-1]]
        count = rows(longest)
        yield places[-count:]
        places = places[:-count]


def padded(
    rows: Sequence[Sequence[int]], device: torch.device, *, left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of rows, int64 [rows, longest], padded on the right; with ``left``, there."""
    longest = max(map(len, rows))
    ids = np.full((len(rows), longest), PADDING, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(rows):
        start = longest - len(tokens) if left else 0
        end = start + len(tokens)
        ids[row, start:end] = tokens
        mask[row, start:end] = 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
