"""The search: all candidates side by side at the target length, round after round, until the time is up."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from converter.errors import UsageError
from converter.evaluation.candidates import ladder
from converter.evaluation.exam import Exam, ask, read
from converter.evaluation.perplexity import read_windows
from converter.evaluation.results import PERPLEXITY
from converter.evaluation.statistics import compare
from converter.evaluation.subject import Subject
from converter.evaluation.tasks.base import Item, Task
from converter.progress import Advance
from converter.scaling import Scaling

SEARCH = 0.5
"""Part of the budget for choosing; the rest is for measuring the choice."""
FIRST_ROUND = 4
"""Prompts of each task, and windows, that every candidate gets at least."""
ENOUGH = 8
"""Prompts and windows before a candidate may be dropped."""
POOL = 100
"""Prompts of each task, and windows, for choosing, at most; and of each length for measuring."""
LEAST = 10
"""Prompts of each length for measuring, at least: fewer would say nothing."""
NONE = Scaling("none")


@dataclass(frozen=True)
class Candidate:
    """What the search found of one scaling, at the target length."""

    scaling: Scaling
    scores: tuple[float, ...] = ()
    """Of all tasks' prompts that it was given, from 0 to 1."""
    losses: tuple[float, ...] = ()
    """Of the windows, in nats a token; empty without a text."""
    dropped: bool = False
    """It fell behind and was given no more."""

    @property
    def accuracy(self) -> float | None:
        """Mean score, from 0 to 1; None without prompts."""
        return float(np.mean(self.scores)) if self.scores else None

    @property
    def loss(self) -> float | None:
        """Mean loss in nats a token, infinite if one is not a number; None without a text."""
        if not self.losses:
            return None
        mean = float(np.mean(self.losses))
        return math.inf if math.isnan(mean) else mean


class Clock:
    """What is left of the budget, and what the work costs."""

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
        """Learns from work that was done."""
        self._tokens += tokens
        self._work += seconds

    def tokens(self, seconds: float) -> float:
        """How many tokens are run in so many seconds, by what was done so far."""
        return max(seconds, 0.0) * self._tokens / self._work if self._work else math.inf


@dataclass(frozen=True)
class Pool:
    """Prompts and windows: some to choose by, others to measure the choice."""

    tasks: Mapping[str, Task]
    choosing: Mapping[str, Sequence[Item]]
    """Task's name -> prompts of the target length."""
    choosing_windows: NDArray[np.int64]
    measuring: Exam
    target: int
    """Tokens of the windows, and of prompts at most: those of a file may be shorter."""

    @classmethod
    def prepare(
        cls,
        subject: Subject,
        tasks: Sequence[Task],
        text: Sequence[Path],
        trained: int,
        target: int,
        seed: int,
    ) -> Pool:
        """Draws prompts and reads the text."""
        lengths = ladder(trained, target)
        drawn = {task.name: task.items(subject.tokenizer, lengths, 2 * POOL, seed) for task in tasks}
        choosing, measuring = {}, {}
        for name, by_length in drawn.items():
            reached = {length: items for length, items in by_length.items() if length <= target}
            if not reached or max(reached) <= trained:
                raise UsageError(
                    f"{name} has no prompts between the trained length {trained} and the target {target}; "
                    "give longer ones, or another --target-length"
                )
            last = max(reached)
            if len(reached[last]) < 2:
                raise UsageError(
                    f"{name} has one prompt of length {last}, and choosing and measuring need one each; "
                    "give at least two of that length"
                )
            half = len(reached[last]) // 2
            choosing[name] = reached[last][half:]
            measuring[name] = {
                length: items[: half if length == last else POOL] for length, items in reached.items()
            }
        windows = np.empty((0, 0), dtype=np.int64)
        if text:
            windows = read_windows(subject.tokenizer, text, target, 2 * POOL)
            if len(windows) < 2:
                raise UsageError(f"--text has only one window of {target} tokens; give twice as much text")
        half = len(windows) // 2
        exam = Exam(measuring, {task.name: task for task in tasks}, windows[:half], tuple(lengths))
        return cls(exam.tasks, choosing, windows[half:], exam, target)

    def tokens(self, start: int, end: int) -> int:
        """Tokens that a round runs for one candidate: those of the prompts and windows that there are."""
        prompts = (item for items in self.choosing.values() for item in items[start:end])
        return sum(len(item.ids) for item in prompts) + self.choosing_windows[start:end].size


def search(
    subject: Subject, pool: Pool, scalings: Sequence[Scaling], clock: Clock, advance: Advance
) -> list[Candidate]:
    """Rounds at the target length, until the time, or what there is to ask, is used up."""
    found = [Candidate(scaling) for scaling in scalings]
    done = 0
    available = max([len(pool.choosing_windows), *(len(items) for items in pool.choosing.values())])
    size, told = FIRST_ROUND, 0
    while size > 0 and done < available:
        for number, candidate in enumerate(found):
            if not candidate.dropped:
                started = time.monotonic()
                found[number] = _round(subject, pool, candidate, done, done + size)
                clock.note(pool.tokens(done, done + size), time.monotonic() - started)
                now = min(round(clock.elapsed), round(clock.budget * SEARCH))
                advance(now - told)
                told = now
        done += size
        if done >= ENOUGH:
            found = _drop(found)
        # As much again as was done, or the part of it that there is time for.
        again = pool.tokens(done, 2 * done) * sum(not each.dropped for each in found)
        size = int(done * min(1.0, clock.tokens(clock.left(SEARCH)) / max(1, again)))
    return found


def _round(subject: Subject, pool: Pool, candidate: Candidate, start: int, end: int) -> Candidate:
    """The candidate with the next prompts and windows answered."""
    model, hardware = subject.scaled(candidate.scaling), subject.hardware
    scores, losses = candidate.scores, candidate.losses
    for name, items in pool.choosing.items():
        if items[start:end]:
            scores += ask(model, subject.tokenizer, hardware, pool.tasks[name], items[start:end])
    if len(pool.choosing_windows[start:end]):
        losses += read(model, hardware, pool.choosing_windows[start:end], pool.target)[0]
    return replace(candidate, scores=scores, losses=losses)


def _drop(found: Sequence[Candidate]) -> list[Candidate]:
    """Without those that are behind the best by every measure, and not by chance. None always stays."""
    left = [each for each in found if not each.dropped]
    best = [max(left, key=_score), min(left, key=_loss)]

    def behind(each: Candidate) -> bool:
        pairs = [("accuracy", each.scores, best[0].scores), (PERPLEXITY, each.losses, best[1].losses)]
        versus = [compare(metric, ours, theirs) for metric, ours, theirs in pairs if ours]
        return all(found.loses for found in versus)

    return [replace(each, dropped=each.dropped or (each.scaling != NONE and behind(each))) for each in found]


def _score(candidate: Candidate) -> float:
    return candidate.accuracy or 0.0


def _loss(candidate: Candidate) -> float:
    return math.inf if candidate.loss is None else candidate.loss


def finalists(found: Sequence[Candidate]) -> dict[str, Scaling]:
    """The best by each measure; of equals the first, which is the mildest."""
    left = [each for each in found if not each.dropped]
    best = {}
    if left[0].scores:
        best["retrieval"] = max(left, key=_score).scaling
    if left[0].losses:
        best[PERPLEXITY] = min(left, key=_loss).scaling
    return best
