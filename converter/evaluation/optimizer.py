"""The optimizer of a fit: Adam on the numbers to fit, stopped by the loss of the validation part.

The loss has a term for each kind of data (text, prompts): the mean loss of a batch, and sum(t ** 2) / (2 N),
where N is the number of tokens to learn from. That is a normal prior on exponents and temperatures, with
mean 0 and spread 1: little text moves them little, and the more text there is, the less the prior counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from converter.evaluation.split import Split
from converter.evaluation.trainable import TrainableAlibi, attached, losses, row_losses
from converter.progress import Advance
from converter.scaling.scaling import Scaling

LEARNING_RATE = 0.05
"""Adam's, in exponents."""
EVALUATIONS = 10
"""How often the validation loss is computed if all steps are made."""
PATIENCE = 60
"""Steps without a gain after which it stops; more where these are fewer than ``FEWEST_EVALUATIONS``."""
FEWEST_EVALUATIONS = 3
"""Evaluations without a gain before which it does not stop; one alone may be chance."""


End = Literal["converged", "steps", "time", "not a number", "interrupted"]
"""Why it ended: ``PATIENCE`` steps gained nothing, all steps were made, the time was up, a gradient was not a
number, or the user stopped it."""


@dataclass(frozen=True)
class EvaluationPoint:
    """The numbers after some steps, and their validation loss."""

    step: int
    scaling: Scaling
    losses: tuple[float, ...]
    """The mean loss of each kind of data, in nats per predicted token."""

    @property
    def loss(self) -> float:
        """Their sum; infinite if it is not a number."""
        total = sum(self.losses)
        return total if math.isfinite(total) else math.inf


@dataclass(frozen=True)
class Optimisation:
    """What the optimizer went through."""

    points: Sequence[EvaluationPoint]
    """The first one is at the starting slopes."""
    steps: int
    """How many were begun."""
    ended: End

    @property
    def best(self) -> EvaluationPoint:
        """The point with the least loss; among equals the first."""
        return _best(self.points)


def optimise(
    model: Any,
    alibi: TrainableAlibi,
    splits: Sequence[Split],
    *,
    steps: int,
    seconds: float = math.inf,
    seed: int = 0,
    advance: Advance = int,
) -> Optimisation:
    """Fits the numbers of ``alibi``; the model's own slopes and weights stay as they are.

    It ends after ``steps``, when the time is up, when ``PATIENCE`` steps gained nothing, when a gradient is
    not a number, or on Ctrl-C (which is raised before anything was evaluated). So it makes
    at least ``PATIENCE`` steps before it gives up. The same seed draws the same batches.
    """
    rng = np.random.default_rng(seed)
    started = time.monotonic()
    every = max(1, steps // EVALUATIONS)
    patience = max(PATIENCE, FEWEST_EVALUATIONS * every)
    adam = torch.optim.Adam(alibi.parameters().values(), lr=LEARNING_RATE)
    points: list[EvaluationPoint] = []
    step = 0
    ended: End = "steps"
    try:
        with attached(model, alibi):
            points.append(_evaluate(model, alibi, splits, 0))
            for step in range(1, steps + 1):
                # Constant, then down to 0: the last few batches should not decide.
                left = 1 - (step - 1) / steps
                adam.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, 2 * left)
                if not _step(model, alibi, splits, adam, rng):
                    ended = "not a number"
                    break
                advance(1)
                late = time.monotonic() - started > seconds
                if step % every == 0 or step == steps or late:
                    points.append(_evaluate(model, alibi, splits, step))
                if step == steps:
                    break
                if late:
                    ended = "time"
                    break
                if step - _best(points).step >= patience:
                    ended = "converged"
                    break
    except KeyboardInterrupt:
        if not points:
            raise
        ended = "interrupted"
    return Optimisation(points, step, ended)


def _best(points: Sequence[EvaluationPoint]) -> EvaluationPoint:
    return min(points, key=lambda point: point.loss)


def _step(
    model: Any,
    alibi: TrainableAlibi,
    splits: Sequence[Split],
    adam: torch.optim.Optimizer,
    rng: np.random.Generator,
) -> bool:
    """Makes a step; False, without one, if a gradient is not a number."""
    adam.zero_grad()
    for split in splits:
        batch = split.draw_batch(rng).on(alibi.exponents.device)
        loss = losses(model, batch).mean()
        squares = torch.stack([numbers.square().sum() for numbers in alibi.parameters().values()]).sum()
        prior = squares / (2 * split.training_tokens)
        (loss + prior).backward()
    if not alibi.gradients_are_finite():
        return False
    adam.step()
    alibi.clamp()
    return True


def _evaluate(model: Any, alibi: TrainableAlibi, splits: Sequence[Split], step: int) -> EvaluationPoint:
    """The validation loss after a step."""
    means = []
    for split in splits:
        rows = row_losses(model, split.batches(split.validation))
        means.append(float(np.mean(rows)))
    return EvaluationPoint(step, alibi.scaling(), tuple(means))
