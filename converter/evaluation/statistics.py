"""Confidence intervals, paired tests of scores on the same items, and the power of such a test."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from converter.evaluation.results import (
    FEWEST,
    FEWEST_WINDOWS,
    PERPLEXITY,
    SIGNIFICANT,
    WORTH,
    WORTH_RATIO,
    Comparison,
    Shown,
    exp_of,
)

CONFIDENCE = 0.95
DRAWS, SIGNS_AT_ONCE = 9999, 1 << 20
"""Random signs of a permutation test for all items, and signs in memory at a time."""
ROUNDING = 1e-12
"""Relative difference of sums that is rounding: equal changes, added in another order, are equal."""
POWER = 0.8
"""The chance that ``needed`` items show the gain."""
IGNORED = 1e-9
"""Chance of the numbers of differing prompts at each end that ``chance_to_show`` leaves out."""

Interval = tuple[float, float]
QUANTILES = float(stats.norm.isf((1 - CONFIDENCE) / 2) + stats.norm.ppf(POWER))
"""How many standard errors a gain must be for ``POWER``."""


def summarise(metric: str, scores: Sequence[float]) -> tuple[float, float, float]:
    """The value that summarises at least one score, and its 95 % confidence interval.

    If all scores are 0 or 1, as for accuracy, the interval is Wilson's (1927), which is also valid for few
    items and near 0 and 1. Other scores get Student's t interval, cut to [0, 1]. Scores of perplexity are
    losses in nats per token: it is exp of the mean loss, and its interval exp of the ends of the t interval.
    """
    if metric == PERPLEXITY:
        losses = _losses(scores)
        low, high = t_interval(losses)
        return exp_of(float(losses.mean())), exp_of(low), exp_of(high)
    mean = float(np.mean(scores))
    if set(scores) <= {0.0, 1.0}:
        interval = stats.binomtest(int(sum(scores)), len(scores)).proportion_ci(CONFIDENCE, method="wilson")
        return mean, float(interval.low), float(interval.high)
    low, high = t_interval(scores)
    return mean, max(low, 0.0), min(high, 1.0)


def compare_scores(metric: str, scores: Sequence[float], baseline: Sequence[float]) -> Comparison:
    """Compares a candidate's scores with a baseline's on the same items, in the same order.

    Where items are right or wrong, ``p`` comes from the exact two-sided sign test over the items that differ,
    which is McNemar's test, and the interval is that of ``paired_interval``. Other scores and losses are
    judged by their mean: the interval is Student's t interval of the items' differences, and ``p`` the larger
    of the p of the paired t test and of ``permutation_p``. So a significant difference has an interval that
    leaves out no change. Losses of fewer than ``FEWEST_WINDOWS`` windows show nothing, if they are finite. A
    NaN loss counts as infinite; where a difference is not finite, ``p`` is that of the sign test.
    """
    differences = _differences(metric, scores, baseline)
    gains = -differences if metric == PERPLEXITY else differences
    better, worse = int((gains > 0).sum()), int((gains < 0).sum())
    gain = _mean(gains)
    right_or_wrong = metric != PERPLEXITY and _right_or_wrong(differences)
    infinite = not np.isfinite(differences).all()

    if right_or_wrong:
        low, high = paired_interval(better, worse, len(gains))
    else:
        low, high = t_interval(differences)

    if right_or_wrong or infinite:
        p = _sign_p(better, worse)
        telling = (
            better - worse
        ) * gain > 0  # not if most items and the mean disagree, as for one infinite loss
    else:
        p = max(_t_p(differences), permutation_p(differences))
        telling = metric != PERPLEXITY or len(gains) >= FEWEST_WINDOWS

    shows: Shown = "nothing"
    if p < SIGNIFICANT and telling:
        shows = "gain" if gain > 0 else "loss"

    mean = _mean(differences)
    if metric == PERPLEXITY:
        return Comparison(exp_of(mean), exp_of(low), exp_of(high), better, worse, p, shows)
    return Comparison(mean, max(low, -1.0), min(high, 1.0), better, worse, p, shows)


def permutation_p(changes: NDArray[np.float64]) -> float:
    """p of the two-sided permutation test of a mean change (Fisher 1935), float64 [items], all finite.

    The changes keep their sizes and get random signs. All combinations of signs are tried if there are at
    most ``DRAWS``, else so many drawn ones, always the same, and the changes' own (Phipson and Smyth 2010).
    The memory does not grow with the number of items.
    """
    count, total = len(changes), changes.sum()
    least = abs(total) * (1 - ROUNDING)
    if 2**count <= DRAWS:
        signs = 1 - 2 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
        return float(np.mean(abs(signs @ changes) >= least))
    rng, extreme = np.random.default_rng(0), 1
    rows = max(1, SIGNS_AT_ONCE // count)
    for start in range(0, DRAWS, rows):
        kept = rng.integers(2, size=(min(rows, DRAWS - start), count), dtype=np.int8)
        extreme += int(np.sum(abs(2 * (kept @ changes) - total) >= least))
    return extreme / (DRAWS + 1)


def paired_interval(better: int, worse: int, items: int) -> Interval:
    """95 % confidence interval of the difference of two accuracies on the same items.

    The difference is (2 s - 1) d: d is the share of the items that differ, and s the share of these that got
    better. Both have Clopper and Pearson's exact interval (1934), and the ends here are the extremes of the
    product. So the interval leaves out 0 exactly if McNemar's exact test gives p < 0.05. It never has width
    zero, and covers the true difference in at least 95 % of all samples (tested by enumeration).
    """
    least_better, most_better = _clopper_pearson(better, better + worse)
    fewest, most = _clopper_pearson(better + worse, items)
    low, high = 2 * least_better - 1, 2 * most_better - 1
    low *= fewest if low > 0 else most
    high *= most if high > 0 else fewest
    return low, high


def gain_to_show(metric: str, scores: Sequence[float], baseline: Sequence[float]) -> tuple[float, int]:
    """A gain that more items would show, and how many items that takes: always more than there are.

    The gain is that which is worth a scaling (``WORTH``, for perplexity 1 minus ``WORTH_RATIO``), halved as
    long as these items would have shown it already.
    """
    differences = _differences(metric, scores, baseline)
    gain = 1 - WORTH_RATIO if metric == PERPLEXITY else WORTH
    needed = _needed(metric, differences, gain)
    while needed <= len(scores):
        gain /= 2
        needed = _needed(metric, differences, gain)
    return gain, needed


def items_for(metric: str, scores: Sequence[float], baseline: Sequence[float], gain: float) -> int:
    """How many items would show a gain, if they differ as these do: always more than there are.

    ``gain`` is in the mean score, or 1 minus a ratio of perplexities.
    """
    return max(_needed(metric, _differences(metric, scores, baseline), gain), len(scores) + 1)


def items_to_show(spread: float, gain: float) -> int:
    """About how many items show a mean gain in ``POWER`` of all trials, if they differ by ``spread``.

    That is the size for a normal mean, and ``FEWEST`` more: an exact test of few items needs as many.
    """
    return FEWEST + math.ceil((QUANTILES * spread / gain) ** 2)


def larger_gain_to_show(spread: float, gain: float, items: int) -> tuple[float, int]:
    """A mean gain that more than so many items would show, and how many: see ``items_to_show``.

    ``gain`` is halved as long as so many items would have shown it already.
    """
    needed = items_to_show(spread, gain)
    while spread > 0 and needed <= items:
        gain /= 2
        needed = items_to_show(spread, gain)
    return gain, max(needed, items + 1)


def fewest_shown(items: int) -> int | None:
    """How many items must get better, while the others stay, to show it in ``POWER`` of all trials.

    Each gets better with the same chance, and ``FEWEST`` must. None for fewer items than that.
    """
    for count in range(FEWEST, items + 1):
        if stats.binom.sf(FEWEST - 1, items, count / items) >= POWER:
            return count
    return None


def power_text(items: int, what: str) -> str:
    """What so many items can show, in words; ``what`` they are."""
    shown = fewest_shown(items)
    if shown is None:
        return f"{items} {what}, too few to show anything"
    return f"{items} {what}, enough to show that {shown} of them get better"


def prompts_to_show(better: float, worse: float) -> int:
    """The fewest prompts with which the sign test shows a gain in ``POWER`` of all trials.

    A prompt gets better with the chance ``better``, and worse with the smaller one ``worse``.
    """
    low, high = 0, FEWEST
    while chance_to_show(high, better, worse) < POWER:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if chance_to_show(middle, better, worse) < POWER:
            low = middle
        else:
            high = middle
    return high


def chance_to_show(items: int, better: float, worse: float) -> float:
    """The chance that the sign test of so many prompts shows a gain; see ``prompts_to_show``.

    How many prompts differ is random too: this is the sum over their number.
    """
    share = better + worse
    fewest, most = stats.binom.ppf((IGNORED, 1 - IGNORED), items, share)
    differing = np.arange(fewest, most + 1)
    critical = stats.binom.isf((1 - CONFIDENCE) / 2, differing, 0.5)
    shown = stats.binom.sf(critical, differing, better / share)
    return float(stats.binom.pmf(differing, items, share) @ shown)


def t_interval(values: Sequence[float] | NDArray[np.float64]) -> Interval:
    """95 % confidence interval of a mean by Student's t; infinite without a spread or a finite mean."""
    mean = _mean(values)
    if len(values) < 2 or not math.isfinite(mean) or np.ptp(values) == 0:
        return -math.inf, math.inf
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * float(stats.sem(values))
    return mean - half, mean + half


def _needed(metric: str, differences: NDArray[np.float64], gain: float) -> int:
    """How many items would most likely show a gain, if they differ as these do."""
    count = len(differences)
    if metric != PERPLEXITY and _right_or_wrong(differences):
        share = max(gain, _clopper_pearson(int((differences != 0).sum()), count)[1])
        return prompts_to_show((share + gain) / 2, (share - gain) / 2)
    spread = float(np.std(differences, ddof=1)) if count > 1 and np.isfinite(differences).all() else 0.0
    fewest = FEWEST_WINDOWS if metric == PERPLEXITY else FEWEST
    if spread == 0:
        return max(fewest, 2 * count)
    size = gain
    if metric == PERPLEXITY:
        size = -math.log(1 - gain) if gain < 1 else math.inf
    return max(fewest, items_to_show(spread, size))


def _right_or_wrong(differences: NDArray[np.float64]) -> bool:
    return bool(np.isin(differences, (-1.0, 0.0, 1.0)).all())


def _sign_p(better: int, worse: int) -> float:
    return float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0


def _t_p(differences: NDArray[np.float64]) -> float:
    """p of the two-sided t test of the mean: below 0.05 if ``t_interval`` leaves out 0."""
    if len(differences) < 2 or np.ptp(differences) == 0:
        return 1.0
    return float(2 * stats.t.sf(abs(differences.mean()) / stats.sem(differences), len(differences) - 1))


def _clopper_pearson(successes: int, count: int) -> Interval:
    if count == 0:
        return 0.0, 1.0
    found = stats.binomtest(successes, count).proportion_ci(CONFIDENCE, method="exact")
    return float(found.low), float(found.high)


def _differences(metric: str, scores: Sequence[float], baseline: Sequence[float]) -> NDArray[np.float64]:
    ours, theirs = np.asarray(scores, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if metric == PERPLEXITY:
        ours, theirs = _losses(ours), _losses(theirs)
    # Two infinite losses count as equal; subtracting them would give NaN.
    return np.subtract(ours, theirs, out=np.zeros(len(ours)), where=ours != theirs)


def _losses(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Losses in nats per token; NaN, from a model that overflowed, becomes infinite."""
    losses = np.asarray(values, dtype=np.float64)
    return np.where(np.isnan(losses), math.inf, losses)


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    """The mean; NaN, without a warning, if the values hold infinities of both signs."""
    with np.errstate(invalid="ignore"):
        return float(np.mean(values))
