"""How a checkpoint is scaled: ALiBi slopes by new attention code, rotary positions by config.json alone."""

from __future__ import annotations

from converter.config import Config
from converter.recipes.alibi import AlibiRecipe
from converter.recipes.rotary import RotaryRecipe
from converter.rotary import settings

Recipe = AlibiRecipe | RotaryRecipe
"""How one checkpoint is converted."""

__all__ = ["AlibiRecipe", "Recipe", "RotaryRecipe", "of_checkpoint", "of_source"]


def of_source(config: Config) -> Recipe:
    """The recipe for a source that can be converted; the error says why it cannot be."""
    if settings.recognises(config):
        return RotaryRecipe.of_source(config)
    return AlibiRecipe.of_source(config)


def of_checkpoint(config: Config) -> Recipe:
    """The recipe for a converted repository, or for a source as in ``of_source``."""
    if settings.recognises(config):
        return RotaryRecipe.of_checkpoint(config)
    return AlibiRecipe.of_checkpoint(config)
