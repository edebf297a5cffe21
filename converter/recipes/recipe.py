"""``Recipe``: the pipeline's view of a checkpoint, and how its positions are scaled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from converter.config import Config, Geometry
from converter.recipes.words import Words
from converter.rotary.settings import Change
from converter.scaling.request import Defaults
from converter.scaling.scaling import Scaling
from converter.scaling.train_length import TrainLength
from converter.source.base import Source
from converter.source.checkpoint import Checkpoint
from converter.source.tokenizer import Tokenizer


class Recipe(Protocol):
    """How one checkpoint is converted. Its config has been read and accepted."""

    @property
    def positions(self) -> Literal["alibi", "rotary"]:
        """How its attention sees positions."""

    @property
    def name(self) -> str:
        """For people: an ALiBi family's name, or "rotary"."""

    @property
    def model_type(self) -> str:
        """The ``model_type`` of the result."""

    @property
    def templates(self) -> tuple[str, ...]:
        """Names of the code files that are copied into the result."""

    @property
    def converted(self) -> bool:
        """Whether this tool wrote the checkpoint."""

    @property
    def geometry(self) -> Geometry:
        """The sizes of its attention; raises ``SourceError`` for a missing or impossible one."""

    @property
    def defaults(self) -> Defaults:
        """What scales the model where the user leaves it open."""

    @property
    def own_scaling(self) -> Scaling:
        """The scaling that the checkpoint already has."""

    def trained_length(self, source: Source, given: int | None) -> TrainLength:
        """The trained length in tokens, if it is known; ``given`` is the user's, and wins."""

    def check_scaling(self, scaling: Scaling) -> None:
        """Raises ``UsageError`` for a scaling that this model cannot compute."""

    def reach(self, scaling: Scaling, train_length: int | None) -> int | None:
        """The tokens to which a static scaling raises the limits on input; None if it raises none."""

    def scaled_config(
        self, scaling: Scaling, train_length: int | None, source: Source, tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """The result's config.json, without the keys that ``stored`` adds."""

    def stored(self, folder: Path, checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
        """The keys that the stored tensors add to the result's config; refuses tensors that contradict it."""

    @property
    def unread(self) -> re.Pattern[str]:
        """Finds the names of stored tensors that no model computes with, such as buffers of causal masks."""

    @property
    def exact_tensors(self) -> tuple[str, ...]:
        """Names of the tensors that keep their dtype when the weights are cast to another."""

    @property
    def tied_tensors(self) -> tuple[str, ...]:
        """Possible names of the language model's head if the result ties it to the embeddings, else none."""

    def stock(self, stored: Config) -> tuple[float, ...]:
        """The slopes or frequencies as trained; ``stored`` is what the method ``stored`` returned."""

    def scaled(
        self, stock: tuple[float, ...], scaling: Scaling, tokens: int, layer: int = 0
    ) -> tuple[float, ...]:
        """The slopes or frequencies of a layer for a sequence of ``tokens`` tokens."""

    def change(self, scaling: Scaling) -> Change | None:
        """How the scaling changes rotary positions; None for ALiBi."""

    @property
    def decoder(self) -> bool:
        """Whether it is causal."""

    @property
    def notes(self) -> Sequence[str]:
        """What a user should know about this source; each is a sentence without its full stop."""

    def words(self, scaling: Scaling, trained: TrainLength, config: Config) -> Words:
        """The texts for the result's card; ``config`` is the result's."""
