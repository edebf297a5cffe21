"""A user's values for keys of a source's config.json: ``--set KEY=VALUE``.

They answer what the config leaves open (``Undecided``), and correct what it says wrongly. They cannot lift
any other refusal: see ``_check_refusals``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

from converter.config import PROVENANCE, Config, is_count
from converter.errors import SourceError, Undecided, UnsupportedModel, UsageError, option
from converter.families import SLOPES
from converter.families.checks import QUANTISED_KEYS, check_source
from converter.source import jsonfile

FIXED = ("model_type", "auto_map", "alibi_scaling", "_name_or_path", PROVENANCE, SLOPES, *QUANTISED_KEYS)
"""Keys that say what a checkpoint is and where it comes from; a user's word cannot change that."""
SIZES = (
    ("n_head", "n_heads", "num_attention_heads"),
    ("num_kv_heads", "n_head_kv", "num_key_value_heads", "attn_config.kv_n_heads"),
    ("hidden_size", "n_embed", "n_embd", "d_model"),
    ("n_layer", "n_layers", "num_hidden_layers"),
    ("vocab_size",),
    ("head_dim",),
)
"""The names of each size that the weights were made with."""


def parse(text: str) -> tuple[str, Any]:
    """Key and value of ``KEY=VALUE``, or a ``UsageError``; a value that is not valid JSON is a string."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")) or not text.isprintable():
        raise UsageError(
            f"{option.overrides} {text[:80]!r} is not KEY=VALUE, e.g. {option.overrides} norm_head=true"
        )
    try:
        return key, jsonfile.parse(value.encode(), key)
    except SourceError:
        return key, value


def set_values(overrides: Mapping[str, Any]) -> list[str]:
    """The values as ``--set`` takes them: KEY=VALUE."""
    return [f"{key}={_shown(value)}" for key, value in overrides.items()]


def with_overrides(config: Config, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a source's config with the user's values: dots in a key lead into objects, None removes one.

    Raises ``UsageError`` for a key that cannot be set, ``UnsupportedModel`` if the source is refused and the
    values cannot change that, and ``SourceError`` for an impossible value.
    """
    if not overrides:
        return dict(config)
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
        raise UsageError(f"{option.overrides} is {overrides!r:.80}, not an object of keys and values")
    for key, value in overrides.items():
        _check_settable(key, value)
    result = _with(config, overrides)
    _check_sizes(config, result)
    check_source(result)
    _check_refusals(config, overrides)
    return result


def _check_settable(key: str, value: Any) -> None:
    """Raises ``UsageError`` for a key that cannot be set, or a value that config.json cannot hold."""
    root, *parts = key.split(".")
    if root in FIXED:
        raise UsageError(
            f"{option.overrides} {key}: this key says what the checkpoint is or where it comes from, and "
            "cannot be set"
        )
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{option.overrides} {key}: config.json cannot hold {value!r:.80}") from error
    if not all([root, *parts]):
        raise UsageError(f"{option.overrides} {key!r}: a part of this key is empty")


def _check_sizes(before: Config, after: Config) -> None:
    """Raises ``UsageError`` if a size that the config states would change; one of two that differ may go."""
    for names in SIZES:
        stated, found = _sizes(before, names), _sizes(after, names)
        if stated and not (found and set(found.values()) <= set(stated.values())):
            name, value = next(iter(stated.items()))
            raise UsageError(
                f"config.json states {name} {value}, and the weights belong to it; {option.overrides} cannot "
                "change a size"
            )


def _sizes(config: Config, names: Iterable[str]) -> dict[str, int]:
    found = {name: reduce(_inside, name.split("."), config) for name in names}
    return {name: value for name, value in found.items() if is_count(value)}


def _inside(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _check_refusals(config: Config, overrides: Mapping[str, Any]) -> None:
    """Raises ``UnsupportedModel`` if the source is accepted only because a value contradicts it.

    An accepted config has no refusal to lift. One that leaves something open, or has an impossible value, may
    hide a refusal, which shows when all values but the one that lifts it are set.
    """
    parts = [{name: overrides[name] for name in overrides if name != left_out} for left_out in overrides]
    for part in ({}, *parts):
        try:
            check_source(_with(config, part))
        except (Undecided, SourceError):
            continue
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{error.message}; {option.overrides} cannot change that") from error
        if not part:
            return


def _with(config: Config, overrides: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(config))
    for key, value in overrides.items():
        *path, last = key.split(".")
        place = result
        for depth, name in enumerate(path):
            inner = place.get(name)
            if inner is None:
                inner = place[name] = {}
            if not isinstance(inner, dict):
                named = ".".join(path[: depth + 1])
                raise UsageError(f"{option.overrides} {key}: {named} is {inner!r}, not an object")
            place = inner
        if isinstance(place.get(last), dict) and place[last]:
            raise UsageError(
                f"{option.overrides} {key}: {key} is an object; set its keys one by one: {option.overrides} "
                f"{key}.KEY=VALUE"
            )
        if value is None:
            place.pop(last, None)
        else:
            place[last] = copy.deepcopy(value)
    return result


def _shown(value: Any) -> str:
    """A value as ``parse`` reads it."""
    if isinstance(value, str) and value.isprintable() and parse(f"key={value}")[1] == value:
        return value
    return json.dumps(value)
