"""Confidence intervals, and comparisons of two scalings on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from converter.evaluation.results import PERPLEXITY, Comparison

CONFIDENCE = 0.95
WORST_LOSS = 700.0
"""Nats at which a perplexity stops being a float64."""

Interval = tuple[float, float]


def summarise(metric: str, scores: Sequence[float]) -> tuple[float, float, float]:
    """The value that scores stand for, and its 95 % confidence interval.

    Accuracies, whose scores are 0 or 1, get Wilson's interval (1927), which holds for few items and near 0
    and 1; other scores Student's t, cut to [0, 1]; perplexity is exp of the mean loss, and of the
    ends of its t interval.

    Args:
        metric: "accuracy", "f1", "score" or "perplexity".
        scores: at least one; of perplexity, losses in nats a token.
    """
    mean = float(np.mean(scores))
    if metric == PERPLEXITY:
        low, high = t_interval(scores)
        return _exp(mean), _exp(low), _exp(high)
    if set(scores) <= {0.0, 1.0}:
        interval = stats.binomtest(int(sum(scores)), len(scores)).proportion_ci(CONFIDENCE, method="wilson")
        return mean, float(interval.low), float(interval.high)
    low, high = t_interval(scores)
    return mean, max(low, 0.0), min(high, 1.0)


def compare(metric: str, scores: Sequence[float], baseline: Sequence[float]) -> Comparison:
    """A scaling's scores against a baseline's on the same items, in the same order.

    The interval is Student's t over the items' differences. ``p`` is the exact two-sided sign test over the
    items that differ, which for accuracies is McNemar's.
    """
    differences = np.asarray(scores, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    below, above = int((differences < 0).sum()), int((differences > 0).sum())
    better, worse = (below, above) if metric == PERPLEXITY else (above, below)
    p = float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0
    mean, (low, high) = float(differences.mean()), t_interval(differences)
    if metric == PERPLEXITY:
        mean, low, high = _exp(mean), _exp(low), _exp(high)
    return Comparison(mean, low, high, better, worse, p)


def t_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """95 % confidence interval of a mean by Student's t; without end if there is one value only."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return -math.inf, math.inf
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * float(stats.sem(values))
    return mean - half, mean + half


def _exp(loss: float) -> float:
    return math.inf if loss > WORST_LOSS else math.exp(loss)
