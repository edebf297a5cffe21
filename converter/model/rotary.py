"""``RotaryModel``: its result has a new config.json, and all else stays the same."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from converter.config import PROVENANCE, Config, Geometry, without_implementation
from converter.errors import SourceError, UsageError
from converter.families.checks import QUANTISED_KEYS
from converter.model import rotary_config
from converter.model.card_text import CardText, auto_class, task
from converter.model.model import Model
from converter.rotary import settings
from converter.rotary.settings import Change, Rotary
from converter.scaling.frequencies import Frequencies
from converter.scaling.request import NTK, Defaults, TrainLength
from converter.scaling.scaling import Scaling
from converter.source.tokenizer import Tokenizer, with_known_class

NOTES = """\
It loads as its source does, with transformers' own class. The repository contains no code."""
DYNAMIC_NOTES = """

The base depends on the longest sequence of a batch, padding included. transformers keeps the largest base
until a pass has fewer tokens than `max_position_embeddings`; scaling therefore starts at the length in that
key. Cached keys keep the rotation they got when they were computed, so a text read in one pass and the same
text continued from a cache give different numbers."""
HEAD_TENSORS = ("lm_head.weight", "embed_out.weight")
"""Names of the language model's head; GPT-NeoX uses the second, up to transformers 4."""
BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attention\.bias|masked_bias|(\w+_)?mask)$")
"""Buffers that old checkpoints store and no version of a model reads."""


@dataclass(frozen=True, kw_only=True)
class RotaryModel(Model):
    """A checkpoint with rotary positions; members without a word are explained in ``Model``."""

    rotary: Rotary

    positions = "rotary"
    kind = "rotary"
    defaults: ClassVar[Defaults] = Defaults(None, NTK, settings.YARN_RAMP)
    ignored_tensors = BUFFERS

    @property
    def model_type(self) -> str:
        return self.rotary.model.model_type

    @property
    def geometry(self) -> Geometry:
        return self.rotary.geometry

    def _trained(self) -> TrainLength:
        """``max_position_embeddings``, the trained length of most rotary models.

        If a sliding window is shorter than that key, attention was never trained at such distances.
        """
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

    def make_result_config(self, scaling: Scaling, tokenizer: Tokenizer, limit: int | None) -> dict[str, Any]:
        del tokenizer, limit  # the tokenizer keeps its limit
        return rotary_config.result_config(self.rotary, self.source_config, scaling, self.origin)

    def check_record(self) -> None:
        """Raises ``SourceError`` if config.json is not what its record makes of the source's."""
        if self.provenance is None:
            return
        try:
            self.check_scaling(self.scaling)
        except UsageError as error:
            raise SourceError(
                f"config.json: the scaling in its record is impossible: {error.message}"
            ) from error
        length = self.provenance.train_length
        recorded = settings.scaled_config(self.source_config, self.rotary, self.scaling, length)
        recorded = settings.undo_saving(recorded)
        found = settings.undo_saving(with_known_class(without_implementation(self.config_json)))
        found = {key: value for key, value in found.items() if key not in QUANTISED_KEYS}
        for key in (found.keys() | recorded.keys()) - {PROVENANCE}:
            if found.get(key) != recorded.get(key):
                raise SourceError(
                    f"config.json has {key} {found.get(key)!r}, and its record of the conversion says "
                    f"{recorded.get(key)!r}; put that back, or convert the original again"
                )

    @property
    def tied_tensors(self) -> tuple[str, ...]:
        ties = self.source_config.get("tie_word_embeddings", self.rotary.model.ties) is True
        return HEAD_TENSORS if ties else ()

    def stock(self, tensor_settings: Config) -> Frequencies:
        return self.rotary.frequencies

    def scaled(self, stock: Frequencies, scaling: Scaling, tokens: int, layer: int = 0) -> Frequencies:
        return self.rotary.scaled(scaling, tokens)

    def change(self, scaling: Scaling) -> Change:
        return settings.change(self.rotary, scaling)

    @property
    def card_text(self) -> CardText:
        scaling = self.scaling
        how = f"scaled for longer contexts: {scaling}" if scaling.method != "none" else "not scaled at all"
        return CardText(
            position_kind="rotary",
            scaled_positions=f"rotary positions {how}; {self.change(scaling)}",
            explanation="",  # ``change`` says it in numbers
            differences="`config.json` differs",
            loading_notes=NOTES + DYNAMIC_NOTES * bool(scaling.dynamic),
            auto_class=auto_class(self.result_config),
            task=task(self.result_config),
            tags=("rope", "ntk-rope"),
            has_code=False,
        )
