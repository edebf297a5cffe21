"""Muon, the optimiser that `train.py` uses for the hidden matrices."""

from __future__ import annotations

import math

import torch
from torch import nn


def orthogonalise(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Move the singular values of `matrix` (2-d, float) towards 1 and keep its singular vectors.

    Newton-Schulz iteration with the quintic x -> a x + b x^3 + c x^5 and the coefficients published
    for Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon). They need few steps but are not
    exact: the singular values end up between about 0.7 and 1.2. The iteration uses only products of X and
    X X^T, so no singular value decomposition is computed.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x: torch.Tensor = matrix.T if tall else matrix  # the smaller of the two Gram matrices
    x = x / (x.norm() + 1e-7)  # the iteration converges from singular values of at most 1
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum with an orthogonalised update: every direction of a matrix moves by the same amount.

    For 2-d hidden matrices only. The update of a tall matrix is multiplied by sqrt(rows / columns), so that
    one learning rate works for all shapes.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "Muon does not support closures"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"].lerp_(parameter.grad, 1 - group["momentum"])
                nesterov = parameter.grad.lerp(average, group["momentum"])
                rows, columns = parameter.shape
                scale = math.sqrt(max(1.0, rows / columns))
                parameter.add_(orthogonalise(nesterov), alpha=-group["lr"] * scale)
