"""The prompts and text windows for one model, and its answers under a scaling."""

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
"""Multiples of the trained length that are measured by default."""
LONGEST = 1 << 24
"""Most tokens in a prompt: building a longer one would take all memory."""


@dataclass(frozen=True)
class Exam:
    """Prompts and windows, the same for every scaling."""

    prompts: Mapping[str, Mapping[int, Sequence[Item]]]
    """Name of the task -> length -> prompts."""
    tasks: Mapping[str, Task]
    windows: NDArray[np.int64]
    """[windows, longest length] token ids; empty without a text."""
    lengths: tuple[int, ...]
    """Lengths to measure in the windows, ascending."""

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
            tokenizer: the model's tokenizer, from transformers.
            tasks: the tasks.
            text: UTF-8 files.
            lengths: tokens of prompts with their answers, and of windows.
            items: most prompts of each length, and most windows of the longest length.
            seed: the same seed gives the same prompts.

        Raises:
            UsageError: a length is too short for a prompt, or the text is too short for one window.
            SourceError: a task's file cannot be used.
        """
        ordered = tuple(sorted(set(lengths)))
        prompts = {task.name: task.items(tokenizer, ordered, items, seed) for task in tasks}
        windows = np.empty((0, 0), dtype=np.int64)
        if text:
            windows = perplexity.read_windows(tokenizer, text, ordered[-1], items)
        return cls(prompts, {task.name: task for task in tasks}, windows, ordered)

    @property
    def tokens(self) -> int:
        """Tokens that one scaling takes."""
        asked = sum(
            len(item.ids) for task in self.prompts.values() for items in task.values() for item in items
        )
        return asked + sum(perplexity.pieces(self.windows, length).size for length in self._window_lengths)

    @property
    def _window_lengths(self) -> tuple[int, ...]:
        return self.lengths if self.windows.size else ()

    def cut(self, part: float, least: int) -> Exam:
        """Keeps a part (0 to 1) of each length's prompts and of the windows, but at least ``least`` each."""

        def kept(count: int) -> int:
            return max(least, int(part * count))

        prompts = {
            task: {length: items[: kept(len(items))] for length, items in by_length.items()}
            for task, by_length in self.prompts.items()
        }
        return replace(self, prompts=prompts, windows=self.windows[: kept(len(self.windows))])

    def fingerprint(self, task: str, length: int) -> Hashable:
        """Equal for two models if they get the same prompts or windows, token by token."""
        if task == PERPLEXITY:
            return hash(self.windows.tobytes())
        return tuple(item.ids for item in self.prompts[task][length])

    def measure(
        self, model: Any, tokenizer: Any, hardware: Hardware, name: str, scaling: str, advance: Advance
    ) -> list[Measurement]:
        """Measures all tasks at all lengths, for one model under one scaling."""
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
    """Cuts windows into pieces of ``length``; returns each window's mean loss, and the loss by position."""
    found = losses(model, hardware, perplexity.pieces(windows, length), advance)
    return perplexity.window_losses(found, len(windows)), perplexity.by_position(found)


def default_lengths(name: str, train_length: int | None, lengths: Sequence[int]) -> Sequence[int]:
    """The lengths asked for, or multiples of the trained length.

    Raises:
        UsageError: no lengths are given and the trained length is not known, or a length is out of range.
    """
    if not lengths and train_length is None:
        raise UsageError(f"the trained length of {name} is not known; give `lengths` or `train_length`")
    wanted = lengths or [multiple * (train_length or 0) for multiple in MULTIPLES]
    for length in wanted:
        if not 2 <= length <= LONGEST:
            raise UsageError(f"`lengths` {length} is out of range; give numbers of tokens, 2 to {LONGEST}")
    return wanted
