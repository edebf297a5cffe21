"""What the pictures of a model are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from converter import recipe as recipes
from converter.alibi import AlibiRecipe
from converter.checkpoint import read_checkpoint
from converter.families import Config
from converter.recipe import Recipe
from converter.scaling import Request, Scaling
from converter.source import open_source
from converter.trained import resolve

MULTIPLES = (1, 2, 4)
"""Of the trained length: where a dynamic scaling is shown."""
LONGEST = 1 << 31
"""Tokens; no picture shows more, whatever a config says."""
STOCK = "stock"

Values = tuple[float, ...]
"""Slopes, one a head; of rotary positions frequencies in radians per token, one a pair of channels."""


@dataclass(frozen=True)
class Variant:
    """The slopes or frequencies under one scaling, at one length."""

    label: str
    values: Values
    tokens: float | None
    """The length that they are for: of a static scaling factor times trained length; None if not known."""


@dataclass(frozen=True)
class Model:
    """A model's positions, stock and under some scalings."""

    name: str
    stock: Values
    scalings: Sequence[Scaling] = ()
    train_length: int | None = None
    """In tokens."""
    decoder: bool = True
    """Causal; an encoder's queries see keys on both sides."""
    rotary: bool = False
    bias_scale: float = 1.0
    """The factor on slope times distance (Falcon's is 1 / sqrt(head size))."""
    scale: Callable[[Values, Scaling, int], Values] = lambda stock, scaling, tokens: scaling.slopes(
        stock, tokens
    )
    """``converter.recipe.Recipe.scaled``."""

    @property
    def variants(self) -> list[Variant]:
        """Stock first; of a dynamic scaling, one variant at each of ``MULTIPLES``."""
        found = [Variant(STOCK, self.stock, self.train_length)]
        for scaling in self.scalings:
            if scaling.dynamic is None:
                factor = scaling.factor_at(0)
                tokens = None if self.train_length is None else min(factor * self.train_length, LONGEST)
                found.append(Variant(str(scaling), self.scale(self.stock, scaling, 0), tokens))
                continue
            for length in dynamic_lengths(scaling):
                label = (
                    f"{scaling.method}, {scaling.dynamic}-dynamic, rate {scaling.rate:g}, at {length} tokens"
                )
                found.append(Variant(label, self.scale(self.stock, scaling, length), length))
        return found

    @property
    def target_length(self) -> float | None:
        """The longest length, in tokens, that a scaling is for; None without one, or if it is not known."""
        lengths = [variant.tokens for variant in self.variants if variant.tokens is not None]
        longest = max(lengths, default=None)
        return None if longest == self.train_length else longest


def dynamic_lengths(scaling: Scaling) -> list[int]:
    """The lengths in tokens at which a dynamic scaling is shown."""
    assert scaling.train_length is not None
    return [min(multiple * scaling.train_length, LONGEST) for multiple in MULTIPLES]


def read(
    model: str,
    requests: Sequence[Request] = (),
    *,
    train_length: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
) -> Model:
    """Opens a checkpoint, stock or converted; of a Hub repository only the config is downloaded.

    Args:
        model: a local folder, or a Hub id.
        requests: the scalings to show; without one, a converted repository shows its own.
        train_length, revision, token, cache_dir: as for ``inspect``.

    Raises:
        UsageError: a request needs the trained length, which is not known; or such a model cannot compute it.
        SourceError: the checkpoint is missing, unreadable or damaged.
        UnsupportedModel: it has no positions that can be scaled.
    """
    source = open_source(model, revision=revision, token=token, cache_dir=cache_dir)
    config = source.config()
    recipe = recipes.of_checkpoint(config)
    trained = recipe.trained_length(source, train_length)
    scalings = [resolve(request, trained, source, recipe.default_dynamic) for request in requests]
    for scaling in scalings:
        recipe.check_scaling(scaling)
    stored: Config = {}
    if source.local and source.weights():
        stored = recipe.stored(source.folder, read_checkpoint(source.folder), config)
    return describe(source.name, recipe, stored, scalings or [recipe.own_scaling], trained.tokens)


def describe(
    name: str, recipe: Recipe, stored: Config, scalings: Sequence[Scaling], train_length: int | None
) -> Model:
    """A checkpoint that is open already.

    Args:
        name: for people.
        recipe: of its config.
        stored: what the tensors add to the config, from ``Recipe.stored``.
        scalings: those to show; ``none`` is stock, which is shown anyway.
        train_length: in tokens, where it is known.
    """
    bias_scale = 1.0
    if isinstance(recipe, AlibiRecipe):
        bias_scale = recipe.family.bias_scale(recipe.geometry.head_dim)
    return Model(
        name=name,
        stock=recipe.stock(stored),
        scalings=[scaling for scaling in dict.fromkeys(scalings) if scaling.method != "none"],
        train_length=None if train_length is None else min(train_length, LONGEST),
        decoder=recipe.decoder,
        rotary=recipe.positions == "rotary",
        bias_scale=bias_scale,
        scale=recipe.scaled,
    )
