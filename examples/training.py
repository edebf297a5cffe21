"""What the scripts that train models share: Muon for the hidden matrices, and the files of a checkpoint."""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import nn

CLIP_NORM = 1.0


def parser(description: str, tasks: Iterable[str]) -> argparse.ArgumentParser:
    """The options of both scripts that train small models; the first of the tasks is the default."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--task", choices=tasks, default=next(iter(tasks)), help="to learn [%(default)s]")
    made.add_argument("--heads", type=int, choices=(8, 12), default=8, help="attention heads [%(default)s]")
    made.add_argument("--seed", type=int, default=0, help="seed of weights and data [%(default)s]")
    made.add_argument("--out", type=Path, required=True, help="folder to write")
    return made


def prepare() -> None:
    """Makes a training give the same weights each time; they would depend on the number of threads."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # the softmax of far keys underflows, and denormals are slow on CPUs
    torch.use_deterministic_algorithms(True)


def optimizers(
    model: nn.Module, layers: nn.Module, matrices_rate: float, others_rate: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for all else."""
    matrices = [parameter for parameter in layers.parameters() if parameter.ndim == 2]
    ids = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    adam = torch.optim.AdamW(others, lr=others_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, lr=matrices_rate), adam]


def set_rates(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    """Sets all learning rates to this share of what they were at first."""
    for group in (group for each in optimizers for group in each.param_groups):
        group["lr"] = share * group.setdefault("initial_lr", group["lr"])


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], loss: torch.Tensor) -> None:
    """One update by the gradients of a loss."""
    model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    for optimizer in optimizers:
        optimizer.step()


def write(
    out: Path, weights: Mapping[str, torch.Tensor], tokenizer: Tokenizer, **settings: Mapping[str, Any]
) -> None:
    """Writes a checkpoint into a folder, and ``settings`` as JSON files of these names; others stay.

    ``training`` gets the versions of Python and torch.
    """
    settings["training"] = {
        **settings["training"],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "model.safetensors").write_bytes(save(dict(weights), metadata={"format": "pt"}))
    tokenizer.save(str(out / "tokenizer.json"))
    for name, content in settings.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
