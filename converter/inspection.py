"""What a checkpoint is, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from converter import recipe as recipes
from converter.checkpoint import Checkpoint, read_checkpoint, weight_index
from converter.families import Config
from converter.recipe import Recipe
from converter.rotary.settings import Change
from converter.scaling import Dynamic, Method, Request, Scaling
from converter.source import Source, open_source
from converter.trained import resolve


@dataclass(frozen=True)
class Slopes:
    """Slopes, one per head in the order of the heads; of rotary positions frequencies, one per pair."""

    stock: tuple[float, ...]
    """As trained."""
    scaled: tuple[float, ...] | None
    """As the scaling makes them; None without one."""
    factor: float | None
    """The scale factor a behind ``scaled``."""
    at_length: int | None
    """Tokens at which a dynamic scaling has that factor; None for a static one."""


NONE = Slopes((), None, None, None)


@dataclass(frozen=True)
class Inspection:
    """A checkpoint, described. Sizes are counts of elements or bytes as their names say."""

    source: str
    commit: str | None
    family: str
    model_type: str
    converted: bool
    num_heads: int
    head_dim: int
    num_kv_heads: int
    num_layers: int
    parameters: int | None
    """Stored elements; None where only loading would tell (``.bin`` files)."""
    dtype: str | None
    """As the files store it (safetensors' spelling), else as the config says."""
    files: Mapping[str, int | None]
    """Weight files and their bytes."""
    train_length: int | None
    train_length_origin: str
    alibi_scaling: dict[str, Any] | None
    """What is, or with the given options would be, in the config."""
    slopes: Slopes
    """Of ALiBi; empty of rotary positions."""
    frequencies: Slopes
    """Of rotary positions, in radians per token; empty of ALiBi."""
    rotary: Change | None
    """What the scaling makes of rotary positions; None of ALiBi."""

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return asdict(self)


def inspect(
    model: str | Path,
    *,
    scale: float | None = None,
    target_length: int | None = None,
    method: Method = "ntk",
    dynamic: Dynamic | None = None,
    rate: float | None = None,
    train_length: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
) -> Inspection:
    """Describes a checkpoint, stock or converted, and its slopes under a scaling.

    Of a Hub repository only the config (and the index of the weights) is downloaded.

    Args:
        model: a local folder, or a Hub id.
        scale, target_length, method, dynamic, rate, train_length: as for ``convert``; without any
            of scale, target_length and dynamic, a converted repository shows its own scaling. The
            scaled slopes of a dynamic scaling are those at twice the trained length.
        revision, token, cache_dir: as for ``convert``.

    Raises:
        UsageError: options that contradict each other.
        SourceError: the checkpoint is missing, unreadable or damaged.
        UnsupportedModel: it is no ALiBi model of a supported family, nor a rotary one that can be scaled.
    """
    asked = any(value is not None for value in (scale, target_length, dynamic, rate)) or method != "ntk"
    request = Request(method, scale, target_length, dynamic, rate, train_length) if asked else None
    source = open_source(
        str(model), revision=revision, token=token, cache_dir=Path(cache_dir) if cache_dir else None
    )
    config = source.config()
    recipe = recipes.of_checkpoint(config)
    geometry = recipe.geometry
    trained = recipe.trained_length(source, train_length)
    if request is not None:
        scaling = resolve(request, trained, source, recipe.default_dynamic)
        recipe.check_scaling(scaling)
    else:
        scaling = recipe.own_scaling
    weights = _weights(source, config)
    stored = {} if weights.checkpoint is None else recipe.stored(source.folder, weights.checkpoint, config)
    found = _slopes(recipe, stored, scaling)
    rotary = recipe.positions == "rotary"
    return Inspection(
        source=source.name,
        commit=source.commit,
        family=recipe.name,
        model_type=config.get("model_type") or "not given",  # as in DNABERT-2
        converted=recipe.converted,
        num_heads=geometry.num_heads,
        head_dim=geometry.head_dim,
        num_kv_heads=geometry.num_kv_heads,
        num_layers=geometry.num_layers,
        parameters=weights.parameters,
        dtype=weights.dtype,
        files=weights.files,
        train_length=trained.tokens,
        train_length_origin=trained.origin,
        alibi_scaling=None if rotary else scaling.to_json(),
        slopes=NONE if rotary else found,
        frequencies=found if rotary else NONE,
        rotary=recipe.change(scaling),
    )


@dataclass(frozen=True)
class _Weights:
    files: Mapping[str, int | None]
    parameters: int | None
    dtype: str | None
    checkpoint: Checkpoint | None = None
    """Of a local source."""


def _weights(source: Source, config: Config) -> _Weights:
    # Offline, the cache may hold the config alone, of which there is enough to say.
    unknown = source.offline and weight_index(source.files) is None
    files = {} if unknown else source.weights()
    declared = config.get("dtype", config.get("torch_dtype"))
    dtype = declared if isinstance(declared, str) else None
    if source.local and files:
        checkpoint = read_checkpoint(source.folder)
        stored = next(iter(checkpoint.dtypes), dtype)
        return _Weights(checkpoint.files, checkpoint.parameters, stored, checkpoint)
    counts = source.parameters or {}
    dtype = max(counts, key=lambda name: counts[name]) if counts else dtype
    return _Weights(files, sum(counts.values()) or None, dtype)


def _slopes(recipe: Recipe, stored: Config, scaling: Scaling) -> Slopes:
    stock = recipe.stock(stored)
    if scaling.method == "none":
        return Slopes(stock, None, None, None)
    length = None if scaling.train_length is None else 2 * scaling.train_length
    scaled = recipe.scaled(stock, scaling, length or 0)
    return Slopes(stock, scaled, scaling.factor_at(length or 0), length)
