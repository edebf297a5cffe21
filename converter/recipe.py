"""How a checkpoint is scaled: ALiBi slopes by new attention code, rotary positions by config.json alone.

The pipeline and ``inspect`` know no more of a model than ``Recipe`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from converter.alibi import AlibiRecipe
from converter.card import Words
from converter.checkpoint import Checkpoint
from converter.families import Config, Geometry
from converter.own_code import OwnCode
from converter.rotary import settings
from converter.rotary.recipe import RotaryRecipe
from converter.rotary.settings import Change
from converter.scaling import Dynamic, Scaling
from converter.source import Source
from converter.trained import TrainLength

if TYPE_CHECKING:
    from converter.verification import Check


class Recipe(Protocol):
    """What is done to one checkpoint, whose config was read and accepted."""

    @property
    def positions(self) -> Literal["alibi", "rotary"]:
        """What its attention tells positions by."""
        ...

    @property
    def name(self) -> str:
        """For people: an ALiBi family's name, or "rotary"."""
        ...

    @property
    def model_type(self) -> str:
        """Of the result."""
        ...

    @property
    def templates(self) -> tuple[str, ...]:
        """Code that is copied into the result."""
        ...

    @property
    def converted(self) -> bool:
        """Whether the checkpoint was written by this tool."""
        ...

    @property
    def geometry(self) -> Geometry:
        """The sizes of its attention."""
        ...

    @property
    def default_dynamic(self) -> Dynamic | None:
        """What ``--dynamic`` is where no strength is given; None if one has to be."""
        ...

    @property
    def own_scaling(self) -> Scaling:
        """What it is scaled by as it stands."""
        ...

    def trained_length(self, source: Source, given: int | None) -> TrainLength:
        """In tokens, where that is known."""
        ...

    def check_scaling(self, scaling: Scaling) -> None:
        """Raises ``UsageError`` for a scaling that such a model cannot compute."""
        ...

    def check_graph(self, config: Config) -> None:
        """Raises ``UnsupportedModel`` for a result, by its config, that no ONNX graph is built of."""
        ...

    def scaled_config(self, scaling: Scaling, train_length: int | None, source: Source) -> dict[str, Any]:
        """config.json of the result."""
        ...

    def stored(self, folder: Path, checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
        """What the stored tensors add to a result's config; refuses those that contradict it."""
        ...

    @property
    def exact_tensors(self) -> tuple[str, ...]:
        """Tensors that another dtype for the weights leaves as they are."""
        ...

    @property
    def tied_tensors(self) -> tuple[str, ...]:
        """The language model's head, if the result's class makes it one tensor with the embeddings."""
        ...

    def stock(self, stored: Config) -> tuple[float, ...]:
        """The slopes or frequencies as trained; ``stored`` is what the tensors say."""
        ...

    def scaled(self, stock: tuple[float, ...], scaling: Scaling, tokens: int) -> tuple[float, ...]:
        """The slopes or frequencies that a row of so many tokens gets."""
        ...

    def change(self, scaling: Scaling) -> Change | None:
        """What becomes of rotary positions; None of ALiBi."""
        ...

    def verify(self, folder: Path, scaling: Scaling, own_code: OwnCode | None = None) -> Sequence[Check]:
        """Checks the result by running it, and against the source's own code where that may be run."""
        ...

    @property
    def decoder(self) -> bool:
        """Whether it is causal."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What a user should know about this source, each a sentence without its full stop."""
        ...

    def words(self, scaling: Scaling, trained: TrainLength, config: Config) -> Words:
        """What the card of the result says, whose config is given."""
        ...


def of_source(config: Config) -> Recipe:
    """For a source that can be converted.

    Raises:
        AlreadyConverted: it was written by this tool.
        UnsupportedModel: a quantised checkpoint, or one that cannot be scaled; says why.
        SourceError: impossible values.
    """
    if settings.recognises(config):
        return RotaryRecipe.of_source(config)
    return AlibiRecipe.of_source(config)


def of_checkpoint(config: Config) -> Recipe:
    """For a source, as above, or a converted repository."""
    if settings.recognises(config):
        return RotaryRecipe.of_checkpoint(config)
    return AlibiRecipe.of_checkpoint(config)
