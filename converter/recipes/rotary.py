"""The recipe of a rotary checkpoint: it gets a new config.json, and all else stays the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from converter.config import PROVENANCE, SOURCE_CONFIG, Config, Geometry, Provenance, read_provenance
from converter.families.refusals import check_convertible, check_plain
from converter.recipes.words import Words, auto_class, task
from converter.rotary import settings
from converter.rotary.settings import Change, Rotary
from converter.scaling.frequencies import Frequencies
from converter.scaling.request import NTK, Defaults, TrainLength, recorded_length
from converter.scaling.scaling import UNSCALED, Scaling, read_scaling
from converter.source.checkpoint import Checkpoint
from converter.source.source import Source
from converter.source.tokenizer import Tokenizer

NOTES = """\
It loads as its source does, with transformers' own class. The repository contains no code."""
DYNAMIC_NOTES = """

The base depends on the longest sequence of a batch, padding included. transformers keeps the largest base
until a pass has fewer tokens than `max_position_embeddings`; scaling therefore starts at the length in that
key. Cached keys keep the rotation they got when they were computed, so a text read in one pass and the same
text continued from a cache give different numbers."""
HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of the language model's head; GPT-NeoX uses the second, up to transformers 4."""
BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attention\.bias|masked_bias|(\w+_)?mask)$")
"""Buffers that old checkpoints store and no version of a model reads."""


@dataclass(frozen=True)
class RotaryRecipe:
    """How one rotary checkpoint is converted; members without a word are explained in ``AlibiRecipe``."""

    config: Config
    """The source's config; for a converted repository, that of the source it was made from."""
    rotary: Rotary
    own_scaling: Scaling
    converted: bool
    positions: Literal["rotary"] = "rotary"
    name: ClassVar[str] = "rotary"
    templates: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Defaults] = Defaults(None, NTK, settings.YARN_RAMP)
    unread: ClassVar[re.Pattern[str]] = BUFFERS
    exact_tensors: ClassVar[tuple[str, ...]] = ()
    decoder: ClassVar[bool] = True
    notes: ClassVar[Sequence[str]] = ()

    @classmethod
    def of_source(cls, config: Config) -> RotaryRecipe:
        """The recipe for a source that can be converted."""
        check_convertible(config)
        return cls(config, settings.read(config), UNSCALED, converted=False)

    @classmethod
    def of_checkpoint(cls, config: Config) -> RotaryRecipe:
        """The recipe for a source or a converted repository."""
        provenance = read_provenance(config)
        record = None if provenance is None else provenance.rotary
        if record is None:
            return cls.of_source(config)
        # This config is the one that would be loaded, so it is checked, whatever its record says.
        check_plain(config)
        settings.check_code(config)
        source = {**settings.respelled(config), **record[SOURCE_CONFIG]}
        scaling = read_scaling(record.get("scaling"))
        return cls(source, settings.read(source), scaling, converted=True)

    @property
    def model_type(self) -> str:
        return self.rotary.model.model_type

    @property
    def geometry(self) -> Geometry:
        return self.rotary.geometry

    def trained_length(self, source: Source, given: int | None) -> TrainLength:
        """As given or recorded, else ``max_position_embeddings``, the trained length of most rotary models.

        If a sliding window is shorter than that key, attention was never trained at such distances.
        """
        known = recorded_length(self.config, given)
        if known is not None:
            return known
        length, window = self.rotary.max_length, self.rotary.window
        if length is None:
            return TrainLength(None, f"not known: config.json has no {settings.LENGTH}")
        if window is not None and window < length:
            return TrainLength(
                None,
                f"not known: config.json has {settings.LENGTH} {length}, but its sliding_window lets "
                f"attention see {window} tokens",
            )
        return TrainLength(length, f"config.json's {settings.LENGTH}")

    def check_scaling(self, scaling: Scaling) -> None:
        settings.check_scaling(self.rotary, scaling)

    def input_limit(self, scaling: Scaling, train_length: int | None, stated: int | None) -> None:
        """None: only config.json changes, so the tokenizer keeps its limit."""

    def scaled_config(
        self,
        scaling: Scaling,
        train_length: int | None,
        source: Source,
        tokenizer: Tokenizer,
        limit: int | None,
    ) -> dict[str, Any]:
        result = settings.scaled_config(self.config, self.rotary, scaling, train_length)
        keys = [key for key in {**self.config, **result} if self.config.get(key) != result.get(key)]
        record = {"scaling": scaling.to_json(), SOURCE_CONFIG: {key: self.config.get(key) for key in keys}}
        subfolder = source.subfolder
        origin = Provenance(source.root, source.commit, train_length, record, subfolder=subfolder)
        return {**result, PROVENANCE: origin.to_json()}

    def stored(self, folder: Path, checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
        return {}

    @property
    def tied_tensors(self) -> tuple[str, ...]:
        ties = self.config.get("tie_word_embeddings", self.rotary.model.ties) is True
        return HEADS if ties else ()

    def stock(self, stored: Config) -> Frequencies:
        return self.rotary.frequencies

    def scaled(self, stock: Frequencies, scaling: Scaling, tokens: int, layer: int = 0) -> Frequencies:
        return self.rotary.scaled(scaling, tokens)

    def change(self, scaling: Scaling) -> Change:
        return settings.change(self.rotary, scaling)

    def words(self, scaling: Scaling, trained: TrainLength, config: Config) -> Words:
        how = f"scaled for longer contexts: {scaling}" if scaling.method != "none" else "not scaled at all"
        length = f" (its trained length is {trained.origin})" if trained.tokens else ""
        return Words(
            kind="rotary",
            scaled=f"rotary positions {how}; {self.change(scaling)}{length}",
            differs="`config.json` differs",
            notes=NOTES + DYNAMIC_NOTES * bool(scaling.dynamic),
            auto_class=auto_class(config),
            task=task(config),
            tags=("rope", "ntk-rope"),
            code=False,
        )
