"""The prompts, collections and text windows for one model, and its answers under a scaling."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converter.errors import UsageError
from converter.evaluation import masked, perplexity
from converter.evaluation.agreement import MEASURES, agreement
from converter.evaluation.embeddings import Vectors, embed, find
from converter.evaluation.results import PERPLEXITY, Bucket, Measurement, Metric
from converter.evaluation.runner import complete, losses, masked_losses
from converter.evaluation.statistics import summarise
from converter.evaluation.subject import Subject
from converter.evaluation.tasks import EMBEDDED, AnyTask
from converter.evaluation.tasks.base import Collection, Ids, Item, Retrieval, Task
from converter.evaluation.tasks.neighbours import Neighbours
from converter.progress import Advance
from converter.scaling.scaling import UNSCALED, Scaling
from converter.texts.windows import read_windows

MULTIPLES = (1, 2, 4)
"""Multiples of the trained length that are measured by default."""
LONGEST = 1 << 24
"""Most tokens in a prompt: building a longer one would take all memory."""


@dataclass(frozen=True)
class Exam:
    """Prompts, collections and windows, the same for every scaling."""

    prompts: Mapping[str, Mapping[int, Sequence[Item]]]
    """Name of the task -> length -> prompts."""
    tasks: Mapping[str, Any]
    """Name -> task; each is an ``AnyTask``."""
    windows: NDArray[np.int64]
    """[windows, longest length] token ids; empty without a text."""
    lengths: tuple[int, ...]
    """Lengths to measure in the windows, ascending."""
    collections: Mapping[str, Mapping[int, Collection]] = field(default_factory=dict)
    """Name of the task -> length -> queries and documents."""
    texts: Sequence[Ids] = ()
    """Texts whose neighbours are compared with those of the unscaled model."""
    reference: Vectors | None = None
    """The unscaled model's embeddings of these texts; see ``referred``."""

    @classmethod
    def prepare(
        cls,
        subject: Subject,
        tasks: Sequence[AnyTask],
        text: Sequence[Path],
        lengths: Sequence[int],
        items: int,
        seed: int,
    ) -> Exam:
        """Draws the prompts and reads the text.

        Args:
            subject: the model, for its tokenizer and trained length.
            tasks: the tasks.
            text: UTF-8 files.
            lengths: tokens of prompts with their answers, and of windows.
            items: most prompts of each length, and most windows of the longest length.
            seed: the same seed gives the same prompts.

        Raises:
            UsageError: a length is too short for a prompt, the text is too short for one window, or a task
                is for another kind of model.
            UnsupportedModel: the model's embeddings are made in a way that is not computed here, or a text
                is given for an encoder that does not predict masked tokens.
            SourceError: a task's file cannot be used.
        """
        check_kinds(subject, tasks, text)
        tokenizer, ordered = subject.tokenizer, tuple(sorted(set(lengths)))
        prompts: dict[str, Mapping[int, Sequence[Item]]] = {}
        collections: dict[str, Mapping[int, Collection]] = {}
        texts: list[Ids] = []
        for task in tasks:
            if isinstance(task, Retrieval):
                collections[task.name] = task.collections(tokenizer, ordered, items, seed)
            elif isinstance(task, Neighbours):
                texts += task.texts(tokenizer, subject.trained.tokens or ordered[0])
            else:
                prompts[task.name] = task.items(tokenizer, ordered, items, seed)
        windows = np.empty((0, 0), dtype=np.int64)
        if text:
            windows = read_windows(tokenizer, text, ordered[-1], items)
        named = {task.name: task for task in tasks}
        return cls(prompts, named, windows, ordered, collections, texts)

    @property
    def tokens(self) -> int:
        """Tokens that one scaling takes."""
        asked = sum(
            len(item.ids) for task in self.prompts.values() for items in task.values() for item in items
        )
        embedded = sum(found.tokens for task in self.collections.values() for found in task.values())
        read = sum(perplexity.pieces(self.windows, length).size for length in self._window_lengths)
        return asked + embedded + sum(map(len, self.texts)) + read

    @property
    def _window_lengths(self) -> tuple[int, ...]:
        return self.lengths if self.windows.size else ()

    def cut(self, part: float, least: int) -> Exam:
        """Keeps a part (0 to 1) of each length's prompts and of the windows, but at least ``least`` each."""

        def kept(count: int) -> int:
            return max(least, int(part * count))

        collections = {
            task: {length: found.part(0, kept(len(found.queries))) for length, found in by_length.items()}
            for task, by_length in self.collections.items()
        }
        prompts = {
            task: {length: items[: kept(len(items))] for length, items in by_length.items()}
            for task, by_length in self.prompts.items()
        }
        windows = self.windows[: kept(len(self.windows))]
        return replace(self, prompts=prompts, windows=windows, collections=collections)

    def fingerprint(self, task: str, length: int) -> Hashable:
        """Equal for two models if they get the same prompts, texts or windows, token by token."""
        if task == PERPLEXITY:
            return hash(self.windows.tobytes())
        if task in self.prompts:
            return tuple(item.ids for item in self.prompts[task][length])
        if task in self.collections:
            found = self.collections[task][length]
            return hash((tuple(found.queries), tuple(found.documents)))
        return hash(tuple(self.texts))

    def referred(self, subject: Subject) -> Exam:
        """The exam with the unscaled model's embeddings, if any texts are compared with them."""
        if not self.texts:
            return self
        model = subject.scaled(UNSCALED)
        return replace(self, reference=embed(model, subject.pooling, subject.hardware, self.texts))

    def measure(self, subject: Subject, scaling: Scaling, advance: Advance) -> list[Measurement]:
        """Measures all tasks at all lengths, for one model under one scaling."""
        model = subject.scaled(scaling)
        found: list[Measurement] = []

        def add(task: str, metric: Metric, length: int, scores: tuple[float, ...], **more: Any) -> None:
            value, low, high = summarise(metric, scores)
            measured = Measurement(
                subject.name, str(scaling), task, metric, length, scores, value, low, high, **more
            )
            found.append(measured)

        for task in self.tasks.values():
            for length, items in sorted(self.prompts.get(task.name, {}).items()):
                started = time.monotonic()
                scores = ask(subject, model, task, items, advance)
                speed = sum(len(item.ids) for item in items) / (time.monotonic() - started)
                depths = tuple(item.depth for item in items)
                add(task.name, task.metric, length, scores, depths=depths, tokens_per_second=speed)
            for length, texts in sorted(self.collections.get(task.name, {}).items()):
                started = time.monotonic()
                scores = find(model, subject.pooling, subject.hardware, task, texts, advance)
                speed = texts.tokens / (time.monotonic() - started)
                depths = tuple(texts.depths)
                add(task.name, task.metric, length, scores, depths=depths, tokens_per_second=speed)
        if self.texts:
            started = time.monotonic()
            vectors = embed(model, subject.pooling, subject.hardware, self.texts, advance)
            speed = sum(map(len, self.texts)) / (time.monotonic() - started)
            assert self.reference is not None
            longest = max(map(len, self.texts))
            for measure, scores in zip(MEASURES, agreement(vectors, self.reference), strict=True):
                add(measure, "score", longest, scores, tokens_per_second=speed)
        for length in self._window_lengths:
            started = time.monotonic()
            means, positions = read(subject, model, self.windows, length, advance)
            speed = self.windows.size / (time.monotonic() - started)
            add(PERPLEXITY, "perplexity", length, means, positions=positions, tokens_per_second=speed)
        return found


def check_kinds(subject: Subject, tasks: Sequence[AnyTask], text: Sequence[Path]) -> None:
    """Refuses tasks that are for another kind of model, and a text for an encoder that predicts none.

    Raises:
        UsageError, UnsupportedModel: see ``Exam.prepare``.
    """
    for task in tasks:
        embeds = isinstance(task, Retrieval | Neighbours)
        if embeds and subject.recipe.decoder:
            raise UsageError(
                f"the task {task.name} is for encoders, and {subject.name} is not one; drop it, or give an "
                "encoder"
            )
        if not embeds and not subject.recipe.decoder:
            raise UsageError(
                f"{subject.name} is an encoder and generates no text, which the task {task.name} needs; "
                f"choose one of {', '.join(EMBEDDED)}"
            )
        if embeds:
            _ = subject.pooling  # refused before anything is computed
    if text:
        _ = subject.mask


def ask(
    subject: Subject, model: Any, task: Task, items: Sequence[Item], advance: Advance = int
) -> tuple[float, ...]:
    """A score for each item, from 0 to 1."""
    prompts = [item.ids for item in items]
    texts = complete(model, subject.tokenizer, subject.hardware, prompts, task.max_new_tokens, advance)
    return tuple(task.score(item, text) for item, text in zip(items, texts, strict=True))


def read(
    subject: Subject, model: Any, windows: NDArray[np.int64], length: int, advance: Advance = int
) -> tuple[tuple[float, ...], tuple[Bucket, ...]]:
    """Cuts windows into pieces of ``length``; returns each window's mean loss, and the loss by position.

    A decoder predicts every token from those before it, an encoder masked ones from all others.
    """
    cut, mask = perplexity.pieces(windows, length), subject.mask
    if mask is None:
        found = losses(model, subject.hardware, cut, advance)
        return perplexity.window_losses(found, len(windows)), perplexity.by_position(found)
    chosen = perplexity.pieces(masked.masked_positions(windows), length)
    found = masked_losses(model, subject.hardware, cut, chosen, mask, advance)
    return masked.window_losses(found, chosen, len(windows)), masked.by_position(found, chosen)


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
