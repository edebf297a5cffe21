"""The data for the pictures of a model: its slopes or frequencies, stock and scaled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converter.config import LONGEST, Config
from converter.model.alibi import AlibiModel
from converter.model.model import Model
from converter.model.open import open_model
from converter.scaling.penalty import Penalty
from converter.scaling.request import Request
from converter.scaling.scaling import UNSCALED, Scaling, averaged, rows, short_names

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from converter.model.open import SourceOptions

MULTIPLES = (1, 2, 4)
"""Multiples of the trained length at which a dynamic scaling may be shown."""
STOCK = "stock"

Values = tuple[float, ...]
"""One slope per head; for rotary positions, one frequency in radians per token for each pair of channels."""


@dataclass(frozen=True)
class Variant:
    """The slopes or frequencies under one scaling, at one length."""

    label: str
    values: Values | None
    """None for a concave penalty, which has no slope."""
    penalties: tuple[Penalty, ...]
    """One per head, in nats; empty for rotary positions."""
    tokens: float | None
    """The length they are meant for: for a static scaling, factor times trained length; None if not known."""


@dataclass(frozen=True)
class Positions:
    """A model's slopes or frequencies, stock and under some scalings."""

    name: str
    stock: Values
    scalings: Sequence[Scaling] = ()
    train_length: int | None = None
    """In tokens."""
    rotary: bool = False
    bias_scale: float = 1.0
    """The factor on slope times distance; for Falcon, 1 / sqrt(head size)."""
    scale: Callable[[Values, Scaling, int], Values] = lambda stock, scaling, tokens: scaling.slopes(
        stock, tokens
    )
    """``Model.scaled``."""

    @property
    def labels(self) -> dict[Scaling, str]:
        """The scalings as pictures call them, which show the mean of layers whose slopes differ."""
        names = short_names(map(str, self.scalings))
        return {
            each: f"{names[str(each)]}{', mean over layers' if rows(each) > 1 else ''}"
            for each in self.scalings
        }

    @property
    def variants(self) -> list[Variant]:
        """Stock first; a dynamic scaling has one variant for each of its ``dynamic_lengths``."""
        found = [Variant(STOCK, self.stock, self.penalties_at(UNSCALED, 0), self.train_length)]
        for scaling, label in self.labels.items():
            if not scaling.dynamic:
                factor = scaling.factor_at(0)
                tokens = None if self.train_length is None else min(factor * self.train_length, LONGEST)
                found.append(
                    Variant(label, self.slopes_at(scaling, 0), self.penalties_at(scaling, 0), tokens)
                )
                continue
            for length in dynamic_lengths(scaling):
                values = None if scaling.power is not None else self.slopes_at(scaling, length)
                penalties = self.penalties_at(scaling, length)
                found.append(Variant(f"{label}, at {length} tokens", values, penalties, length))
        return found

    def slopes_at(self, scaling: Scaling, tokens: int) -> Values:
        """The values for a row of ``tokens`` tokens; the layers' geometric mean if they differ."""
        return self.scale(self.stock, averaged(scaling), tokens)

    def penalties_at(self, scaling: Scaling, tokens: int) -> tuple[Penalty, ...]:
        """The heads' penalties in nats for a row of ``tokens`` tokens; empty for rotary positions."""
        if self.rotary:
            return ()
        nats = tuple(max(slope * self.bias_scale, sys.float_info.min) for slope in self.stock)
        return averaged(scaling).penalties(nats, tokens)

    @property
    def longest_shown(self) -> float | None:
        """The longest length in tokens for which a scaling is shown; None if there is none, or not known."""
        lengths = [variant.tokens for variant in self.variants if variant.tokens is not None]
        longest = max(lengths, default=None)
        return None if longest == self.train_length else longest


def dynamic_lengths(scaling: Scaling) -> list[int]:
    """The lengths in tokens at which a dynamic scaling is shown: where it changes something, if it does."""
    lengths = [min(multiple * scaling.train_length, LONGEST) for multiple in MULTIPLES]
    return [length for length in lengths if scaling.factor_at(length) > 1] or lengths[-1:]


def read_positions(
    model: str, requests: Sequence[Request] = (), **source: Unpack[SourceOptions]
) -> Positions:
    """Reads a checkpoint, stock or converted; from a Hub repository, only the config is downloaded.

    ``requests`` are the scalings to show; without any, a converted repository shows its own.
    """
    opened = open_model(model, **source)
    scalings = [opened.resolve(request) for request in requests] or [opened.scaling]
    return describe(opened, opened.tensor_settings, scalings)


def describe(model: Model, stored: Config, scalings: Sequence[Scaling]) -> Positions:
    """The same for a model that is already open, with what its tensors add to its config, ``stored``."""
    train_length = model.trained.tokens
    return Positions(
        name=model.name,
        stock=model.stock(stored),
        scalings=[scaling for scaling in dict.fromkeys(scalings) if scaling.scaled],
        train_length=None if train_length is None else min(train_length, LONGEST),
        rotary=model.positions == "rotary",
        bias_scale=model.bias_scale if isinstance(model, AlibiModel) else 1.0,
        scale=model.scaled,
    )
