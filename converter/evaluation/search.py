"""The search: runs all candidates at the target length, round after round, until the time is up."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converter.errors import UsageError
from converter.evaluation.candidates import ladder
from converter.evaluation.embeddings import find
from converter.evaluation.exam import Exam, ask, check_kinds, read
from converter.evaluation.results import PERPLEXITY
from converter.evaluation.statistics import compare
from converter.evaluation.subject import Subject
from converter.evaluation.tasks import AnyTask
from converter.evaluation.tasks.base import Collection, Item, Retrieval
from converter.evaluation.tasks.neighbours import Neighbours
from converter.progress import Advance
from converter.scaling.scaling import UNSCALED, Scaling
from converter.texts.windows import read_windows

SEARCH = 0.5
"""Part of the budget for choosing; the rest is for measuring the choice."""
FIRST_ROUND = 4
"""Prompts of each task, and windows, that every candidate gets in the first round."""
ENOUGH = 8
"""Prompts and windows that a candidate gets before it may be dropped."""
POOL = 100
"""Most prompts of each task, and most windows, for choosing; and most of each length for measuring."""
QUERIES = 25
"""The same of queries; each comes with documents of its length, which take the time."""
LEAST = 10
"""Fewest prompts of each length for measuring; fewer would show nothing."""


@dataclass(frozen=True)
class Candidate:
    """What the search found out about one scaling, at the target length."""

    scaling: Scaling
    scores: tuple[float, ...] = ()
    """The score of each prompt that it got, over all tasks, from 0 to 1."""
    losses: tuple[float, ...] = ()
    """The loss of each window in nats per token; empty without a text."""
    dropped: bool = False
    """Whether it fell behind and got no further prompts."""

    @property
    def accuracy(self) -> float | None:
        """Mean score, from 0 to 1; None without prompts."""
        return float(np.mean(self.scores)) if self.scores else None

    @property
    def loss(self) -> float | None:
        """Mean loss in nats per token, infinite if any loss is NaN; None without a text."""
        if not self.losses:
            return None
        mean = float(np.mean(self.losses))
        return math.inf if math.isnan(mean) else mean


class Clock:
    """Tracks what is left of the budget, and what the work costs."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        """Seconds."""
        self._started = time.monotonic()
        self._work = self._tokens = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def left(self, part: float = 1.0) -> float:
        """Seconds until a part of the budget is used up; negative after that."""
        return part * self.budget - self.elapsed

    def note(self, tokens: float, seconds: float) -> None:
        """Records how long some work took."""
        self._tokens += tokens
        self._work += seconds

    def tokens(self, seconds: float) -> float:
        """How many tokens can be run in so many seconds, at the speed so far."""
        return max(seconds, 0.0) * self._tokens / self._work if self._work else math.inf


@dataclass(frozen=True)
class Pool:
    """Prompts and windows: some for choosing, others for measuring the choice."""

    tasks: Mapping[str, Any]
    """Name -> task; each is an ``AnyTask``."""
    choosing: Mapping[str, Sequence[Item]]
    """Name of the task -> prompts of the target length."""
    choosing_windows: NDArray[np.int64]
    measuring: Exam
    target: int
    """Tokens of the windows, and most tokens of a prompt; prompts from a file may be shorter."""
    learning: Sequence[Item] = ()
    """Prompts to fit slopes to, of all tasks; they and the next windows take no other part."""
    learning_windows: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    collections: Mapping[str, Collection] = field(default_factory=dict)
    """For choosing: name of the task -> queries and documents of the target length."""

    @classmethod
    def prepare(
        cls,
        subject: Subject,
        tasks: Sequence[AnyTask],
        text: Sequence[Path],
        trained: int,
        target: int,
        seed: int,
        *,
        learn: bool = False,
    ) -> Pool:
        """Draws prompts and reads the text; with ``learn``, a third of both is for fitting slopes."""
        check_kinds(subject, tasks, text)
        if any(isinstance(task, Neighbours) for task in tasks):
            raise UsageError("no scaling can be chosen by the task neighbours; measure it with eval")
        parts = 3 if learn else 2
        lengths = ladder(trained, target)
        drawn = {
            task.name: task.items(subject.tokenizer, lengths, parts * POOL, seed)
            for task in tasks
            if not isinstance(task, Retrieval | Neighbours)
        }
        choosing, measuring = {}, {}
        learning: list[Item] = []
        halves = [
            _halves(task, task.collections(subject.tokenizer, lengths, 2 * QUERIES, seed))
            for task in tasks
            if isinstance(task, Retrieval)
        ]
        for name, by_length in drawn.items():
            reached = {length: items for length, items in by_length.items() if length <= target}
            if not reached or max(reached) <= trained:
                raise UsageError(
                    f"{name} has no prompts between the trained length {trained} and the target {target}; "
                    "give longer ones, or another `target_length`"
                )
            last = max(reached)
            if len(reached[last]) < 2:
                raise UsageError(
                    f"{name} has one prompt of length {last}, but choosing and measuring need one each; "
                    "give at least two of that length"
                )
            share = max(1, len(reached[last]) // parts)
            learned = 2 * share if learn else len(reached[last])
            choosing[name] = reached[last][share:learned]
            learning += reached[last][learned:]
            measuring[name] = {
                length: items[: share if length == last else POOL] for length, items in reached.items()
            }
        windows = np.empty((0, 0), dtype=np.int64)
        if text:
            windows = read_windows(subject.tokenizer, text, target, parts * POOL)
            if len(windows) < 2:
                raise UsageError(f"`text` has only one window of {target} tokens; give twice as much text")
        share = max(1, len(windows) // parts)
        learned = 2 * share if learn else len(windows)
        named = {task.name: task for task in tasks}
        curves = {name: measured for name, _, measured in halves}
        exam = Exam(measuring, named, windows[:share], tuple(lengths), curves)
        return cls(
            named,
            choosing,
            windows[share:learned],
            exam,
            target,
            learning,
            windows[learned:],
            {name: chosen for name, chosen, _ in halves},
        )

    @property
    def available(self) -> int:
        """The most prompts or queries of a task for choosing, or windows."""
        items = map(len, self.choosing.values())
        queries = (len(each.queries) for each in self.collections.values())
        return max([len(self.choosing_windows), *items, *queries])

    def tokens(self, start: int, end: int) -> int:
        """Tokens that a round with items ``start`` to ``end`` takes for one candidate."""
        prompts = (item for items in self.choosing.values() for item in items[start:end])
        texts = (each.part(start, end).tokens for each in self.collections.values())
        windows = self.choosing_windows[start:end]
        return sum(len(item.ids) for item in prompts) + sum(texts) + windows.size


def _halves(
    task: Retrieval, found: Mapping[int, Collection]
) -> tuple[str, Collection, dict[int, Collection]]:
    """Queries at the longest length for choosing; other queries, at all lengths, for measuring."""
    count = len(found[max(found)].queries)
    if count < 2:
        raise UsageError(f"{task.name} has one query, but choosing and measuring need one each; give more")
    measured = count // 2
    queries = min(measured, QUERIES)
    parts = {length: each.part(0, queries) for length, each in found.items()}
    return task.name, found[max(found)].part(measured, measured + QUERIES), parts


def search(
    subject: Subject, pool: Pool, scalings: Sequence[Scaling], clock: Clock, advance: Advance
) -> list[Candidate]:
    """Runs rounds at the target length until the time, or the pool of prompts and windows, is used up."""
    found = [Candidate(scaling) for scaling in scalings]
    done = 0
    size, reported = FIRST_ROUND, 0
    while size > 0 and done < pool.available:
        for number, candidate in enumerate(found):
            if not candidate.dropped:
                started = time.monotonic()
                found[number] = _round(subject, pool, candidate, done, done + size)
                clock.note(pool.tokens(done, done + size), time.monotonic() - started)
                now = min(round(clock.elapsed), round(clock.budget * SEARCH))
                advance(now - reported)
                reported = now
        done += size
        if done >= ENOUGH:
            found = _drop(found)
        # Double the items, or add as many as there is time for.
        again = pool.tokens(done, 2 * done) * sum(not each.dropped for each in found)
        size = int(done * min(1.0, clock.tokens(clock.left(SEARCH)) / max(1, again)))
    return found


def _round(subject: Subject, pool: Pool, candidate: Candidate, start: int, end: int) -> Candidate:
    """The candidate with the results of the next prompts and windows added."""
    model = subject.scaled(candidate.scaling)
    scores, losses = candidate.scores, candidate.losses
    for name, items in pool.choosing.items():
        if items[start:end]:
            scores += ask(subject, model, pool.tasks[name], items[start:end])
    for name, texts in pool.collections.items():
        if texts.queries[start:end]:
            part = texts.part(start, end)
            scores += find(model, subject.pooling, subject.hardware, pool.tasks[name], part)
    if len(pool.choosing_windows[start:end]):
        losses += read(subject, model, pool.choosing_windows[start:end], pool.target)[0]
    return replace(candidate, scores=scores, losses=losses)


def _drop(found: Sequence[Candidate]) -> list[Candidate]:
    """Drops candidates that are significantly behind the best by every measure; "none" always stays."""
    left = [each for each in found if not each.dropped]
    best = [max(left, key=_score), min(left, key=_loss)]

    def behind(each: Candidate) -> bool:
        pairs = [("accuracy", each.scores, best[0].scores), (PERPLEXITY, each.losses, best[1].losses)]
        versus = [compare(metric, ours, theirs) for metric, ours, theirs in pairs if ours]
        return all(found.loses for found in versus)

    return [
        replace(each, dropped=each.dropped or (each.scaling != UNSCALED and behind(each))) for each in found
    ]


def _score(candidate: Candidate) -> float:
    return candidate.accuracy or 0.0


def _loss(candidate: Candidate) -> float:
    return math.inf if candidate.loss is None else candidate.loss


def finalists(found: Sequence[Candidate]) -> dict[str, Scaling]:
    """The best candidate by each measure; among equals the first, which is the mildest."""
    left = [each for each in found if not each.dropped]
    best = {}
    if left[0].scores:
        best["retrieval"] = max(left, key=_score).scaling
    if left[0].losses:
        best[PERPLEXITY] = min(left, key=_loss).scaling
    return best
