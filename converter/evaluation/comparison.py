"""Scores by scaling, task and length, and the one comparison of a candidate's scores with a baseline's.

Only scores on the same items are compared. ``evaluate`` and ``tune`` do so here. A fit compares losses of
answers by their probability, which takes another test: ``paired_test``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from converter.evaluation.results import PERPLEXITY, Bucket, Comparison, Measurement, Metric, Verdict
from converter.evaluation.statistics import compare_scores, gain_to_show, items_for, summarise
from converter.scaling.scaling import Scaling

RETRIEVAL = "retrieval"
"""The measure of all tasks taken together; the other is ``PERPLEXITY``."""


@dataclass(frozen=True)
class TaskScores:
    """What a model scored under one scaling, on one task at one length."""

    metric: Metric
    scores: tuple[float, ...]
    """One for each item; see ``Measurement``."""
    items: Hashable
    """Equal for equal prompts, texts or windows in the same order, token by token."""
    vectors: str | None = None
    """A digest of the embeddings that were ranked; None for tasks without any."""
    depths: tuple[float | None, ...] = ()
    """See ``Measurement``."""
    positions: tuple[Bucket, ...] = ()
    """See ``Measurement``."""


@dataclass(frozen=True)
class Conclusion:
    """What a comparison with the baseline shows, and how many items would show more."""

    verdict: Verdict
    comparison: Comparison
    items: int
    gain: float
    """The gain that ``needed`` items would show: in the mean score, or 1 minus a ratio of perplexities."""
    needed: int
    seen: float
    """The gain that was seen, as ``gain``; negative for a loss. Few items may show a large one by chance."""
    needed_for_seen: int | None
    """How many items would show a gain of ``seen``: more than there are. None if nothing was gained."""


Scores = dict[tuple[str, int], TaskScores]
"""What was scored under one scaling: (task, length in tokens) -> scores."""


def compare(baseline: TaskScores, candidate: TaskScores) -> Comparison | None:
    """The candidate's scores against the baseline's; None if their items are not the same."""
    if baseline.items != candidate.items:
        return None
    return compare_scores(candidate.metric, candidate.scores, baseline.scores)


def conclude(baseline: TaskScores, candidate: TaskScores) -> Conclusion:
    """Whether the candidate helps, does not, or whether these items, which must be the same, cannot tell."""
    comparison = compare(baseline, candidate)
    assert comparison is not None
    items = len(candidate.scores)
    verdict = comparison.verdict(candidate.metric, items)
    gain, needed = gain_to_show(candidate.metric, candidate.scores, baseline.scores)
    seen = comparison.difference
    if candidate.metric == PERPLEXITY:
        seen = 1 - seen
    needed_for_seen = None
    if 0 < seen < math.inf:
        needed_for_seen = items_for(candidate.metric, candidate.scores, baseline.scores, seen)
    return Conclusion(verdict, comparison, items, gain, needed, seen, needed_for_seen)


def measurement(
    model: str, scaling: str, task: str, length: int, found: TaskScores, baseline: TaskScores
) -> Measurement:
    """The scores with names, an interval, and the comparison with a baseline other than themselves."""
    value, low, high = summarise(found.metric, found.scores)
    comparison = None if found is baseline else compare(baseline, found)
    if comparison is not None and _computed_the_same(baseline, found):
        comparison = replace(comparison, low=-math.inf, high=math.inf, shows="same")
    return Measurement(
        model=model,
        scaling=scaling,
        task=task,
        metric=found.metric,
        length=length,
        scores=found.scores,
        value=value,
        low=low,
        high=high,
        depths=found.depths,
        positions=found.positions,
        comparison=comparison,
    )


def _computed_the_same(baseline: TaskScores, candidate: TaskScores) -> bool:
    """Whether vectors or losses of the same items are equal; equal scores of answers may be chance."""
    if candidate.metric == PERPLEXITY:
        return candidate.scores == baseline.scores
    return candidate.vectors is not None and candidate.vectors == baseline.vectors


class Cell(NamedTuple):
    """A place in a ``ScoreTable``."""

    scaling: Scaling
    """The scaling itself: two of them may read alike, so their text would be no key."""
    task: str
    length: int
    """In tokens."""


@dataclass
class ScoreTable:
    """What a model scored under several scalings, all on the same items."""

    cells: dict[Cell, TaskScores] = field(default_factory=dict)

    def add(self, scaling: Scaling, found: Scores) -> None:
        for (task, length), scores in found.items():
            self.cells[Cell(scaling, task, length)] = scores

    def without(self, tasks: Sequence[str]) -> ScoreTable:
        """Leaves out some tasks."""
        return ScoreTable({cell: scores for cell, scores in self.cells.items() if cell.task not in tasks})

    def at_length(self, length: int) -> ScoreTable:
        """Keeps one length alone."""
        return ScoreTable({cell: scores for cell, scores in self.cells.items() if cell.length == length})

    def at_longest(self) -> ScoreTable:
        """Keeps each task's longest length alone."""
        longest: dict[str, int] = {}
        for cell in self.cells:
            longest[cell.task] = max(cell.length, longest.get(cell.task, 0))
        kept = {cell: scores for cell, scores in self.cells.items() if cell.length == longest[cell.task]}
        return ScoreTable(kept)

    def lengths(self) -> set[int]:
        """All lengths, in tokens."""
        return {cell.length for cell in self.cells}

    def pooled(self, scaling: Scaling, measure: str) -> TaskScores | None:
        """A scaling's scores in all cells by a measure, as those of one task; None if there are none.

        ``metric`` is that of the first task: comparing them takes only that perplexity is another thing.
        """
        parts = []
        for cell, scores in self.cells.items():
            by_perplexity = cell.task == PERPLEXITY
            if cell.scaling == scaling and by_perplexity == (measure == PERPLEXITY):
                parts.append(scores)
        if not parts:
            return None
        return TaskScores(
            metric=parts[0].metric,
            scores=tuple(score for part in parts for score in part.scores),
            items=tuple(part.items for part in parts),
        )

    def compared(self, baseline: Scaling, candidate: Scaling, measure: str) -> Comparison | None:
        """A candidate's pooled scores against the baseline's; None if there are none by this measure."""
        ours = self.pooled(candidate, measure)
        theirs = self.pooled(baseline, measure)
        if ours is None or theirs is None:
            return None
        return compare(theirs, ours)

    def measurements(self, model: str, baseline: Scaling, names: Mapping[Scaling, str]) -> list[Measurement]:
        """All cells with their names, each compared with the baseline's of its task and length."""
        found = []
        for cell, scores in self.cells.items():
            theirs = self.cells[Cell(baseline, cell.task, cell.length)]
            found.append(measurement(model, names[cell.scaling], cell.task, cell.length, scores, theirs))
        return found
