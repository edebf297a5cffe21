"""The recipe of an ALiBi checkpoint: its slopes are scaled by modeling code copied into the result."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from converter.config import LONGEST, PROVENANCE, Config, Geometry, Provenance
from converter.errors import SourceError, UsageError
from converter.families import SLOPES, Family, converted, recognise
from converter.families.base import UNREAD
from converter.families.refusals import check_source
from converter.recipes.stored_slopes import check_positions, read_slopes
from converter.recipes.words import Words, alibi_words
from converter.scaling.request import BY_PARTS, NTK, RAMP, Defaults
from converter.scaling.scaling import Scaling, Static, read_scaling, stretched
from converter.scaling.slopes import NATS, Slopes
from converter.scaling.train_length import TrainLength, recorded_length
from converter.source.base import Source
from converter.source.checkpoint import Checkpoint
from converter.source.tokenizer import Tokenizer


@dataclass(frozen=True)
class AlibiRecipe:
    """See ``converter.recipes.recipe.Recipe``."""

    family: Family
    config: Config
    converted: bool
    positions: Literal["alibi"] = "alibi"

    @classmethod
    def of_source(cls, config: Config) -> AlibiRecipe:
        """The recipe for a source that can be converted."""
        return cls(check_source(config), config, converted=False)

    @classmethod
    def of_checkpoint(cls, config: Config) -> AlibiRecipe:
        """The recipe for a source or a converted repository."""
        if not converted(config):
            return cls.of_source(config)
        return cls(recognise(config), config, converted=True)

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
    def defaults(self) -> Defaults:
        """See examples/evidence/README.md and encoders.md."""
        return Defaults("position", BY_PARTS, RAMP) if self.decoder else Defaults("length", NTK, RAMP)

    @property
    def geometry(self) -> Geometry:
        return self.family.geometry(self.config)

    @property
    def own_scaling(self) -> Scaling:
        own = self.converted or self.family.own_scaling
        scaling = read_scaling(self.config.get("alibi_scaling") if own else None)
        if (problem := self._misfit(scaling)) is not None:
            raise SourceError(f"config.json: alibi_scaling has {problem}")
        return scaling

    def trained_length(self, source: Source, given: int | None) -> TrainLength:
        """The first that there is: given, recorded by a conversion, of a known checkpoint, in the config.

        The config's usual length key is not trusted. But a copy that names a known checkpoint as its origin
        (``_name_or_path``) counts as that checkpoint unless its length key has another value.
        """
        family, config = self.family, self.config
        recorded = recorded_length(config, given)
        if recorded is not None:
            return recorded
        if source.repo_id is not None and source.repo_id in family.train_lengths:
            return TrainLength(family.train_lengths[source.repo_id], f"known checkpoint {source.repo_id}")
        stated = family.config_length(config)
        if stated is not None:
            return TrainLength(stated, "config.json's alibi_scaling")
        hint = config.get(family.length_hint) if family.length_hint else None
        says = ""
        if hint is not None:
            says = f"; config.json has {family.length_hint} {hint!r}, but that key {family.length_doubt}"
        origin = config.get("_name_or_path")
        if isinstance(origin, str) and origin in family.train_lengths:
            known = family.train_lengths[origin]
            if hint in (None, known):
                return TrainLength(known, f"config's _name_or_path is the known checkpoint {origin}")
            return TrainLength(None, f"not known: made from {origin}, which was trained at {known}{says}")
        return TrainLength(None, f"not known{says}")

    def check_scaling(self, scaling: Scaling) -> None:
        if (problem := self._misfit(scaling)) is not None:
            raise UsageError(f"the slopes are not this model's: they have {problem}")
        if scaling.ramp is None:
            return
        stock = self.stock({})
        spans = [NATS / (slope * self._bias_scale) for slope in stock]
        if max(spans) <= scaling.ramp[0]:
            raise UsageError(
                f"`method` {scaling.method} would scale no head: the longest span is {max(spans):.0f} "
                f"tokens, and the ramp starts at {scaling.ramp[0]:g}; give a `ramp` that starts lower"
            )

    def _misfit(self, scaling: Scaling) -> str | None:
        """How fitted exponents contradict the model's sizes; None if they do not."""
        fitted = scaling.exponents
        if fitted is None:
            return None
        heads, layers = self.geometry.num_heads, self.geometry.num_layers
        if len(fitted[0]) != heads:
            return f"exponents for {len(fitted[0])} heads, and the model has {heads}"
        if len(fitted) not in (1, layers):
            return f"exponents for {len(fitted)} layers, and the model has {layers}"
        return None

    def reach(self, scaling: Scaling, train_length: int | None) -> int | None:
        """The trained length, or else the config's own limit, times the factor."""
        trained = train_length or self.config.get(self.family.length_hint or "")
        if not (isinstance(scaling, Static) and isinstance(trained, int)):
            return None
        return round(min(trained * scaling.factor, LONGEST))

    def scaled_config(
        self, scaling: Scaling, train_length: int | None, source: Source, tokenizer: Tokenizer
    ) -> dict[str, Any]:
        family = self.family
        result = family.normalise(self.config)
        if tokenizer.here and (tokenizer.ours or "tokenizer_class" not in result):
            result["tokenizer_class"] = tokenizer.ours or family.tokenizer_class
        architectures = family.architectures(self.config)
        result |= {
            "architectures": architectures,
            "model_type": family.model_type,
            "auto_map": family.auto_map(architectures),
            "alibi_scaling": scaling.to_json(),
            PROVENANCE: Provenance(source.name, source.commit, train_length).to_json(),
        }
        reach = self.reach(scaling, train_length)
        if reach is not None:
            result = copy.deepcopy(result)  # the length may be inside an object shared with the source
            family.raise_length(result, reach)
        return result

    def stored(self, folder: Path, checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
        if not checkpoint.tensors:  # .bin files show their tensors only once they are converted
            return {}
        check_positions(checkpoint.tensors)
        slopes = read_slopes(folder, checkpoint, self.family, self.geometry.num_heads)
        found = self.family.fit(config, checkpoint.tensors)
        return found if slopes is None else {**found, SLOPES: list(slopes)}

    @property
    def unread(self) -> re.Pattern[str]:
        return re.compile("|".join((UNREAD, *self.family.unread)))

    @property
    def exact_tensors(self) -> tuple[str, ...]:
        # The converted model reads its slopes from this tensor, so they must stay exact.
        stored = self.family.stored_slopes
        return () if stored is None else tuple(self.family.tensor_names(stored))

    @property
    def tied_tensors(self) -> tuple[str, ...]:
        # Without the key, the templates' config classes use true, as those of transformers do.
        ties = self.family.normalise(self.config).get("tie_word_embeddings", True) is True
        return (self.family.head,) if ties else ()

    def stock(self, stored: Config) -> Slopes:
        return self.family.stock_slopes({**self.config, **stored})

    def scaled(self, stock: Slopes, scaling: Scaling, tokens: int, layer: int = 0) -> Slopes:
        return stretched(scaling, self._bias_scale).slopes(stock, tokens, layer)

    @property
    def _bias_scale(self) -> float:
        return self.family.bias_scale(self.geometry.head_dim)

    def change(self, scaling: Scaling) -> None:
        return None

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
                "stored in the checkpoint are scaled anew"
            )
        return notes

    def words(self, scaling: Scaling, trained: TrainLength, config: Config) -> Words:
        return alibi_words(self.family, scaling, config)
