"""Opens a checkpoint: a source, or what this tool wrote of one."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from converter.config import (
    PROVENANCE,
    Config,
    Provenance,
    ResultConfig,
    SourceConfig,
    read_provenance,
    without_implementation,
)
from converter.errors import UsageError, option
from converter.families import Family, converted_family
from converter.families.checks import (
    check_family,
    check_merged,
    check_one_save,
    check_plain,
    check_source,
    without_quantisation,
)
from converter.model import alibi_config, rotary_config
from converter.model.alibi import AlibiModel
from converter.model.model import Model
from converter.model.overrides import with_overrides
from converter.model.rotary import RotaryModel
from converter.rotary import settings
from converter.rotary.settings import Rotary
from converter.scaling.request import Request, ScalingOptions
from converter.scaling.scaling import read_scaling
from converter.source.keys import check_adapter, refuse_or_drop_keys
from converter.source.open import open_source
from converter.source.slopes_file import read_slopes_file
from converter.source.source import CONFIG, Source
from converter.source.tokenizer import with_known_class

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


def open_model(model: str | Path, *, progress: bool = False, **options: Unpack[SourceOptions]) -> Model:
    """Opens a checkpoint; of a Hub repository, only its config is downloaded.

    Raises ``SourceError``, ``UnsupportedModel``, or ``UsageError`` for options that do not fit.
    """
    train_length, cache_dir = options.get("train_length"), options.get("cache_dir")
    Request("none", train_length=train_length)  # which checks the length
    source = open_source(
        str(model),
        subfolder=options.get("subfolder"),
        revision=options.get("revision"),
        token=options.get("token"),
        cache_dir=Path(cache_dir) if cache_dir else None,
        progress=progress,
    )
    opened = read_model(source, train_length, options.get("overrides") or {})
    if opened.converted:
        check_one_save(source)
    if isinstance(opened, RotaryModel):
        opened.check_record()
    refuse_or_drop_keys(source, {CONFIG: opened.config_json}, opened.row_kinds)
    return opened


def read_model(
    source: Source, train_length: int | None = None, overrides: Mapping[str, Any] | None = None
) -> Model:
    """The model that these files hold, by config.json alone.

    Raises as ``open_model``, which also checks a result's other files, its record, and keys of libraries.
    """
    config_json = source.config()
    config, stale_quantisation = without_quantisation(source, config_json)
    fields: dict[str, Any] = {
        "source": source,
        "config_json": config_json,
        "given_length": train_length,
        "stale_quantisation": stale_quantisation,
    }
    family, origin = converted_family(config), read_provenance(config)
    if family is None and (origin is None or origin.rotary is None):
        return _read_source(source, config, overrides or {}, fields)
    check_merged(source.name, source.files)
    check_plain(config)
    origin = origin or Provenance(None, None, None)
    _check_same_overrides(overrides or {}, origin)
    fields |= {"provenance": origin, "overrides": origin.overrides}
    if family is not None:
        return _read_alibi_result(family, ResultConfig(config), origin, fields)
    return _read_rotary_result(ResultConfig(config), origin, fields)


def _read_source(
    source: Source, config: Config, overrides: Mapping[str, Any], fields: Mapping[str, Any]
) -> Model:
    """A source with this config and the user's values; ``fields`` are those of ``Model`` that are known."""
    check_adapter(source)
    config = with_overrides(with_known_class(without_implementation(config)), overrides)
    fields = {**fields, "source_config": SourceConfig(config), "overrides": overrides}
    found = check_source(config)
    if isinstance(found, Rotary):
        return RotaryModel(rotary=found, **fields)
    own = config.get("alibi_scaling") if found.own_scaling else None
    return AlibiModel(family=found, scaling=read_scaling(own), **fields)


def _check_same_overrides(overrides: Mapping[str, Any], origin: Provenance) -> None:
    """Raises ``UsageError`` for a value with which a repository was not converted."""
    for key, value in overrides.items():
        if key not in origin.overrides or origin.overrides[key] != value:
            raise UsageError(
                f"{option.overrides} {key} is for the config of a source, and this repository is converted; "
                "drop it, or convert the source with it"
            )


def _read_alibi_result(
    family: Family, config: ResultConfig, origin: Provenance, fields: Mapping[str, Any]
) -> AlibiModel:
    source_config = alibi_config.source_config(family, config, origin)
    return AlibiModel(
        family=check_family(family, source_config),
        source_config=source_config,
        scaling=read_scaling(config.get("alibi_scaling")),
        **fields,
    )


def _read_rotary_result(config: ResultConfig, origin: Provenance, fields: Mapping[str, Any]) -> RotaryModel:
    # This config is the one that would be loaded, so it is checked, whatever its record says.
    settings.check_code(config)
    source_config = rotary_config.source_config(config, origin)
    record = origin.rotary or {}
    return RotaryModel(
        rotary=settings.read_rotary(source_config),
        source_config=source_config,
        scaling=read_scaling(record.get("scaling"), f"config.json: {PROVENANCE}.rotary.scaling"),
        **fields,
    )


def open_with_request(
    model: str | Path, *, progress: bool = False, **options: Unpack[ModelOptions]
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
    return open_model(model, progress=progress, **cast("SourceOptions", source)), request
