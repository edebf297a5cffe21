"""``Model``: a checkpoint that was opened, a source or what a conversion wrote of one.

Its configs, and how one becomes another:

    config_json         read from the folder
    source_config       of a source: config_json without what only chooses an implementation, and with --set;
                        of a result: found again from it (``alibi_config``, ``rotary_config``: source_config)
    tensor_settings     the keys that only the tensors tell, such as stored slopes
    make_result_config  from source_config, for a scaling (the same modules: result_config); a result's file
                        has it and the tensor settings
    result_config       config_json, of a result
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from converter.config import Config, Geometry, Provenance, ResultConfig, SourceConfig, with_value
from converter.errors import SourceError, UnsupportedModel, UsageError, option
from converter.families.checks import quantisation_sign
from converter.model.card_text import CardText
from converter.rotary.settings import Change
from converter.scaling.request import Defaults, Request, TrainLength
from converter.scaling.scaling import UNSCALED, Scaling
from converter.source.checkpoint import Checkpoint, quantised, read_checkpoint
from converter.source.sentence_transformers import INPUT_LIMITS, Nested, nested_files
from converter.source.source import Source
from converter.source.tokenizer import Tokenizer, read_tokenizer
from converter.source.weight_files import check_weights, weight_files
from converter.weights.finite import Scan

Positions = tuple[float, ...]
"""Slopes, one for each head, or rotary frequencies, one for each pair of channels."""


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """A checkpoint whose positions can be scaled; ``open_model`` makes one.

    A repository that a conversion wrote is opened as its source is, so that it can be converted again:
    ``source_config`` is that of the source, while ``scaling`` and ``provenance`` say what was made of it.
    """

    source: Source
    config_json: Config
    """config.json as it lies in the folder; for a graph of another task, with the class of that."""
    source_config: SourceConfig
    """The config of the source, which a conversion starts from. It has the user's values, and no keys that
    choose an implementation."""
    scaling: Scaling = UNSCALED
    """What it computes with."""
    provenance: Provenance | None = None
    """Where it comes from, if this tool wrote it; None for a source."""
    given_length: int | None = None
    """The trained length that the user gave, in tokens."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """The values that the user gave for keys of the source's config."""
    stale_quantisation: Sequence[str] = ()
    """Keys of its config.json, and files, that speak of a quantisation that its weights do not have."""

    positions: ClassVar[Literal["alibi", "rotary"]]

    @property
    def origin(self) -> Provenance:
        """What a conversion records of where it comes from."""
        source = self.source
        known = self.provenance or Provenance(source.root, source.commit, None, subfolder=source.subfolder)
        return replace(known, train_length=self.trained.tokens, overrides=self.overrides)

    # What the two kinds of positions differ in.

    @property
    @abstractmethod
    def kind(self) -> str:
        """The name of the ALiBi family, or "rotary"."""

    @property
    @abstractmethod
    def model_type(self) -> str:
        """The ``model_type`` of a result."""

    @property
    @abstractmethod
    def geometry(self) -> Geometry:
        """The sizes of its attention; raises ``SourceError`` for a missing or impossible one."""

    @property
    @abstractmethod
    def defaults(self) -> Defaults:
        """What scales the model where the user leaves it open."""

    @property
    @abstractmethod
    def ignored_tensors(self) -> re.Pattern[str]:
        """Finds the names of stored tensors that no model computes with, such as buffers of causal masks."""

    @property
    @abstractmethod
    def tied_tensors(self) -> Sequence[str]:
        """Possible names of the language model's head if a result ties it to the embeddings, else none."""

    @abstractmethod
    def _trained(self) -> TrainLength:
        """The trained length that the source itself tells."""

    @abstractmethod
    def check_scaling(self, scaling: Scaling) -> None:
        """Raises ``UsageError`` for a scaling that this model cannot compute."""

    @abstractmethod
    def stock(self, tensor_settings: Config) -> Positions:
        """The slopes or frequencies as trained.

        ``tensor_settings`` are the model's, or all of a result's config. With {}, a source's stored slopes
        are left out.
        """

    @abstractmethod
    def scaled(self, stock: Positions, scaling: Scaling, tokens: int, layer: int = 0) -> Positions:
        """The slopes or frequencies of a layer for a sequence of ``tokens`` tokens."""

    @abstractmethod
    def make_result_config(self, scaling: Scaling, tokenizer: Tokenizer, limit: int | None) -> dict[str, Any]:
        """The config.json of a result, without the settings that only its tensors tell.

        ``limit`` is the input limit in tokens; None to keep the source's.
        """

    @property
    @abstractmethod
    def card_text(self) -> CardText:
        """What a result's card says of its scaling."""

    # What only one of them has.

    @property
    def templates(self) -> Sequence[str]:
        """Names of the code files of a result."""
        return ()

    @property
    def exact_tensors(self) -> Sequence[str]:
        """Names of the tensors that keep their dtype when the weights are cast to another."""
        return ()

    @property
    def notes(self) -> Sequence[str]:
        """What a user should know about this source; each is a sentence without its full stop."""
        return ()

    @property
    def decoder(self) -> bool:
        """Whether it is causal."""
        return True

    def read_tensor_settings(self, folder: Path, checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
        """The keys that a folder's tensors add to a config; refuses tensors that contradict it."""
        del folder, checkpoint, config
        return {}

    def input_limit(self, scaling: Scaling) -> int | None:
        """The tokens after which programs should cut a text; None if the source's limits stay as they are.

        From the Hub, the files that have the source's limit are downloaded.
        """
        del scaling
        return None

    def change(self, scaling: Scaling) -> Change | None:
        """How a scaling changes rotary positions; None for ALiBi."""
        del scaling
        return None

    # What they share.

    @property
    def name(self) -> str:
        """The Hub id, or the local folder's own name."""
        return self.source.name

    @property
    def folder(self) -> Path:
        return self.source.folder

    @property
    def converted(self) -> bool:
        """Whether a conversion wrote it."""
        return self.provenance is not None

    @property
    def result_config(self) -> ResultConfig:
        """The config.json of a repository that a conversion wrote; this model must be one."""
        assert self.converted
        return ResultConfig(self.config_json)

    @cached_property
    def trained(self) -> TrainLength:
        """The trained length: as given, else as recorded by a conversion, else as the source tells it."""
        if self.given_length is not None:
            return TrainLength(self.given_length, "as given")
        if self.provenance is not None and self.provenance.train_length is not None:
            return TrainLength(self.provenance.train_length, "recorded when it was converted")
        if self.converted and self.scaling.dynamic:
            return TrainLength(self.scaling.train_length, "of the scaling that it was converted with")
        return self._trained()

    def resolve(self, request: Request) -> Scaling:
        """The requested scaling, or that of a converted model if none is asked for.

        Raises ``UsageError`` if this model cannot have it.
        """
        if self.converted and not request.asked:
            if self.scaling.dynamic and self.trained.tokens != self.scaling.train_length:
                raise UsageError(
                    f"{self.name} is scaled from {self.scaling.train_length} tokens on; to scale it from "
                    f"{self.trained.tokens}, give {option.dynamic} {self.scaling.dynamic} or another scaling "
                    "too"
                )
            return self.scaling
        scaling = request.resolve(self.trained, self.name, self.defaults)
        self.check_scaling(scaling)
        return scaling

    def recommended(self, request: Request) -> Scaling | None:
        """What this decoder would get by default, where a target length without a method gives one factor.

        None for every other request, and for a model that has no default.
        """
        if request.target_length is None or request.method is not None:
            return None
        if not self.decoder or self.defaults.dynamic is None:
            return None
        scaling = Request().resolve(self.trained, self.name, self.defaults)
        try:
            self.check_scaling(scaling)
        except UsageError:  # it cannot have its default
            return None
        return scaling

    def contents(self, names: Iterable[str]) -> dict[str, Any]:
        """What these JSON files hold, by name; in a converted repository, with the source's input limits."""
        found = self.source.contents(names)
        limits = (self.provenance.limits if self.provenance else None) or {}
        for name in limits.keys() & found.keys() & INPUT_LIMITS.keys():
            if isinstance(found[name], dict):
                found[name] = with_value(found[name], INPUT_LIMITS[name], limits[name])
        return found

    @property
    def row_kinds(self) -> tuple[str, ...]:
        """Which rows of ``keys.KEYS`` are for it."""
        return ("any", self.positions, *([f"{self.positions} decoder"] if self.decoder else []))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What a conversion does with the tokenizer; from the Hub, its config is downloaded."""
        return read_tokenizer(self.source, self.source_config, code=bool(self.templates))

    @cached_property
    def nested(self) -> Nested:
        """Its files in subfolders; from the Hub, ``modules.json`` is downloaded."""
        return nested_files(self.source)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The headers of its weights, which must be in the source's folder; a ``SourceError`` if damaged."""
        try:
            return read_checkpoint(self.folder, self.tied_tensors)
        except SourceError:
            # What is wrong with a download is its digest.
            check_weights(self.source, weight_files(self.source))
            raise

    def check_without_verification(self) -> None:
        """Raises ``UnsupportedModel`` if only verification can show that the weights are not quantised."""
        if self.stale_quantisation:
            error = quantised(quantisation_sign(self.stale_quantisation))
            raise UnsupportedModel(
                f"{error.message}; if a merge left that, verification shows it: leave out {option.no_verify}"
            )

    @property
    def elements(self) -> dict[str, int]:
        """safetensors dtype of the stored weights -> number of elements, as far as it is known."""
        if self.source.local:
            return self.checkpoint.elements
        return dict(self.source.parameters or {})

    @cached_property
    def tensor_settings(self) -> dict[str, Any]:
        """What ``read_tensor_settings`` adds to the source's config; empty if the tensors are not here."""
        if not (self.source.local and weight_files(self.source)):
            return {}
        return self.read_tensor_settings(self.folder, self.checkpoint, self.source_config)

    def scan(self, file: str, remedy: str) -> Scan:
        """Finds weights that are NaN or infinite in the bytes of a file; ``remedy`` ends its message."""
        tensors = (tensor for tensor in self.checkpoint.tensors.values() if tensor.file == file)
        return Scan(tensors, file, self.ignored_tensors, remedy)
