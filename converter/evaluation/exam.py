"""What one model is asked, and its answers under a scaling."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converter.errors import UsageError
from converter.evaluation import perplexity
from converter.evaluation.hardware import Hardware
from converter.evaluation.results import PERPLEXITY, Bucket, Measurement
from converter.evaluation.runner import complete, losses
from converter.evaluation.statistics import summarise
from converter.evaluation.tasks.base import Item, Task
from converter.progress import Advance

MULTIPLES = (1, 2, 4)
"""Of the trained length: the lengths that are measured unless others are asked for."""
LONGEST = 1 << 24
"""Tokens of a prompt, at most: beyond that, making it would take all memory."""


@dataclass(frozen=True)
class Exam:
    """Prompts and windows, the same for every scaling."""

    prompts: Mapping[str, Mapping[int, Sequence[Item]]]
    """Task's name -> length -> its prompts."""
    tasks: Mapping[str, Task]
    windows: NDArray[np.int64]
    """[windows, longest length] token ids; empty without a text."""
    lengths: tuple[int, ...]
    """Of the windows, ascending."""

    @classmethod
    def prepare(
        cls,
        tokenizer: Any,
        tasks: Sequence[Task],
        text: Sequence[Path],
        lengths: Sequence[int],
        items: int,
        seed: int,
    ) -> Exam:
        """Draws the prompts and reads the text.

        Args:
            tokenizer: transformers' of the model.
            tasks: what is asked.
            text: UTF-8 files.
            lengths: tokens of prompts with their answers, and of windows.
            items: prompts of each length, and windows of the longest, at most.
            seed: the same seed gives the same prompts.

        Raises:
            UsageError: a length that fits no prompt, or a text too short for one window.
            SourceError: a task's file that cannot be used.
        """
        ordered = tuple(sorted(set(lengths)))
        prompts = {task.name: task.items(tokenizer, ordered, items, seed) for task in tasks}
        windows = np.empty((0, 0), dtype=np.int64)
        if text:
            windows = perplexity.read_windows(tokenizer, text, ordered[-1], items)
        return cls(prompts, {task.name: task for task in tasks}, windows, ordered)

    @property
    def tokens(self) -> int:
        """Tokens that are run for one scaling."""
        asked = sum(
            len(item.ids) for task in self.prompts.values() for items in task.values() for item in items
        )
        return asked + sum(perplexity.pieces(self.windows, length).size for length in self._window_lengths)

    @property
    def _window_lengths(self) -> tuple[int, ...]:
        return self.lengths if self.windows.size else ()

    def cut(self, part: float, least: int) -> Exam:
        """A part, from 0 to 1, of each length's prompts and of the windows; ``least`` of them at least."""

        def kept(count: int) -> int:
            return max(least, int(part * count))

        prompts = {
            task: {length: items[: kept(len(items))] for length, items in by_length.items()}
            for task, by_length in self.prompts.items()
        }
        return replace(self, prompts=prompts, windows=self.windows[: kept(len(self.windows))])

    def fingerprint(self, task: str, length: int) -> Hashable:
        """Equal for two models if they are asked the same, token by token."""
        if task == PERPLEXITY:
            return hash(self.windows.tobytes())
        return tuple(item.ids for item in self.prompts[task][length])

    def measure(
        self, model: Any, tokenizer: Any, hardware: Hardware, name: str, scaling: str, advance: Advance
    ) -> list[Measurement]:
        """All tasks at all lengths, of one model under one scaling."""
        found = []
        for task in self.tasks.values():
            for length, items in sorted(self.prompts[task.name].items()):
                started = time.monotonic()
                scores = ask(model, tokenizer, hardware, task, items, advance)
                seconds = time.monotonic() - started
                value, low, high = summarise(task.metric, scores)
                found.append(
                    Measurement(
                        name,
                        scaling,
                        task.name,
                        task.metric,
                        length,
                        scores,
                        value,
                        low,
                        high,
                        depths=tuple(item.depth for item in items),
                        tokens_per_second=sum(len(item.ids) for item in items) / seconds,
                    )
                )
        for length in self._window_lengths:
            started = time.monotonic()
            means, positions = read(model, hardware, self.windows, length, advance)
            seconds = time.monotonic() - started
            value, low, high = summarise(PERPLEXITY, means)
            found.append(
                Measurement(
                    name,
                    scaling,
                    PERPLEXITY,
                    "perplexity",
                    length,
                    means,
                    value,
                    low,
                    high,
                    positions=positions,
                    tokens_per_second=self.windows.size / seconds,
                )
            )
        return found


def ask(
    model: Any, tokenizer: Any, hardware: Hardware, task: Task, items: Sequence[Item], advance: Advance = int
) -> tuple[float, ...]:
    """A score for each item, from 0 to 1."""
    texts = complete(model, tokenizer, hardware, [item.ids for item in items], task.max_new_tokens, advance)
    return tuple(task.score(item, text) for item, text in zip(items, texts, strict=True))


def read(
    model: Any, hardware: Hardware, windows: NDArray[np.int64], length: int, advance: Advance = int
) -> tuple[tuple[float, ...], tuple[Bucket, ...]]:
    """The mean loss of each window, cut into pieces of ``length``, and the loss by position in the piece."""
    found = losses(model, hardware, perplexity.pieces(windows, length), advance)
    return perplexity.window_losses(found, len(windows)), perplexity.by_position(found)


def default_lengths(name: str, train_length: int | None, lengths: Sequence[int]) -> Sequence[int]:
    """The lengths asked for, or multiples of the trained length.

    Raises:
        UsageError: neither is known, or they are out of range.
    """
    if not lengths and train_length is None:
        raise UsageError(f"the trained length of {name} is not known; give --lengths, or --train-length")
    wanted = lengths or [multiple * (train_length or 0) for multiple in MULTIPLES]
    for length in wanted:
        if not 2 <= length <= LONGEST:
            raise UsageError(f"--lengths {length} is out of range; give numbers of tokens, 2 to {LONGEST}")
    return wanted
