"""What a checkpoint is, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from converter import families
from converter.checkpoint import read_checkpoint, weight_index
from converter.families import Config, Family
from converter.scaling import Dynamic, Method, Request, Scaling
from converter.source import Source, open_source
from converter.trained import resolve, trained_length


@dataclass(frozen=True)
class Slopes:
    """One number per head, in the order of the heads."""

    stock: tuple[float, ...]
    """As trained."""
    scaled: tuple[float, ...] | None
    """As the scaling makes them; None without one."""
    factor: float | None
    """The scale factor a behind ``scaled``."""
    at_length: int | None
    """Tokens at which a dynamic scaling has that factor; None for a static one."""


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
        UnsupportedModel: it is not an ALiBi model of a supported family.
    """
    asked = any(value is not None for value in (scale, target_length, dynamic, rate)) or method != "ntk"
    request = Request(method, scale, target_length, dynamic, rate, train_length) if asked else None
    source = open_source(
        str(model), revision=revision, token=token, cache_dir=Path(cache_dir) if cache_dir else None
    )
    config = source.config()
    converted = families.converted(config)
    family = families.recognise(config) if converted else families.check(config)
    geometry = family.geometry(config)
    trained = trained_length(family, config, source, train_length)
    if request is not None:
        scaling = resolve(request, trained, source)
    else:
        scaling = Scaling.from_json(config.get("alibi_scaling") if converted else None)
    weights = _weights(source, config)
    return Inspection(
        source=source.name,
        commit=source.commit,
        family=family.name,
        model_type=config["model_type"],
        converted=converted,
        num_heads=geometry.num_heads,
        head_dim=geometry.head_dim,
        num_kv_heads=geometry.num_kv_heads,
        num_layers=geometry.num_layers,
        parameters=weights.parameters,
        dtype=weights.dtype,
        files=weights.files,
        train_length=trained.tokens,
        train_length_origin=trained.origin,
        alibi_scaling=scaling.to_json(),
        slopes=_slopes(family, config, scaling),
    )


@dataclass(frozen=True)
class _Weights:
    files: Mapping[str, int | None]
    parameters: int | None
    dtype: str | None


def _weights(source: Source, config: Config) -> _Weights:
    # Offline, the cache may hold the config alone, of which there is enough to say.
    unknown = source.offline and weight_index(source.files) is None
    files = {} if unknown else source.weights()
    declared = config.get("dtype", config.get("torch_dtype"))
    dtype = declared if isinstance(declared, str) else None
    if source.local and files:
        checkpoint = read_checkpoint(source.folder)
        return _Weights(checkpoint.files, checkpoint.parameters, next(iter(checkpoint.dtypes), dtype))
    counts = source.parameters or {}
    dtype = max(counts, key=lambda name: counts[name]) if counts else dtype
    return _Weights(files, sum(counts.values()) or None, dtype)


def _slopes(family: Family, config: Config, scaling: Scaling) -> Slopes:
    stock = family.stock_slopes(config)
    if scaling.method == "none":
        return Slopes(stock, None, None, None)
    length = None if scaling.train_length is None else 2 * scaling.train_length
    scaled = scaling.slopes(stock, length or 0)
    return Slopes(stock, scaled, scaling.factor_at(length or 0), length)
