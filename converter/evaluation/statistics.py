"""Confidence intervals, and comparisons of two scalings on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from converter.evaluation.results import PERPLEXITY, Comparison

CONFIDENCE = 0.95
WORST_LOSS = 700.0
"""Loss in nats above which the perplexity counts as infinite, since it nears the largest float64."""

Interval = tuple[float, float]


def summarise(metric: str, scores: Sequence[float]) -> tuple[float, float, float]:
    """The value that summarises some scores, and its 95 % confidence interval.

    If all scores are 0 or 1, as for accuracy, the interval is Wilson's (1927), which is also valid for few
    items and near 0 and 1. Other scores get Student's t interval, cut to [0, 1]. Perplexity is exp of the
    mean loss, and its interval is exp of the ends of the t interval.

    Args:
        metric: "accuracy", "f1", "score", "ndcg@10" or "perplexity".
        scores: at least one score; for perplexity, losses in nats per token.

    Returns:
        The value, and the low and high end of its interval.
    """
    if metric == PERPLEXITY:
        losses = _losses(scores)
        low, high = t_interval(losses)
        return _exp(float(losses.mean())), _exp(low), _exp(high)
    mean = float(np.mean(scores))
    if set(scores) <= {0.0, 1.0}:
        interval = stats.binomtest(int(sum(scores)), len(scores)).proportion_ci(CONFIDENCE, method="wilson")
        return mean, float(interval.low), float(interval.high)
    low, high = t_interval(scores)
    return mean, max(low, 0.0), min(high, 1.0)


def compare(metric: str, scores: Sequence[float], baseline: Sequence[float]) -> Comparison:
    """Compares a scaling's scores with a baseline's on the same items, in the same order.

    The interval is Student's t interval of the items' differences. ``p`` comes from the exact two-sided sign
    test over the items that differ; for accuracies, this is McNemar's test. A NaN loss counts as infinite.
    """
    ours, theirs = np.asarray(scores, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if metric == PERPLEXITY:
        ours, theirs = _losses(ours), _losses(theirs)
    # Two infinite losses count as equal; subtracting them would give NaN.
    differences = np.subtract(ours, theirs, out=np.zeros(len(ours)), where=ours != theirs)
    below, above = int((differences < 0).sum()), int((differences > 0).sum())
    better, worse = (below, above) if metric == PERPLEXITY else (above, below)
    p = float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0
    mean, (low, high) = _mean(differences), t_interval(differences)
    if metric == PERPLEXITY:
        mean, low, high = _exp(mean), _exp(low), _exp(high)
    return Comparison(mean, low, high, better, worse, p)


def t_interval(values: Sequence[float] | NDArray[np.float64]) -> Interval:
    """95 % confidence interval of a mean by Student's t; infinite for a single value or an infinite mean."""
    mean = _mean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return -math.inf, math.inf
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * float(stats.sem(values))
    return mean - half, mean + half


def _losses(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Losses in nats per token; NaN, from a model that overflowed, becomes infinite."""
    losses = np.asarray(values, dtype=np.float64)
    return np.where(np.isnan(losses), math.inf, losses)


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    """The mean; NaN, without a warning, if the values hold infinities of both signs."""
    with np.errstate(invalid="ignore"):
        return float(np.mean(values))


def _exp(loss: float) -> float:
    return math.inf if loss > WORST_LOSS else math.exp(loss)
