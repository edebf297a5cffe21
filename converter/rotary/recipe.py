"""The recipe of a rotary checkpoint: a new config.json, beside everything else as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from converter.card import Words, auto_class
from converter.checkpoint import Checkpoint
from converter.errors import SourceError, UnsupportedModel
from converter.families import Config, Geometry, check_convertible, check_plain
from converter.families.base import count
from converter.own_code import OwnCode
from converter.repository import PROVENANCE, provenance
from converter.rotary import settings
from converter.rotary.frequencies import Frequencies
from converter.rotary.settings import Change, Rotary
from converter.scaling import Scaling
from converter.source import Source
from converter.trained import TrainLength, recorded_length

if TYPE_CHECKING:
    from converter.verification import Check

RECORD = "rotary"
"""Key of the provenance with the scaling and, under ``CHANGED``, the source's values of what it changed."""
CHANGED = "source_config"
NOTES = """\
It loads as its source does, by transformers' own class: nothing here is code."""
DYNAMIC_NOTES = """

The base depends on the longest row of a batch, padding included, and transformers keeps the largest that
it has reached until a pass of fewer tokens than `max_position_embeddings`, which is why that key says where
scaling starts. Keys in a cache stay turned by the base of their time: a text that is read at once and the
same text continued from a cache give different numbers."""
HEADS = ("lm_head.weight", "embed_out.weight")
"""What the language model's head is called; the second by GPT-NeoX, up to transformers 4."""
EXPORT = "optimum-cli export onnx --model DIR"


@dataclass(frozen=True)
class RotaryRecipe:
    """See ``converter.recipe.Recipe``."""

    config: Config
    """The source's; of a converted repository, what it was made from."""
    rotary: Rotary
    own_scaling: Scaling
    converted: bool
    positions: Literal["rotary"] = "rotary"

    @classmethod
    def of_source(cls, config: Config) -> RotaryRecipe:
        """For a source that can be converted."""
        check_convertible(config)
        return cls(config, settings.read(config), Scaling("none"), converted=False)

    @classmethod
    def of_checkpoint(cls, config: Config) -> RotaryRecipe:
        """For a source or a converted repository."""
        origin = config.get(PROVENANCE)
        record = origin.get(RECORD) if isinstance(origin, Mapping) else None
        if record is None:
            return cls.of_source(config)
        if not isinstance(record, Mapping) or not isinstance(record.get(CHANGED), Mapping):
            raise SourceError(f"config.json: {PROVENANCE} is damaged; convert the checkpoint again")
        # As it stands: what the record says of the source is not what would be loaded.
        check_plain(config)
        settings.check_code(config)
        source = {**config, **record[CHANGED]}
        scaling = Scaling.from_json(record.get("scaling"))
        return cls(source, settings.read(source), scaling, converted=True)

    @property
    def name(self) -> str:
        return "rotary"

    @property
    def model_type(self) -> str:
        return self.rotary.model.model_type

    @property
    def templates(self) -> tuple[str, ...]:
        return ()

    @property
    def default_dynamic(self) -> None:
        return None

    @property
    def geometry(self) -> Geometry:
        heads = count(self.config, "num_attention_heads")
        return Geometry(
            num_heads=heads,
            head_dim=self.rotary.head_dim,
            num_layers=count(self.config, "num_hidden_layers"),
            num_kv_heads=count(self.config, "num_key_value_heads", default=heads),
        )

    def trained_length(self, source: Source, given: int | None) -> TrainLength:
        """As given or recorded, else ``max_position_embeddings``, which rotary models are trained up to.

        Where a sliding window lets attention see less, that key says nothing about distances.
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

    def check_graph(self, config: Config) -> None:
        rope_scaling = config.get(settings.SCALING)
        if rope_scaling and rope_scaling["type"] == "dynamic":
            raise UnsupportedModel(
                f"graphs of this tool are for ALiBi models, and {self.model_type!r} is rotary; an exporter "
                "that traces it would freeze its dynamic scaling: convert it with --scale and use optimum"
            )
        raise UnsupportedModel(
            f"graphs of this tool are for ALiBi models, and {self.model_type!r} is rotary; convert it "
            f"without --onnx and export the result with optimum, as any of its type: {EXPORT}"
        )

    def scaled_config(self, scaling: Scaling, train_length: int | None, source: Source) -> dict[str, Any]:
        result = settings.scaled_config(self.config, self.rotary, scaling, train_length)
        keys = [key for key in {**self.config, **result} if self.config.get(key) != result.get(key)]
        record = {"scaling": scaling.to_json(), CHANGED: {key: self.config.get(key) for key in keys}}
        return {**result, PROVENANCE: {**provenance(source, train_length), RECORD: record}}

    def stored(self, folder: Path, checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
        return {}

    @property
    def exact_tensors(self) -> tuple[str, ...]:
        return ()

    @property
    def tied_tensors(self) -> tuple[str, ...]:
        ties = self.config.get("tie_word_embeddings", self.rotary.model.ties) is True
        return HEADS if ties else ()

    def stock(self, stored: Config) -> Frequencies:
        return self.rotary.frequencies

    def scaled(self, stock: Frequencies, scaling: Scaling, tokens: int) -> Frequencies:
        return self.rotary.scaled(scaling, tokens)

    def change(self, scaling: Scaling) -> Change:
        return settings.change(self.rotary, scaling)

    def verify(self, folder: Path, scaling: Scaling, own_code: OwnCode | None = None) -> Sequence[Check]:
        from converter.verification.check import Check
        from converter.verification.rotary import verify

        checks = verify(folder, self.rotary, scaling)
        if own_code is not None:
            # A rotary source that brings code is not accepted, so there is none.
            checks.append(Check("own code", own_code.missing or "", skipped=True))
        return checks

    @property
    def decoder(self) -> bool:
        return True

    @property
    def notes(self) -> Sequence[str]:
        return ()

    def words(self, scaling: Scaling, trained: TrainLength, config: Config) -> Words:
        how = f"scaled for longer contexts: {scaling}" if scaling.method != "none" else "not scaled at all"
        length = f" (its trained length is {trained.origin})" if trained.tokens else ""
        return Words(
            kind="rotary",
            scaled=f"rotary positions {how}; {self.change(scaling)}{length}",
            differs="`config.json` differs",
            notes=NOTES + DYNAMIC_NOTES * (scaling.dynamic is not None),
            auto_class=auto_class(config),
            tags=("rope", "ntk-rope"),
            code=False,
        )
