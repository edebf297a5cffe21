"""The prompts, collections and text windows for one model, and its answers under a scaling."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converter.errors import UsageError
from converter.evaluation.embeddings import find
from converter.evaluation.losses import by_position, masked_positions, pieces, window_losses
from converter.evaluation.results import PERPLEXITY, Bucket, Measurement, Metric
from converter.evaluation.samples import masked_tokens, next_tokens
from converter.evaluation.server import Served
from converter.evaluation.statistics import summarise
from converter.evaluation.subject import LONGEST_PROMPT, Subject
from converter.evaluation.tasks import EMBEDDED, GENERATED, TYPES, AnyTask, make_task
from converter.evaluation.tasks.task import Collection, Item, Retrieval
from converter.progress import Advance
from converter.scaling.scaling import Scaling
from converter.texts import MOST_UNKNOWN, read_windows

MULTIPLES = (1, 2, 4)
"""Multiples of the trained length that are measured by default."""

Lengths = Mapping[int, Sequence[Item] | Collection]
"""Length in tokens -> prompts, or queries and documents."""


@dataclass(frozen=True)
class Exam:
    """Prompts, collections and windows, the same for every scaling."""

    tasks: Mapping[str, AnyTask]
    """By name."""
    material: Mapping[str, Lengths]
    """By name of the task."""
    windows: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    """[windows, longest length] token ids; empty without a text."""
    lengths: tuple[int, ...] = ()
    """Lengths to measure in the windows, ascending."""

    @classmethod
    def prepare(
        cls,
        subject: Subject | Served,
        tasks: Sequence[AnyTask],
        text: Sequence[Path],
        lengths: Sequence[int],
        items: int,
        seed: int,
        say: Callable[[str], object] = str,
    ) -> Exam:
        """Draws the prompts and reads the text. What is given is measured, and nothing else.

        Without ``tasks`` and ``text``, these are the tasks without a file that the tokenizer reads. There are
        at most ``items`` prompts of each length, and windows of the longest. A seed gives the same prompts.
        ``say``: see ``read_windows``.
        """
        tokenizer, ordered = subject.tokenizer, tuple(sorted(set(lengths)))
        if not tasks and not text:
            tasks = _readable(subject, ordered[0], seed)
        _check_kinds(subject, tasks, text)
        material: dict[str, Lengths] = {
            task.name: task.items(tokenizer, ordered, items, seed) for task in tasks
        }
        exam = cls({task.name: task for task in tasks}, material, lengths=ordered)
        if text:
            exam = replace(exam, windows=read_windows(tokenizer, text, ordered[-1], items, say))
        return exam

    @property
    def tokens(self) -> int:
        """Tokens that one scaling takes."""
        asked = sum(_tokens(each) for by_length in self.material.values() for each in by_length.values())
        read = sum(pieces(self.windows, length).size for length in self._window_lengths)
        return asked + read

    @property
    def longest(self) -> int:
        """Most tokens that are read and generated at once; a server generates one after each window."""
        asked = (
            len(item.ids) + self.tasks[name].max_new_tokens
            for name, by_length in self.material.items()
            for found in by_length.values()
            for item in (() if isinstance(found, Collection) else found)
        )
        return max(*asked, 1 + max(self._window_lengths, default=0), 0)

    @property
    def text(self) -> Sequence[int]:
        """The first window's tokens, else the longest prompt's."""
        if self.windows.size:
            return [int(token) for token in self.windows[0]]
        lists = [found for by_length in self.material.values() for found in by_length.values()]
        prompts = [item.ids for found in lists if not isinstance(found, Collection) for item in found]
        return max(prompts, key=len, default=())

    @property
    def _window_lengths(self) -> tuple[int, ...]:
        return self.lengths if self.windows.size else ()

    def sliced(self, part: Callable[[int], slice]) -> Exam:
        """Keeps a part of each length's prompts and queries, and of the windows: count -> which to keep."""
        material = {
            task: {length: found[part(len(found))] for length, found in by_length.items()}
            for task, by_length in self.material.items()
        }
        return replace(self, material=material, windows=self.windows[part(len(self.windows))])

    def keeping(self, wanted: Callable[[str, int], bool]) -> Exam:
        """Keeps some tasks' prompts and queries of some lengths."""
        material = {
            task: {length: found for length, found in by_length.items() if wanted(task, length)}
            for task, by_length in self.material.items()
        }
        return replace(self, material=material)

    def only(self, measured: Sequence[Measurement]) -> Exam:
        done = {(each.task, each.length) for each in measured}
        return self.keeping(lambda task, length: (task, length) in done)

    def at_longest(self, without: Sequence[str] = ()) -> Exam:
        """Keeps each task's longest length alone, and leaves out some tasks."""
        longest = {task: max(by_length, default=0) for task, by_length in self.material.items()}
        kept = self.keeping(lambda task, length: task not in without and length == longest[task])
        return replace(kept, lengths=self.lengths[-1:])

    def fingerprint(self, task: str, length: int) -> Hashable:
        """Equal for two models if they get the same prompts or windows, token by token."""
        if task == PERPLEXITY:
            return hash(self.windows.tobytes())
        found = self.material[task][length]
        if isinstance(found, Collection):
            return hash((tuple(found.queries), tuple(found.documents)))
        return tuple(item.ids for item in found)

    def measure(
        self, subject: Subject | Served, scaling: Scaling, advance: Advance = int, *, first: bool = False
    ) -> list[Measurement]:
        """Measures all tasks at all lengths, for one model under one scaling.

        With ``first``, a task with no right answer at its shortest length stops there, if the trained length
        covers it: longer prompts would tell nothing.
        """
        trained = subject.model.trained.tokens
        found: list[Measurement] = []

        def add(task: str, metric: Metric, length: int, scores: Any, **more: Any) -> None:
            value, low, high = summarise(metric, scores)
            about = (subject.model.name, str(scaling), task, metric, length, scores, value, low, high)
            found.append(Measurement(*about, **more))

        for name, by_length in self.material.items():
            task: Any = self.tasks[name]
            for length, material in sorted(by_length.items()):
                if isinstance(material, Collection):
                    assert isinstance(subject, Subject)  # _check_kinds: it is an encoder
                    model = subject.scaled(scaling)
                    scores = find(model, subject.pooling, subject.hardware, task, material, advance)
                    depths: tuple[float | None, ...] = ()
                else:
                    prompts = [item.ids for item in material]
                    said = subject.complete(scaling, prompts, task.max_new_tokens, advance)
                    scores = tuple(task.score(item, text) for item, text in zip(material, said, strict=True))
                    depths = tuple(item.depth for item in material)
                add(name, task.metric, length, scores, depths=depths)
                if first and length == min(by_length) and length <= (trained or 0) and not any(scores):
                    break
        for length in self._window_lengths:
            means, positions = _read(subject, scaling, self.windows, length, advance)
            add(PERPLEXITY, "perplexity", length, means, positions=positions)
        return found


def _tokens(found: Sequence[Item] | Collection) -> int:
    return found.tokens if isinstance(found, Collection) else sum(len(item.ids) for item in found)


def _readable(subject: Subject | Served, length: int, seed: int) -> list[AnyTask]:
    """The tasks without a file that fit the length, and whose words the tokenizer knows."""
    if not subject.model.decoder:
        options = " or ".join(TYPES[name].option for name in EMBEDDED)
        what = f"give `text`, or queries and documents with {options}"
        raise UsageError(f"{subject.model.name} is an encoder: {what}")
    found, why = [], ""
    for name in GENERATED:
        task: Any = make_task(name)
        try:
            ids = task.items(subject.tokenizer, [length], 1, seed)[length][0].ids
        except UsageError as error:
            why = str(error).partition(";")[0]  # it names longer lengths, which tune does not take
            continue
        if ids.count(getattr(subject.tokenizer, "unk_token_id", None)) > MOST_UNKNOWN * len(ids):
            why = f"the tokenizer of {subject.model.name} does not know the words of {name}"
        else:
            found.append(task)
    if not found:
        raise UsageError(f"{why}; give `text`, or prompts of your own")
    return found


def _check_kinds(subject: Subject | Served, tasks: Sequence[AnyTask], text: Sequence[Path]) -> None:
    """Refuses tasks that are for another kind of model, and a text for an encoder that predicts none."""
    for task in tasks:
        embeds = isinstance(task, Retrieval)
        if embeds and subject.model.decoder:
            raise UsageError(
                f"the task {task.name} is for encoders, and {subject.model.name} is not one; drop it, or "
                "give an encoder"
            )
        if not embeds and not subject.model.decoder:
            raise UsageError(
                f"{subject.model.name} is an encoder and generates no text, which the task {task.name} "
                f"needs; choose one of {', '.join(EMBEDDED)}"
            )
        if embeds:
            assert isinstance(subject, Subject)  # no server opens an encoder
            _ = subject.pooling  # refused before anything is computed
    if text:
        _ = subject.mask


def _read(
    subject: Subject | Served, scaling: Scaling, windows: NDArray[np.int64], length: int, advance: Advance
) -> tuple[tuple[float, ...], tuple[Bucket, ...]]:
    """Each window's mean loss, and the loss by position, in pieces of a length."""
    cut, mask = pieces(windows, length), subject.mask
    if mask is None:
        found, first = subject.losses(scaling, next_tokens(cut), advance)[:, :-1], 1
        predicted = np.ones(found.shape, dtype=np.bool_)
    else:
        predicted, first = pieces(masked_positions(windows), length), 0
        found = subject.losses(scaling, masked_tokens(cut, predicted, mask), advance)
    return window_losses(found, predicted, len(windows)), by_position(found, predicted, first)


def default_lengths(name: str, train_length: int | None, lengths: Sequence[int]) -> Sequence[int]:
    """The lengths asked for, else multiples of the trained length; raises ``UsageError``."""
    if not lengths and train_length is None:
        raise UsageError(f"the trained length of {name} is not known; give `lengths` or `train_length`")
    wanted = lengths or [multiple * (train_length or 0) for multiple in MULTIPLES]
    for length in wanted:
        if not 2 <= length <= LONGEST_PROMPT:
            if not lengths:
                raise UsageError(
                    f"{name} would be measured at {length} tokens, from its trained length "
                    f"{train_length}; give `lengths` from 2 to {LONGEST_PROMPT}"
                )
            raise UsageError(
                f"`lengths` {length} is out of range; give numbers of tokens, 2 to {LONGEST_PROMPT}"
            )
    return wanted
