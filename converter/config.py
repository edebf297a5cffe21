"""Reads a config.json: sizes, numbers and, in a converted one, the record of its source."""

from __future__ import annotations

import importlib.metadata
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NewType, TypeGuard, TypeVar, get_args

from converter._version import TESTED, __version__
from converter.errors import SourceError

Config = Mapping[str, Any]
"""A parsed config.json."""

Value = TypeVar("Value")

SourceConfig = NewType("SourceConfig", Config)
"""A config.json as a source has it, read or found again from a result: a source's class and model_type."""
ResultConfig = NewType("ResultConfig", Config)
"""A config.json that a conversion wrote: what the result's code reads, the scaling, and the record."""

Dtype = Literal["fp32", "fp16", "bf16"]
"""To which weights can be rounded."""
Weights = Literal["original", "other", "unknown"]
"""Whether the weights are those of the source, apart from their dtype; a record has what was known then."""

PROVENANCE = "ntk_convert"
"""Key of a converted config that records where it comes from."""
ROTARY = "rotary"
"""Key in a rotary model's record: its scaling and, under ``SOURCE_CONFIG``, the values that were replaced."""
SOURCE_CONFIG = "source_config"
DTYPE = "dtype"
"""Key in a record: the value of ``--dtype``, if the weights were rounded."""
OVERRIDES = "set"
"""Key in the record of a conversion: the values of ``--set``."""
FINE_TUNED = "fine_tuned"
"""Key that older versions wrote for a model whose weights are other than the source's."""
STEP = "from"
"""Key in the record of a model that was converted again when its weights may have been others."""
RECORDED = (
    *("source", "commit", "version", "transformers", "tested_transformers", "train_length", "weights"),
    *("limits", "subfolder", ROTARY, OVERRIDES, STEP, DTYPE, FINE_TUNED),
)
"""The keys of a record, of this version and of older ones."""
WEIGHTS: tuple[Weights, ...] = ("original", "other", "unknown")

IMPLEMENTATION = re.compile(
    r"_?(attn|experts)_implementation(_internal|_autoset)?|_?attn_impl|_flash_attn_2_enabled"
    r"|(use_)?(flash|memory_efficient|xformers|sdpa)_(attn|attention)(_2|_3)?|use_(xformers|sdpa|triton)"
    r"|(use_)?fused_(?!qkv$)\w+"
)
"""Keys that choose how a model is computed, and not what. MPT's ``fused_qkv`` is not one: without it, the
queries, keys and values are stored apart."""

LONGEST = 1 << 31
"""The longest length, in tokens, that a config or an option may give."""
LARGEST_COUNT = 1 << 24
"""The largest size that a config may give; a larger one would exhaust the memory."""
LARGEST = {"heads": 4096, "layers": 8192, "channels per head": 8192}
"""Lower limits for the sizes that code loops over; still many times those of any real model."""


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model that matter to attention; counts, not bytes. Absurd ones are a ``SourceError``."""

    num_heads: int
    head_dim: int
    num_layers: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        sizes = (max(self.num_heads, self.num_kv_heads), self.num_layers, self.head_dim)
        for (what, largest), size in zip(LARGEST.items(), sizes, strict=True):
            if size > largest:
                raise SourceError(f"config.json gives {size} {what}, more than any model has ({largest})")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a finite number; a boolean is not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max  # an integer may be too large for math.isfinite


def is_count(value: object, largest: float = math.inf) -> TypeGuard[int]:
    """Whether a JSON value is an integer from 1 to ``largest``; a boolean is not."""
    return is_integer(value) and 1 <= value <= largest


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a JSON value is an integer; a boolean is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def agreed(found: Mapping[str, Value]) -> Value | None:
    """The value that all names of one setting agree on, or a ``SourceError``; None if there are no names."""
    if len(set(found.values())) > 1:
        spelled = " and ".join(f"{name} {value}" for name, value in found.items())
        raise SourceError(f"config.json contradicts itself: {spelled}; remove the wrong one")
    return next(iter(found.values()), None)


def count(config: Config, *names: str, default: int | None = None) -> int:
    """A positive integer of the config, found under any of its names, or a ``SourceError``."""
    found = {name: config[name] for name in names if config.get(name) is not None}
    for name, value in found.items():
        if not is_count(value, LARGEST_COUNT):
            raise SourceError(
                f"config.json: {name} is {value!r}, expected an integer from 1 to {LARGEST_COUNT}"
            )
    result = agreed(found) or default
    if result is None:
        raise SourceError(f"config.json has no {' or '.join(names)}; the checkpoint is incomplete")
    return result


def inner(config: Config, key: str) -> Config:
    """An object in the config, empty if it has none, or a ``SourceError``."""
    found = config.get(key)
    if found is not None and not isinstance(found, dict):
        raise SourceError(f"config.json: {key} is {found!r}, not an object")
    return found or {}


def head_dim(hidden_size: int, num_heads: int) -> int:
    """``hidden_size / num_heads``, or a ``SourceError`` if that is not a whole number."""
    if hidden_size % num_heads:
        raise SourceError(
            f"config.json: hidden size {hidden_size} is not a multiple of the number of heads, {num_heads}"
        )
    return hidden_size // num_heads


def with_current_keys(config: Config, spellings: Mapping[str, str]) -> dict[str, Any]:
    """A copy of the config, in the same order, whose old key names (of ``spellings``) are made current."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        current = spellings.get(key, key)
        if key == current and value is None and current in result:
            continue  # an old name has the value
        if key == current or config.get(current) is None:
            result[current] = value
    return result


def with_value(config: Config, key: str, value: Any) -> dict[str, Any]:
    """A copy of an object in which a key has this value, or is missing if the value is None."""
    return {name: each for name, each in {**config, key: value}.items() if name != key or value is not None}


def without_implementation(config: Config) -> dict[str, Any]:
    """A copy of the config without the keys that only choose an implementation, at any depth."""
    return {
        key: without_implementation(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not IMPLEMENTATION.fullmatch(key)
    }


@dataclass(frozen=True)
class Provenance:
    """The origin of a converted config."""

    source: str | None
    """Hub id, or the name of the local folder without its path."""
    commit: str | None
    train_length: int | None
    """Trained length in tokens; None if it was not known."""
    rotary: Mapping[str, Any] | None = None
    """For a rotary model: its scaling, and the source's values of the keys that were changed."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """The values that the user gave for keys of the source's config."""
    subfolder: str | None = None
    """Folder in the source that held the checkpoint."""
    weights: Weights = "original"
    step: Mapping[str, Any] | None = None
    """Name, commit and subfolder of the converted repository that was converted again, if its weights were
    not known to be ``original``."""
    limits: Mapping[str, Any] | None = None
    """File -> the source's input limit in it, for those that a conversion changed; None in older records."""
    dtype: Dtype | None = None
    """The ``--dtype`` to which a conversion rounded the source's weights; None if they keep their own."""

    def to_json(self) -> dict[str, Any]:
        """The value of ``PROVENANCE`` in config.json; ``transformers`` is the version at hand."""
        more = {
            "subfolder": self.subfolder,
            ROTARY: self.rotary,
            OVERRIDES: self.overrides,
            STEP: self.step,
            DTYPE: self.dtype,
        }
        return {
            "source": self.source,
            "commit": self.commit,
            "version": __version__,
            "transformers": importlib.metadata.version("transformers"),
            "tested_transformers": list(TESTED),
            "train_length": self.train_length,
            "weights": self.weights,
            "limits": self.limits,
            **{key: value for key, value in more.items() if value},
        }


def read_provenance(config: Config) -> Provenance | None:
    """The origin that a converted config records, or a ``SourceError``; None if it records none."""
    entry = config.get(PROVENANCE)
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise _damaged("is", entry, "an object")
    kinds = {
        **dict.fromkeys(("source", "commit", "subfolder"), (str, "a string")),
        **dict.fromkeys((ROTARY, OVERRIDES, STEP, "limits"), (Mapping, "an object")),
    }
    for key in entry.keys() - {*RECORDED}:
        raise SourceError(
            f"config.json: {PROVENANCE} has the key {str(key)[:80]!r}, which this version does not know; if "
            "a newer ntk-convert wrote it, install that, else convert the original checkpoint again"
        )
    for key, (fits, kind) in kinds.items():
        if entry.get(key) is not None and not isinstance(entry[key], fits):
            raise _damaged(f"has {key}", entry[key], kind)
    length, rotary = entry.get("train_length"), entry.get(ROTARY)
    if length is not None and not is_count(length, LONGEST):
        raise _damaged("has train_length", length, "a number of tokens")
    if rotary is not None and not isinstance(rotary.get(SOURCE_CONFIG), Mapping):
        raise _damaged(f"has {ROTARY}", rotary, f"an object with {SOURCE_CONFIG}")
    weights = entry.get("weights", "other" if entry.get(FINE_TUNED) else "original")
    if weights not in WEIGHTS:
        raise _damaged("has weights", weights, f"one of {', '.join(WEIGHTS)}")
    dtype = entry.get(DTYPE)
    if dtype not in (None, *get_args(Dtype)):
        raise _damaged(f"has {DTYPE}", dtype, f"one of {', '.join(get_args(Dtype))}")
    return Provenance(
        entry.get("source"),
        entry.get("commit"),
        length,
        rotary,
        entry.get(OVERRIDES) or {},
        entry.get("subfolder"),
        weights,
        entry.get(STEP),
        entry.get("limits"),
        dtype,
    )


def _damaged(what: str, value: object, kind: str) -> SourceError:
    return SourceError(
        f"config.json: {PROVENANCE} {what} {repr(value)[:80]}, not {kind}; "
        "convert the original checkpoint again"
    )
