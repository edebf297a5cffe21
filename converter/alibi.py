"""The recipe of an ALiBi checkpoint: its slopes are scaled, by code that is copied beside the weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from converter import families
from converter.card import Words, alibi_words
from converter.checkpoint import Checkpoint
from converter.families import SLOPES, Config, Family, Geometry
from converter.own_code import OwnCode
from converter.repository import converted_config
from converter.scaling import Dynamic, Scaling
from converter.slopes import Slopes
from converter.source import Source
from converter.stored import check_positions, read_slopes
from converter.trained import TrainLength, trained_length

if TYPE_CHECKING:
    from converter.verification import Check


@dataclass(frozen=True)
class AlibiRecipe:
    """See ``converter.recipe.Recipe``."""

    family: Family
    config: Config
    converted: bool
    positions: Literal["alibi"] = "alibi"

    @classmethod
    def of_source(cls, config: Config) -> AlibiRecipe:
        """For a source that can be converted."""
        return cls(families.check(config), config, converted=False)

    @classmethod
    def of_checkpoint(cls, config: Config) -> AlibiRecipe:
        """For a source or a converted repository."""
        if not families.converted(config):
            return cls.of_source(config)
        return cls(families.recognise(config), config, converted=True)

    @property
    def name(self) -> str:
        return self.family.name

    @property
    def model_type(self) -> str:
        return self.family.model_type

    @property
    def templates(self) -> tuple[str, ...]:
        return self.family.templates

    @property
    def default_dynamic(self) -> Dynamic:
        return "position" if self.decoder else "length"

    @property
    def geometry(self) -> Geometry:
        return self.family.geometry(self.config)

    @property
    def own_scaling(self) -> Scaling:
        own = self.converted or self.family.own_scaling
        return Scaling.from_json(self.config.get("alibi_scaling") if own else None)

    def trained_length(self, source: Source, given: int | None) -> TrainLength:
        return trained_length(self.family, self.config, source, given)

    def check_scaling(self, scaling: Scaling) -> None:
        """Any will do."""

    def check_graph(self, config: Config) -> None:
        from converter.onnx.build import check_has_graph

        check_has_graph(config, self.family)

    def scaled_config(self, scaling: Scaling, train_length: int | None, source: Source) -> dict[str, Any]:
        return converted_config(self.config, self.family, scaling, train_length, source)

    def stored(self, folder: Path, checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
        if not checkpoint.tensors:  # .bin files do not tell before they are converted
            return {}
        check_positions(checkpoint.tensors)
        slopes = read_slopes(folder, checkpoint, self.family, self.geometry.num_heads)
        found = self.family.fit(config, checkpoint.tensors)
        return found if slopes is None else {**found, SLOPES: list(slopes)}

    @property
    def exact_tensors(self) -> tuple[str, ...]:
        # Stored slopes are read from the result.
        stored = self.family.stored_slopes
        return () if stored is None else tuple(self.family.tensor_names(stored))

    @property
    def tied_tensors(self) -> tuple[str, ...]:
        # Where the key is left out, the templates' configs, as transformers', have true.
        ties = self.family.normalise(self.config).get("tie_word_embeddings", True) is True
        return (self.family.head,) if ties else ()

    def stock(self, stored: Config) -> Slopes:
        return self.family.stock_slopes({**self.config, **stored})

    def scaled(self, stock: Slopes, scaling: Scaling, tokens: int) -> Slopes:
        return scaling.slopes(stock, tokens)

    def change(self, scaling: Scaling) -> None:
        return None

    def verify(self, folder: Path, scaling: Scaling, own_code: OwnCode | None = None) -> Sequence[Check]:
        from converter.verification import verify

        return verify(folder, self.family, self.config, own_code)

    @property
    def decoder(self) -> bool:
        return self.family.kind == "decoder"

    @property
    def notes(self) -> Sequence[str]:
        doubt = self.family.doubt(self.config)
        notes = [] if doubt is None else [doubt]
        own = self.config.get("alibi_scaling") if self.family.own_scaling else None
        if own is not None:
            notes.append(
                f"the source's own alibi_scaling {json.dumps(own)} is replaced, not multiplied: the slopes "
                "are scaled from those that the checkpoint stores"
            )
        return notes

    def words(self, scaling: Scaling, trained: TrainLength, config: Config) -> Words:
        return alibi_words(self.family, scaling, config)
