"""Scores on the same items: what one scaling's say about another's, and the measurement that tells it."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping
from dataclasses import dataclass, field

from converter.evaluation.results import PERPLEXITY, Bucket, Comparison, Measurement, Metric
from converter.evaluation.statistics import compare_scores, summarise
from converter.scaling.scaling import Scaling

RETRIEVAL = "retrieval"
"""The measure of all tasks taken together; the other is ``PERPLEXITY``."""


@dataclass(frozen=True)
class TaskScores:
    """What a model scored under one scaling, on one task at one length."""

    metric: Metric
    scores: tuple[float, ...]
    """One for each item; see ``Measurement``, as for the next two."""
    items: Hashable
    """Equal for equal prompts, texts or windows in the same order, token by token."""
    depths: tuple[float | None, ...] = ()
    positions: tuple[Bucket, ...] = ()


ByTask = dict[tuple[str, int], TaskScores]
"""(task, length in tokens) -> what was scored under one scaling."""


def compare(baseline: TaskScores, candidate: TaskScores) -> Comparison | None:
    """The candidate's scores against the baseline's; None if their items are not the same."""
    if baseline.items != candidate.items:
        return None
    return compare_scores(candidate.metric, candidate.scores, baseline.scores)


def measurement(
    model: str, scaling: str, task: str, length: int, found: TaskScores, baseline: TaskScores
) -> Measurement:
    """The scores with names, an interval, and the comparison with a baseline other than themselves."""
    value, low, high = summarise(found.metric, found.scores)
    comparison = None if found is baseline else compare(baseline, found)
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


@dataclass(frozen=True)
class ScoreTable:
    """What a model scored under several scalings."""

    cells: dict[tuple[Scaling, str, int], TaskScores] = field(default_factory=dict)
    """By scaling, task and length in tokens. Two scalings may read alike, so their text would be no key."""

    def add(self, scaling: Scaling, found: ByTask) -> None:
        for (task, length), scores in found.items():
            self.cells[scaling, task, length] = scores

    def only(self, places: Container[tuple[str, int]]) -> ScoreTable:
        """The cells of some tasks at some lengths."""
        kept = {}
        for (scaling, task, length), scores in self.cells.items():
            if (task, length) in places:
                kept[scaling, task, length] = scores
        return ScoreTable(kept)

    def places(self) -> list[tuple[str, int]]:
        """All tasks and lengths, each once."""
        return list(dict.fromkeys((task, length) for _, task, length in self.cells))

    def pooled(self, scaling: Scaling, measure: str) -> TaskScores | None:
        """A scaling's scores in all cells by a measure, as those of one task; None if there are none."""
        parts = []
        for (own, task, _), scores in self.cells.items():
            if own == scaling and (task == PERPLEXITY) == (measure == PERPLEXITY):
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
        for (scaling, task, length), scores in self.cells.items():
            theirs = self.cells[baseline, task, length]
            found.append(measurement(model, names[scaling], task, length, scores, theirs))
        return found
