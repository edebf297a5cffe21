"""A loaded model whose slopes get gradients: the numbers to fit, the loss, and the memory that both take.

A decoder's attention reads slopes from channels of the folded queries (``templates/ntk_alibi.py``), so
gradients reach the exponents through any fused kernel. Temperatures multiply the queries. Weights get none.
Each layer keeps only its input, and computes the rest again in the backward pass; so does each part of the
logits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from converter.evaluation.batches import IGNORE, Batch
from converter.scaling.scaling import EXPONENTS, FOLDED_CHANNELS, TEMPERATURES, Scaling
from converter.scaling.slopes import Slopes

LOGITS_AT_ONCE = 1 << 25
"""Most elements of logits in memory at a time: 128 MiB in float32, and as much again for their gradients."""
DIGITS = 4
"""Decimals of a fitted number; a slope then changes by less than 0.1 % of itself."""


class TrainableAlibi:
    """Stands in for the template's ``Alibi``: the same formulas, with numbers that get gradients.

    The fit starts at the exponents and temperatures of ``form``, from the ``stock`` slopes, one per head.
    """

    def __init__(
        self, stock: Slopes, form: Scaling, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.form = form
        self.dynamic = form.dynamic
        """As of the template's ``Alibi``."""
        self.power = None
        """As of the template's ``Alibi``: what is fitted is no concave penalty."""
        options: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
        self.exponents = torch.tensor(form.exponents, **options)
        """[1 or layers, heads]."""
        self.temperatures = None if form.temperatures is None else torch.tensor(form.temperatures, **options)
        """[1 or layers, heads]; None if there are none."""
        self._stock = torch.tensor(stock, dtype=dtype, device=device)[:, None]
        self.replaced: Any = None
        """The template's ``Alibi`` that this stands in for; set while it is attached to a model."""

    def slopes_at(self, positions: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """The slopes for queries at the given positions; see the template's ``Alibi.slopes_at``."""
        return self._stock * self._powers(-self.exponents, positions)

    def static_query_channels(self, device: torch.device, dtype: torch.dtype, scaling: float) -> Any:
        """As of the template's ``Alibi``, but not kept for the next pass: a fit changes the slopes."""
        template = sys.modules[type(self.replaced).__module__]
        anywhere = torch.zeros(1, 1, dtype=torch.int64, device=device)
        return template.query_channels(self.slopes_at(anywhere), scaling).to(dtype)

    def query_factors(self, positions: torch.Tensor, lengths: torch.Tensor | None = None) -> Any:  # noqa: ARG002
        """What to multiply the queries by; see the template's ``Alibi.query_factors``."""
        return None if self.temperatures is None else self._powers(self.temperatures, positions)

    def _powers(self, numbers: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The factor a to the power of ``numbers`` [rows, H]: [rows, 1, H, 1] or [rows, B or 1, H, T]."""
        power = numbers[:, None, :, None]
        if self.form.static:
            return self.form.factor**power
        tokens = (positions + 1).to(power.dtype)
        factor = (self.form.rate * tokens / self.form.train_length).clamp(min=1.0)
        powers: torch.Tensor = factor[:, None, :] ** power
        return powers

    def parameters(self) -> dict[str, torch.Tensor]:
        """What is fitted, by its key in the scaling."""
        found = {"exponents": self.exponents}
        return found if self.temperatures is None else {**found, "temperatures": self.temperatures}

    def gradients_are_finite(self) -> bool:
        """Whether all gradients are there and are numbers."""
        gradients = [numbers.grad for numbers in self.parameters().values()]
        return all(each is not None and bool(each.isfinite().all()) for each in gradients)

    @torch.no_grad()
    def clamp(self) -> None:
        self.exponents.clamp_(*EXPONENTS)
        if self.temperatures is not None:
            self.temperatures.clamp_(*TEMPERATURES)

    def scaling(self) -> Scaling:
        """The scaling with the numbers as they are now, rounded to ``DIGITS``."""
        rounded: dict[str, Any] = {
            name: tuple(tuple(round(number, DIGITS) + 0.0 for number in row) for row in numbers.tolist())
            for name, numbers in self.parameters().items()
        }
        return replace(self.form, **rounded)


@contextmanager
def attached(model: Any, alibi: TrainableAlibi) -> Iterator[None]:
    """Gives a converted model these slopes, freezes its weights and checkpoints its layers, until the end."""
    backbone = model.base_model
    own = backbone.alibi
    alibi.replaced = own
    layers = _layers(model)
    model.requires_grad_(False)
    backbone.alibi = alibi
    for layer in layers:
        layer.forward = partial(_checkpoint, layer.forward)
    try:
        yield
    finally:
        backbone.alibi = own
        for layer in layers:
            del layer.forward


def losses(model: Any, batch: Batch) -> torch.Tensor:
    """The negative log-likelihood of every target that is not ``IGNORE``, float32 [targets], in nats."""
    if hasattr(model, "project"):  # a decoder of this tool's templates
        states, head = model.run_backbone(batch.ids, None, use_cache=False).last_hidden_state, model.project
    elif hasattr(model, "predict"):  # an encoder of theirs
        states, head = model.run_backbone(batch.ids, None).last_hidden_state, model.predict
    else:  # a class of transformers; some scale or cap their logits, so use them as they are
        states, head = model(batch.ids, use_cache=False).logits, torch.nn.Identity()
    # With a vocabulary of 250,000, the logits of 8192 tokens take 8 GB: compute a few tokens at a time.
    step = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    all_states = states.flatten(0, 1).split(step)
    all_targets = batch.targets.to(states.device).flatten().split(step)
    parts = []
    for some, targets in zip(all_states, all_targets, strict=True):
        counted = targets != IGNORE
        parts.append(_checkpoint(_token_losses, head, some[counted], targets[counted]))
    return torch.cat(parts)


@torch.no_grad()
def row_losses(model: Any, batches: Sequence[Batch]) -> tuple[float, ...]:
    """The mean loss of each row in nats per predicted token, in the order of the rows."""
    means: list[float] = []
    for batch in batches:
        counts = (batch.targets != IGNORE).sum(dim=1).tolist()
        parts = losses(model, batch.on(model.device)).double().cpu().split(counts)
        means += [float(part.mean()) for part in parts]
    return tuple(means)


def memory(model: Any, rows: int, length: int) -> int:
    """About how many bytes a step takes beside the weights; measured on a CPU, rather too many."""
    config, tokens, item = model.config, rows * length, model.dtype.itemsize
    inputs = (len(_layers(model)) + 2) * tokens * config.hidden_size * item
    # What one layer computes again, with gradients: about 56 vectors of its heads for each token.
    heads = config.num_attention_heads * (config.hidden_size // config.num_attention_heads + FOLDED_CHANNELS)
    layer = 56 * tokens * heads * item
    logits = 16 * min(LOGITS_AT_ONCE, tokens * config.vocab_size)
    needed: int = inputs + max(layer, logits)
    return needed


def _layers(model: Any) -> Sequence[Any]:
    """Those of a class of this tool's templates."""
    backbone = model.base_model
    return list(getattr(backbone, "decoder_layers", getattr(backbone, "encoder_layers", ())))


def _checkpoint(function: Any, *arguments: Any, **keywords: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    # Nothing is random: the model is in evaluation mode.
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, **keywords)


def _token_losses(head: Any, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = head(states)  # on its own device, if the model is spread over several
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets.to(logits.device), reduction="none")
