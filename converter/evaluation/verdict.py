"""Judges fitted slopes by windows and prompts that took no part in the fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from converter.errors import NoGain
from converter.evaluation.perplexity import pieces
from converter.evaluation.results import SIGNIFICANT
from converter.evaluation.subject import Subject
from converter.fitting.samples import Samples, Windows
from converter.fitting.trainable import Batch, row_losses
from converter.scaling.scaling import UNSCALED, Scaling, Static


@dataclass(frozen=True)
class Verdict:
    """The fitted slopes against the stock ones, on windows or prompts that took no part in the fit."""

    measure: str
    """"text" or "prompts"."""
    length: int
    """Tokens of a window, or of the longest prompt."""
    items: int
    """Windows or prompts."""
    before: float
    """Mean loss in nats per predicted token with the stock slopes."""
    after: float
    """The same with the fitted slopes."""
    better: int
    """Items with less loss."""
    p: float
    """Of the two-sided permutation test (Fisher 1935) of the mean: the items' changes keep their sizes, and
    get random signs. So prompts that stay right hardly count, however many there are."""

    @property
    def gains(self) -> bool:
        """Whether the fitted slopes are better by more than chance."""
        return self.after < self.before and self.p < SIGNIFICANT

    @property
    def loses(self) -> bool:
        """Whether they are worse by more than chance, or not a number."""
        return not self.after < math.inf or (self.after > self.before and self.p < SIGNIFICANT)


def judge(subject: Subject, samples: Sequence[Samples], scaling: Scaling, trained: int) -> list[Verdict]:
    """Runs both slopes as the converted model would, on what took no part in the fit."""
    parts = [(each, each.judging) for each in samples]
    if isinstance(scaling, Static):
        parts += [(each, pieces(each.judging, trained)) for each in samples if isinstance(each, Windows)]
    batches = [each.kept(items) for each, items in parts]
    before, after = (
        [row_losses(subject.scaled(wanted), each) for each in batches] for wanted in (UNSCALED, scaling)
    )
    kept = zip(parts, batches, before, after, strict=True)
    return [verdict(each.name, found, stock, fitted) for (each, _), found, stock, fitted in kept]


def verdict(name: str, batches: Sequence[Batch], before: Sequence[float], after: Sequence[float]) -> Verdict:
    """From the losses of all rows of the batches."""
    changes = np.subtract(after, before)
    return Verdict(
        measure=name,
        length=max(batch.ids.shape[1] for batch in batches),
        items=len(changes),
        before=float(np.mean(before)),
        after=float(np.mean(after)),
        better=int((changes < 0).sum()),
        p=_p(changes),
    )


def _p(changes: NDArray[np.float64]) -> float:
    """Of the permutation test: exact for up to 13 changes, from 9999 draws for more."""
    if not np.isfinite(changes).all():
        return 1.0  # no test is needed then, see ``Verdict.loses``
    test = stats.permutation_test(
        (changes,), np.mean, permutation_type="samples", vectorized=True, random_state=0
    )
    return float(test.pvalue)


def check_gain(verdicts: Sequence[Verdict]) -> None:
    """Raises ``NoGain`` unless one gains and none loses."""
    if any(each.gains for each in verdicts) and not any(each.loses for each in verdicts):
        return
    said = "; ".join(
        f"{each.measure} at {each.length} tokens: loss {each.before:.4f} with the stock slopes, "
        f"{each.after:.4f} fitted, {each.better} of {each.items} better, p = {each.p:.2g}"
        for each in verdicts
    )
    raise NoGain(
        f"no fitted slopes are better than the stock ones on what was kept back ({said}), so nothing was "
        "written; give more text or prompts, or a formula (tune)"
    )
