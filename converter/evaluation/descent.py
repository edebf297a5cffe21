"""The descent: Adam on the numbers to fit, stopped by samples that it does not learn from.

The loss has a term for each kind of samples: the mean loss of a batch, and sum(t ** 2) / (2 N), where N is
the number of tokens to learn from. That is a normal prior on exponents and temperatures, with mean 0 and
spread 1: little text moves them little, and the more text there is, the less the prior counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from converter.evaluation.samples import Samples
from converter.evaluation.trainable import TrainableAlibi, attached, losses, row_losses
from converter.progress import Advance
from converter.scaling.scaling import Scaling

RATE = 0.05
"""Adam's learning rate, in exponents."""
CHECKS = 10
"""How often a whole descent looks at the samples to stop by."""
PATIENCE = 60
"""Steps without a gain after which it stops; more where these are fewer than ``LOOKS`` looks."""
LOOKS = 3
"""Looks without a gain before which it does not stop; one alone may be chance."""


End = Literal["converged", "steps", "time", "not a number", "interrupted"]
"""Why a descent ended: ``PATIENCE`` steps gained nothing, all steps were made, the time was up, a gradient
was not a number, or the user stopped it."""


@dataclass(frozen=True)
class Look:
    """What the samples to stop by said after some steps."""

    step: int
    scaling: Scaling
    losses: tuple[float, ...]
    """The mean loss of each kind of samples, in nats per predicted token."""

    @property
    def loss(self) -> float:
        """Their sum; infinite if it is not a number."""
        total = sum(self.losses)
        return total if math.isfinite(total) else math.inf


@dataclass(frozen=True)
class Descent:
    """What was seen on the way down."""

    looks: Sequence[Look]
    """The first one is at the starting slopes."""
    steps: int
    """How many were begun."""
    ended: End

    @property
    def best(self) -> Look:
        """The look with the least loss; among equals the first."""
        return _best(self.looks)


def descend(
    model: Any,
    alibi: TrainableAlibi,
    samples: Sequence[Samples],
    *,
    steps: int,
    seconds: float = math.inf,
    seed: int = 0,
    advance: Advance = int,
) -> Descent:
    """Fits the numbers of ``alibi``; the model's own slopes and weights stay as they are.

    It ends after ``steps``, when the time is up, when ``PATIENCE`` steps gained nothing, when a gradient is
    not a number, or on Ctrl-C (which is raised before anything was seen). So a descent of at most
    ``PATIENCE`` steps never gives up early. The same seed draws the same batches.
    """
    rng = np.random.default_rng(seed)
    started = time.monotonic()
    every = max(1, steps // CHECKS)
    patience = max(PATIENCE, LOOKS * every)
    optimizer = torch.optim.Adam(alibi.parameters().values(), lr=RATE)
    looks: list[Look] = []
    step = 0
    ended: End = "steps"
    try:
        with attached(model, alibi):
            looks.append(_look(model, alibi, samples, 0))
            for step in range(1, steps + 1):
                # Constant, then down to 0: the last few batches should not decide.
                optimizer.param_groups[0]["lr"] = RATE * min(1.0, 2 * (1 - (step - 1) / steps))
                if not _step(model, alibi, samples, optimizer, rng):
                    ended = "not a number"
                    break
                advance(1)
                late = time.monotonic() - started > seconds
                if step % every == 0 or step == steps or late:
                    looks.append(_look(model, alibi, samples, step))
                if step < steps and (late or step - _best(looks).step >= patience):
                    ended = "time" if late else "converged"
                    break
    except KeyboardInterrupt:
        if not looks:
            raise
        ended = "interrupted"
    return Descent(looks, step, ended)


def _best(looks: Sequence[Look]) -> Look:
    return min(looks, key=lambda each: each.loss)


def _step(
    model: Any,
    alibi: TrainableAlibi,
    samples: Sequence[Samples],
    optimizer: torch.optim.Optimizer,
    rng: np.random.Generator,
) -> bool:
    """Makes a step; False, without one, if a gradient is not a number."""
    optimizer.zero_grad()
    for each in samples:
        loss = losses(model, each.draw(rng).on(alibi.exponents.device)).mean()
        squares = torch.stack([numbers.square().sum() for numbers in alibi.parameters().values()]).sum()
        prior = squares / (2 * each.predicted)
        (loss + prior).backward()
    if not alibi.is_finite():
        return False
    optimizer.step()
    alibi.clamp()
    return True


def _look(model: Any, alibi: TrainableAlibi, samples: Sequence[Samples], step: int) -> Look:
    means = (row_losses(model, each.kept(each.stopping)) for each in samples)
    return Look(step, alibi.scaling(), tuple(float(np.mean(rows)) for rows in means))
