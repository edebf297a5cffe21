"""An opened model: its source, config, recipe and trained length, each read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from converter import recipes
from converter.config import Config, read_provenance, without_implementation
from converter.errors import SourceError, UsageError
from converter.families import converted as is_converted
from converter.families.refusals import QUANTISED, check_merged
from converter.recipes import Recipe
from converter.recipes.overrides import overridden
from converter.scaling.request import Request, ScalingOptions, TrainLength
from converter.scaling.scaling import Scaling
from converter.source.checkpoint import Checkpoint, read_checkpoint
from converter.source.keys import check_adapter, settled
from converter.source.open import open_source
from converter.source.sentence_transformers import LIMITS, Nested, nested_files, stated_limit
from converter.source.slopes_file import read_slopes_file
from converter.source.source import CONFIG, Source
from converter.source.tokenizer import Tokenizer, read_tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SourceOptions(TypedDict, total=False):
    """Where a checkpoint is, and what its files do not say. All functions that open one take these."""

    train_length: int | None
    """Trained length in tokens, if the checkpoint is not a known one."""
    overrides: Mapping[str, Any] | None
    """Values for keys of the source's config.json that it lacks or has wrong. Dots in a key lead into objects
    (``attn_config.alibi``); None removes a key. They cannot lift a refusal, and a converted repository must
    have been made with the same values."""
    subfolder: str | None
    """Folder in the repository or local folder that holds the checkpoint, as in transformers."""
    revision: str | None
    """Branch, tag or commit of a Hub id."""
    token: str | None
    """Hub access token; HF_TOKEN or the saved login by default."""
    cache_dir: str | Path | None
    """Folder of the Hub cache, instead of the usual one."""


class ModelOptions(ScalingOptions, SourceOptions, total=False):
    """A checkpoint, and one scaling of it."""


@dataclass(frozen=True)
class Model:
    """A checkpoint, original or converted, whose positions can be scaled."""

    source: Source
    original: Config
    """The parsed config.json."""
    config: Config
    """The same with the user's values and, for a source, without the keys of an implementation."""
    recipe: Recipe
    trained: TrainLength
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """The values that the user gave for keys of the source's config."""

    @property
    def name(self) -> str:
        """The Hub id, or the local folder's own name."""
        return self.source.name

    def scaling(self, request: Request) -> Scaling:
        """The requested scaling; a ``UsageError`` if this model cannot have it."""
        scaling = request.resolve(self.trained, self.name, self.recipe.defaults)
        self.recipe.check_scaling(scaling)
        return scaling

    def input_limit(self, scaling: Scaling) -> int | None:
        """The tokens after which a conversion lets programs cut a text, see ``AlibiRecipe.input_limit``.

        From the Hub, the files that have the source's limit are downloaded.
        """
        stated = stated_limit(self.source.contents(LIMITS))
        return self.recipe.input_limit(scaling, self.trained.tokens, stated)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Which rows of ``keys.KEYS`` are for it."""
        positions = self.recipe.positions
        return ("any", positions, *([f"{positions} decoder"] if self.recipe.decoder else []))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What a conversion does with the tokenizer; from the Hub, its config is downloaded."""
        return read_tokenizer(self.source, self.config, code=bool(self.recipe.templates))

    @cached_property
    def nested(self) -> Nested:
        """Its files in subfolders; from the Hub, ``modules.json`` is downloaded."""
        return nested_files(self.source)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The headers of its weights, which must be in the source's folder; a ``SourceError`` if damaged."""
        try:
            return read_checkpoint(self.source.folder, self.recipe.tied_tensors)
        except SourceError:
            self.source.check(self.source.weights())  # what is wrong with a download is its digest
            raise

    @cached_property
    def stored(self) -> dict[str, Any]:
        """What the tensors add to the config; empty for a Hub repository, whose weights are not here."""
        if not (self.source.local and self.source.weights()):
            return {}
        return self.recipe.stored(self.source.folder, self.checkpoint, self.config)


def open_model(
    model: str | Path, *, progress: bool = False, converted: bool = True, **options: Unpack[SourceOptions]
) -> Model:
    """Opens a checkpoint, also a converted one unless ``converted`` is False; downloads only its config.

    Raises ``SourceError``, ``UnsupportedModel``, ``AlreadyConverted``, or ``UsageError`` for options that do
    not fit.
    """
    train_length, cache_dir = options.get("train_length"), options.get("cache_dir")
    overrides = options.get("overrides") or {}
    Request("none", train_length=train_length)
    source = open_source(
        str(model),
        subfolder=options.get("subfolder"),
        revision=options.get("revision"),
        token=options.get("token"),
        cache_dir=Path(cache_dir) if cache_dir else None,
        progress=progress,
    )
    config = original = source.config()
    if is_converted(config):
        check_merged(source.name, source.files)
        _check_recorded(config, overrides)
    else:
        check_adapter(source)
        config = overridden(without_implementation(config), overrides)
        # transformers 4.57 only looks whether such a key is there.
        config = {key: value for key, value in config.items() if key not in QUANTISED or value is not None}
    recipe = recipes.of_checkpoint(config) if converted else recipes.of_source(config)
    trained = recipe.trained_length(source, train_length)
    opened = Model(source, original, config, recipe, trained, overrides)
    settled(source, {CONFIG: original}, opened.kinds)
    return opened


def open_with_request(
    model: str | Path, *, progress: bool = False, converted: bool = True, **options: Unpack[ModelOptions]
) -> tuple[Model, Request]:
    """Opens a checkpoint as ``open_model`` does, and reads the scaling that is asked for."""
    source = {name: value for name, value in options.items() if name in SourceOptions.__annotations__}
    scaling: dict[str, Any] = {name: value for name, value in options.items() if name not in source}
    for name in scaling.keys() - ScalingOptions.__annotations__.keys():
        near = get_close_matches(name, ModelOptions.__annotations__, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"there is no option {name!r}{meant}")
    if scaling.get("slopes") is not None:
        scaling["slopes"] = read_slopes_file(scaling["slopes"])
    request = Request(train_length=options.get("train_length"), **scaling)
    return open_model(model, progress=progress, converted=converted, **cast("SourceOptions", source)), request


def _check_recorded(config: Config, overrides: Mapping[str, Any]) -> None:
    """Raises ``UsageError`` for values that a converted repository was not made with."""
    provenance = read_provenance(config)
    recorded = {} if provenance is None else provenance.overrides
    for key, value in overrides.items():
        if key not in recorded or recorded[key] != value:
            raise UsageError(
                f"`overrides` {key} is for the config of a source, and this repository is converted; drop "
                "it, or convert the source with it"
            )
