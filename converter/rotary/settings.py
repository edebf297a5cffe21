"""Reads the rotary settings of a config, and makes the config in which they are scaled.

transformers 4.57 reads the base from ``rope_theta`` and a scaling from ``rope_scaling``; 5.x writes both
into ``rope_parameters`` and still reads the old keys. A scaled config therefore has the old keys, which
both versions read, and no ``rope_parameters``, which 4.57 would silently ignore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from converter.config import LONGEST, Config, Geometry, agreed, count, head_dim, is_integer, is_number
from converter.errors import SourceError, UnsupportedModel, UsageError, option
from converter.rotary.models import MODELS, REFUSED, RotaryModel
from converter.scaling.frequencies import (
    ROTARY_METHODS,
    Frequencies,
    frequencies,
    ntk_base,
    scaled_frequencies,
    yarn_attention,
)
from converter.scaling.scaling import FITTED, Scaling, number_text
from converter.scaling.slopes import Ramp

LENGTH, SCALING, PARAMETERS = "max_position_embeddings", "rope_scaling", "rope_parameters"
OWN_BASE, OWN_PARTIAL = "rope_theta", "partial_rotary_factor"
"""Key names inside ``rope_parameters``; at the top level, some model types use other names."""
YARN_RAMP = (1 / 32, 1.0)
"""YaRN's ramp in parts of the trained length: wavelengths that fit 32 times into it, and once."""
YARN_KEYS = ("original_max_position_embeddings", "beta_fast", "beta_slow")
"""What ``rope_scaling`` has for YaRN beside type and factor."""
LARGEST_BASE = 1e30
"""The largest base accepted, before and after scaling; the largest published one is about 1e9."""


@dataclass(frozen=True)
class Rotary:
    model: RotaryModel
    base: float
    dim: int
    """Number of rotated channels per head; even."""
    geometry: Geometry
    partial: float | None
    """``dim`` as a fraction of the head; None if the model type has no key for it."""
    max_length: int | None
    """``max_position_embeddings``, in tokens."""
    window: int | None
    """Tokens that attention sees through a sliding window; None if there is none or it is off."""

    @property
    def frequencies(self) -> Frequencies:
        return frequencies(self.base, self.dim)

    def scaled(self, scaling: Scaling, tokens: int = 0) -> Frequencies:
        """The scaled frequencies in a forward pass that reaches ``tokens`` tokens."""
        factor = scaling.factor_at(tokens)
        return scaled_frequencies(self.base, self.dim, scaling.method, factor, scaling.ramp)


@dataclass(frozen=True)
class Change:
    """How a scaling changes rotary positions."""

    channels: int
    """Number of rotated channels per head."""
    base: float
    """The base as trained."""
    scaled_base: float
    """The base in the converted config."""
    divisor: float
    """The number that positions are divided by; with a ramp, for long wavelengths only."""
    ramp: Ramp | None
    """Wavelengths in tokens at which YaRN starts to divide and divides fully; None without YaRN."""
    attention: float
    """The number that rotated queries and keys are multiplied by."""
    dynamic_from: int | None
    """Tokens beyond which transformers raises the base while the model runs; None if it never does."""
    scaling: dict[str, Any] | None
    """The scaling that was asked for, in the form of ``alibi_scaling``."""

    def __str__(self) -> str:
        if self.dynamic_from is not None:
            power = f"(tokens / {self.dynamic_from})^({self.channels}/{self.channels - 2})"
            return f"base {self.base:.10g} * {power} beyond {self.dynamic_from} tokens"
        if self.ramp is not None:
            start, end = self.ramp
            return (
                f"YaRN: wavelengths up to {start:g} tokens kept, from {end:g} on multiplied by "
                f"{number_text(self.divisor)}; queries and keys multiplied by {self.attention:.6g}"
            )
        if self.divisor != 1:
            return f"positions divided by {number_text(self.divisor)}, base {self.base:.10g} kept"
        if self.scaled_base != self.base:
            return f"base {self.base:.10g} raised to {self.scaled_base:.10g}"
        return f"base {self.base:.10g} kept"


def recognises(config: Config) -> bool:
    """Whether this is a rotary model type that is known, supported or rejected."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and (model_type in MODELS or model_type in REFUSED)


def read_rotary(config: Config) -> Rotary:
    """The rotary positions of a source's config.

    Raises ``UnsupportedModel`` if transformers cannot scale the model through its config, or it is scaled
    already, and ``SourceError`` if a value is impossible, or two contradict each other.
    """
    model_type = str(config.get("model_type"))
    if not recognises(config):
        raise SourceError(f"config.json: model_type {model_type!r} is not a known rotary model")
    refuse_alibi(config)
    if model_type in REFUSED:
        raise UnsupportedModel(
            f"model_type {model_type!r} has rotary positions that cannot be scaled: {REFUSED[model_type]}"
        )
    check_code(config)
    _check_unscaled(config)
    model = MODELS[model_type]
    geometry = _geometry(config, model)
    part = _rotated_part(config, model)
    dim = int(geometry.head_dim * part)
    if part > 1 or dim < 2 or dim % 2:
        raise SourceError(
            f"config.json: {dim} rotary channels per head, expected an even number of at least 2"
        )
    max_length = None
    if config.get(LENGTH) is not None:
        max_length = count(config, LENGTH)
    window = config.get("sliding_window")
    if config.get("use_sliding_window") is False or not is_integer(window):
        window = None
    return Rotary(
        model,
        _base(config, model),
        dim,
        geometry,
        partial=None if model.partial is None else part,
        max_length=max_length,
        window=window,
    )


def _base(config: Config, model: RotaryModel) -> float:
    base = _number(config, model.base_key, OWN_BASE) or model.base
    if base is None:
        raise SourceError(
            f"config.json has no {model.base_key}, and versions of transformers disagree about its default "
            f"for {model.model_type!r}; add the one it was trained with"
        )
    if not 1 < base <= LARGEST_BASE:
        raise SourceError(f"config.json: {model.base_key} is {base:g}, not a base above 1")
    return base


def _rotated_part(config: Config, model: RotaryModel) -> float:
    """The fraction of a head that is rotated."""
    partial = _number(config, model.partial_key, OWN_PARTIAL)
    if model.partial is None and partial not in (None, 1):
        raise UnsupportedModel(
            f"config.json has {OWN_PARTIAL} {partial:g}, which transformers does not read for "
            f"{model.model_type!r}"
        )
    return partial or model.partial or 1.0


def _geometry(config: Config, model: RotaryModel) -> Geometry:
    heads = count(config, "num_attention_heads")
    if model.own_head_dim or config.get("head_dim") is not None:
        size = count(config, "head_dim")
    else:
        size = head_dim(count(config, "hidden_size"), heads)
    return Geometry(
        num_heads=heads,
        head_dim=size,
        num_layers=count(config, "num_hidden_layers"),
        num_kv_heads=count(config, "num_key_value_heads", default=heads),
    )


def check_scaling(rotary: Rotary, scaling: Scaling) -> None:
    """Refuses a scaling that transformers cannot compute from a config; says what to give instead."""
    problem = _problem(rotary, scaling)
    if problem is not None:
        raise UsageError(problem)


def _problem(rotary: Rotary, scaling: Scaling) -> str | None:
    method, model_type, reads = scaling.method, rotary.model.model_type, rotary.model.reads
    if method not in ROTARY_METHODS:
        given = option.slopes if method == FITTED else f"{option.method} {method}"
        return f"{given} is for ALiBi only, and {model_type!r} is rotary; give {option.method} ntk"
    if method == "ntk" and rotary.dim == 2:
        return (
            "the model rotates a single pair of channels, whose frequency does not depend on the base; "
            f"give {option.method} linear"
        )
    if scaling.dynamic:
        return _dynamic_problem(model_type, reads, scaling)
    if method == "ntk":
        growth = rotary.dim / (rotary.dim - 2) * math.log(scaling.factor_at(0))
        if math.log(rotary.base) + growth > math.log(LARGEST_BASE):
            return (
                f"{option.scale} {scaling.factor_at(0):g} would raise the base {rotary.base:g} beyond "
                f"{LARGEST_BASE:g}; give a smaller {option.scale}"
            )
    for needed, wanted in (("linear", method == "linear"), ("yarn", scaling.ramp is not None)):
        if wanted and needed not in reads:
            return (
                f"transformers does not read a {needed} rope_scaling for {model_type!r}; give "
                f"{option.method} ntk"
            )
    if scaling.ramp is None:
        return None
    if scaled_frequencies(rotary.base, rotary.dim, method, 2.0, scaling.ramp) == rotary.frequencies:
        start, end = scaling.ramp
        return (
            f"{option.method} by-parts would scale nothing: YaRN's ramp from {start:g} to {end:g} tokens "
            f"lies beside the model's wavelengths; give another {option.ramp}, or {option.method} ntk"
        )
    return None


def _dynamic_problem(model_type: str, reads: Sequence[str], scaling: Scaling) -> str | None:
    if scaling.method in ("linear", "by-parts"):
        return (
            f"transformers has no dynamic {scaling.method} scaling for rotary models such as {model_type!r}; "
            f"give {option.method} ntk, or {option.scale}"
        )
    if scaling.dynamic == "position":
        return (
            f"{option.dynamic} position is impossible for rotary models such as {model_type!r}: each key is "
            f"rotated once, for all queries; give {option.dynamic} length"
        )
    if "dynamic" not in reads:
        return (
            f"transformers does not accept the dynamic rope_scaling that {model_type!r} would need; "
            f"give {option.scale} instead"
        )
    start = scaling.train_length / scaling.rate
    if not 2 <= start <= LONGEST or not start.is_integer():
        return (
            f"{option.rate} {scaling.rate:g} would start to scale {model_type!r} at {start:g} tokens, but "
            f"config.json needs a whole number of at least 2; give a rate that divides {scaling.train_length}"
        )
    return None


def scaled_config(
    config: Config, rotary: Rotary, scaling: Scaling, train_length: int | None
) -> dict[str, Any]:
    """The source's config with scaled positions, for a scaling that ``check_scaling`` accepts.

    Unknown keys are kept. ``train_length`` is in tokens, None if it is not known.
    """
    result = {key: value for key, value in config.items() if key != PARAMETERS}
    made, rope_scaling, length = change(rotary, scaling), None, rotary.max_length
    if made.dynamic_from is not None:
        rope_scaling, length = _rope_scaling(rotary.model, "dynamic", 1.0), made.dynamic_from
    elif made.ramp is not None and train_length is not None:
        ends = (train_length, *(train_length / end for end in made.ramp))
        rope_scaling = _rope_scaling(rotary.model, "yarn", made.divisor)
        rope_scaling |= dict(zip(YARN_KEYS, ends, strict=True))
    elif made.divisor > 1:
        rope_scaling = _rope_scaling(rotary.model, "linear", made.divisor)
    trained = train_length or rotary.max_length
    if scaling.static and trained is not None:
        length = max(round(min(trained * scaling.factor, LONGEST)), rotary.max_length or 0)

    # Some configs have the base under a second name too; both must agree.
    for key in {rotary.model.base_key} | ({OWN_BASE} & config.keys()):
        result[key] = made.scaled_base
    if rotary.partial is not None:
        result[rotary.model.partial_key] = rotary.partial
    if rotary.model.needs_head_dim:
        result["head_dim"] = rotary.geometry.head_dim
    if rope_scaling is not None or SCALING in config:
        result[SCALING] = rope_scaling
    if length is not None:
        result[LENGTH] = length
    return result


def change(rotary: Rotary, scaling: Scaling) -> Change:
    """What ``scaled_config`` changes, in numbers."""
    ntk = scaling.method == "ntk" and scaling.static
    return Change(
        channels=rotary.dim,
        base=rotary.base,
        scaled_base=ntk_base(rotary.base, rotary.dim, scaling.factor_at(0)) if ntk else rotary.base,
        divisor=scaling.factor_at(0) if scaling.method in ("linear", "by-parts") else 1.0,
        ramp=scaling.ramp,
        attention=1.0 if scaling.ramp is None else yarn_attention(scaling.factor_at(0)),
        dynamic_from=round(scaling.train_length / scaling.rate) if scaling.dynamic else None,
        scaling=scaling.to_json(),
    )


def _rope_scaling(model: RotaryModel, rope_type: str, factor: float) -> dict[str, Any]:
    """The value of ``rope_scaling``, with the type under its old name too, which other programs read."""
    current = {} if model.legacy else {"rope_type": rope_type}
    return {**current, "type": rope_type, "factor": factor}


def refuse_alibi(config: Config) -> None:
    """Refuses a checkpoint that was trained with ALiBi, under a model_type whose class is rotary.

    OLMo's remote code (``hf_olmo``) has the option ``alibi``. The GPT-NeoX library has ``pos_emb: alibi``,
    but transformers' class for its models computes rotary positions all the same.
    """
    named = config.get("architectures") or []
    if not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise SourceError(f"config.json: architectures is {named!r}, not a list of class names")
    signs = [f"its class is {name}" for name in named if "alibi" in name.lower()]
    signs += [
        f"{key} is {value!r}"
        for key, value in config.items()
        if value == "alibi" or (value is True and "alibi" in key.lower())
    ]
    if signs:
        raise UnsupportedModel(
            f"this {config['model_type']} was trained with ALiBi ({signs[0]}), but transformers' class for "
            "it computes rotary positions, and its remote code is not known here, so it cannot be converted"
        )


def undo_saving(config: Config) -> dict[str, Any]:
    """A scaled config that transformers saved, in the keys that ``scaled_config`` uses.

    5.x saves ``rope_parameters`` and no other key. 4.57 saves the base of GPT-NeoX under a second name too.
    """
    model = MODELS.get(str(config.get("model_type")))
    parameters = config.get(PARAMETERS)
    result = dict(config)
    if model is None:
        return result
    if isinstance(parameters, Mapping):
        del result[PARAMETERS]
        result |= {model.base_key: parameters.get(OWN_BASE, result.get(model.base_key))}
        if model.partial is not None and OWN_PARTIAL in parameters:
            result[model.partial_key] = parameters[OWN_PARTIAL]
        kind = parameters.get("rope_type", "default")
        if kind != "default":
            own = {key: parameters[key] for key in YARN_KEYS if kind == "yarn" and key in parameters}
            result[SCALING] = {**_rope_scaling(model, kind, parameters.get("factor", 1.0)), **own}
    if model.base_key != OWN_BASE and result.get(OWN_BASE) == result.get(model.base_key):
        result.pop(OWN_BASE, None)
    return result


def check_code(config: Config) -> None:
    """Refuses a checkpoint with remote code, which may compute any rotary positions."""
    auto_map = config.get("auto_map")
    named = auto_map if isinstance(auto_map, Mapping) else {}
    for auto_class, target in named.items():
        if auto_class == "AutoConfig" or str(auto_class).startswith("AutoModel"):
            raise UnsupportedModel(
                f"config.json loads remote code (auto_map: {target}), which may compute other "
                "rotary positions; if transformers' own class runs the model too, remove auto_map"
            )


def _check_unscaled(config: Config) -> None:
    """Refuses positions that are scaled already, and settings of their own for each kind of layer."""
    for key in (PARAMETERS, SCALING):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise SourceError(f"config.json: {key} is {value!r}, not an object")
        if any(isinstance(entry, Mapping) for entry in value.values()):
            raise UnsupportedModel(
                f"config.json has {key} for each kind of layer ({', '.join(value)}), and it is unclear which "
                "to scale"
            )
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default" or "mrope_section" in value:
            raise UnsupportedModel(
                f"its rotary positions are scaled already ({key} has type {kind!r}); "
                "convert the checkpoint that it was made from"
            )


def _number(config: Config, key: str, own: str) -> float | None:
    """A positive number under ``key``, or under ``own`` there or in ``rope_parameters``; None without one."""
    found = {name: config[name] for name in sorted({key, own}) if config.get(name) is not None}
    inside = (config.get(PARAMETERS) or {}).get(own)
    if inside is not None:
        found[f"{PARAMETERS}.{own}"] = inside
    for name, value in found.items():
        if not is_number(value) or value <= 0:
            raise SourceError(f"config.json: {name} is {value!r}, not a positive number")
    value = agreed(found)
    return None if value is None else float(value)
