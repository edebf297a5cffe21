"""What a config says about rotary positions, and the config with them scaled.

transformers 4.57 reads the base from ``rope_theta`` and a scaling from ``rope_scaling``; 5.x writes both
into ``rope_parameters`` and still reads the old keys. So the old keys are written, which both read,
and ``rope_parameters``, which 4.57 would silently ignore, is taken apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from converter.errors import SourceError, UnsupportedModel, UsageError
from converter.families.base import Config, Geometry, count, head_dim
from converter.rotary.frequencies import Frequencies, frequencies, ntk_base, scaled_frequencies
from converter.rotary.models import MODELS, REFUSED, RotaryModel
from converter.scaling import Scaling

LENGTH, SCALING, PARAMETERS = "max_position_embeddings", "rope_scaling", "rope_parameters"
OWN_BASE, OWN_PARTIAL = "rope_theta", "partial_rotary_factor"
"""The keys of ``rope_parameters``; at the top level, some model types have others."""
LONGEST = 1 << 31
LARGEST_BASE = 1e30
"""Of the scaled frequencies too; the largest published base is 1e9 or so."""


@dataclass(frozen=True)
class Rotary:
    """The rotary positions of a checkpoint."""

    model: RotaryModel
    base: float
    dim: int
    """Channels of a head that are turned; even."""
    head_dim: int
    partial: float | None
    """The part of a head that this is, where the model type has a key for it."""
    max_length: int | None
    """``max_position_embeddings``, in tokens."""
    window: int | None
    """Tokens that a sliding window lets attention see, if one is on."""

    @property
    def frequencies(self) -> Frequencies:
        """As trained."""
        return frequencies(self.base, self.dim)

    def scaled(self, scaling: Scaling, tokens: int = 0) -> Frequencies:
        """As a forward pass that reaches so many tokens has them."""
        return scaled_frequencies(self.base, self.dim, scaling.method, scaling.factor_at(tokens))


@dataclass(frozen=True)
class Change:
    """What a scaling makes of rotary positions."""

    channels: int
    """Of a head, those that are turned."""
    base: float
    """As trained."""
    scaled_base: float
    """As the result's config has it."""
    divisor: float
    """What positions are divided by."""
    dynamic_from: int | None
    """Tokens beyond which transformers raises the base while it runs; None if it does not."""
    scaling: dict[str, Any] | None
    """What was asked for, in the form of ``alibi_scaling``."""

    def __str__(self) -> str:
        if self.dynamic_from is not None:
            power = f"(tokens / {self.dynamic_from})^({self.channels}/{self.channels - 2})"
            return f"base {self.base:.10g} * {power} beyond {self.dynamic_from} tokens"
        if self.divisor != 1:
            return f"positions divided by {self.divisor:g}, base {self.base:.10g} kept"
        if self.scaled_base != self.base:
            return f"base {self.base:.10g} raised to {self.scaled_base:.10g}"
        return f"base {self.base:.10g} kept"


def recognises(config: Config) -> bool:
    """Whether this is a rotary model that is known by name, be it to refuse it."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and (model_type in MODELS or model_type in REFUSED)


def read(config: Config) -> Rotary:
    """The rotary positions of a source's config.

    Raises:
        UnsupportedModel: not scaled by transformers through the config, or scaled already; says why.
        SourceError: impossible or contradictory values.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not recognises(config):
        raise SourceError(f"config.json: model_type {model_type!r} is that of no rotary model known here")
    if model_type in REFUSED:
        raise UnsupportedModel(
            f"model_type {model_type!r} has rotary positions that cannot be scaled: {REFUSED[model_type]}"
        )
    model = MODELS[model_type]
    named = config.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise SourceError(f"config.json: architectures is {named!r}, not a list of class names")
    check_code(config)
    parameters = _unscaled(config)
    base = _number(config, parameters, {model.base_key, OWN_BASE}, OWN_BASE)
    base = model.base if base is None else base
    if base is None:
        raise SourceError(
            f"config.json has no {model.base_key}, and versions of transformers disagree about its default "
            f"for {model_type!r}; add the one it was trained with"
        )
    if not 1 < base <= LARGEST_BASE:
        raise SourceError(f"config.json: {model.base_key} is {base:g}, not a base above 1")
    partial = _number(config, parameters, {model.partial_key, OWN_PARTIAL}, OWN_PARTIAL)
    if model.partial is None and partial not in (None, 1):
        raise UnsupportedModel(
            f"config.json has {OWN_PARTIAL} {partial:g}, which transformers does not read for {model_type!r}"
        )
    part = 1.0 if model.partial is None else model.partial if partial is None else partial
    size = geometry(config, model).head_dim
    dim = int(size * part)
    if not 0 < part <= 1 or dim < 2 or dim % 2:
        raise SourceError(f"config.json: {dim} rotary channels a head, expected an even number of at least 2")
    return Rotary(
        model,
        base,
        dim,
        size,
        partial=None if model.partial is None else part,
        max_length=count(config, LENGTH) if config.get(LENGTH) is not None else None,
        window=_window(config),
    )


def geometry(config: Config, model: RotaryModel) -> Geometry:
    """The sizes that matter to attention.

    Raises:
        SourceError: missing or impossible ones.
    """
    heads = count(config, "num_attention_heads")
    return Geometry(
        num_heads=heads,
        head_dim=_head_dim(config, model),
        num_layers=count(config, "num_hidden_layers"),
        num_kv_heads=count(config, "num_key_value_heads", default=heads),
    )


def check_scaling(rotary: Rotary, scaling: Scaling) -> None:
    """Whether transformers can compute this scaling from a config.

    Raises:
        UsageError: it has no rotary form, or none for this model type; says what to give instead.
    """
    model_type = rotary.model.model_type
    if scaling.method == "ntk-published":
        raise UsageError(
            f"--method ntk-published is about ALiBi's heads and means nothing for the rotary {model_type!r}; "
            "give --method ntk"
        )
    if scaling.method == "ntk" and rotary.dim == 2:
        raise UsageError(
            "the model turns one pair of channels, which has no base to change; give --method linear"
        )
    if scaling.method == "ntk" and scaling.factor is not None:
        _check_base(rotary, scaling.factor)
    if scaling.dynamic is not None:
        _check_dynamic(rotary, scaling)
    elif scaling.method == "linear" and "linear" not in rotary.model.reads:
        raise UsageError(
            f"transformers reads no linear rope_scaling for the rotary {model_type!r}; give --method ntk"
        )


def _check_base(rotary: Rotary, factor: float) -> None:
    try:
        scaled = ntk_base(rotary.base, rotary.dim, factor)
    except OverflowError:
        scaled = math.inf
    if scaled > LARGEST_BASE:
        raise UsageError(
            f"--scale {factor:g} would raise the base {rotary.base:g} beyond {LARGEST_BASE:g}; give a "
            "smaller one"
        )


def _check_dynamic(rotary: Rotary, scaling: Scaling) -> None:
    model_type = rotary.model.model_type
    if scaling.method == "linear":
        raise UsageError(
            f"transformers has no dynamic linear scaling for rotary models such as {model_type!r}; "
            "give --method ntk, or --scale"
        )
    if scaling.dynamic == "position":
        raise UsageError(
            f"--dynamic position has no equivalent for rotary models such as {model_type!r}: a key is turned "
            "once, for all queries; give --dynamic length"
        )
    if "dynamic" not in rotary.model.reads:
        raise UsageError(
            f"transformers does not accept the dynamic rope_scaling that this needs for the rotary "
            f"{model_type!r}; give --scale"
        )
    assert scaling.rate is not None
    assert scaling.train_length is not None
    start = scaling.train_length / scaling.rate
    if not 2 <= start <= LONGEST or not start.is_integer():
        raise UsageError(
            f"--rate {scaling.rate:g} would start to scale the rotary {model_type!r} at {start:g} tokens, "
            f"and config.json takes whole ones; give a rate that divides {scaling.train_length}"
        )


def scaled_config(
    config: Config, rotary: Rotary, scaling: Scaling, train_length: int | None
) -> dict[str, Any]:
    """The source's config with its positions scaled, unknown keys kept.

    Args:
        config: the source's; not changed.
        rotary: what ``read`` found in it.
        scaling: one that ``check_scaling`` accepts.
        train_length: trained length in tokens, None if it is not known.
    """
    result = {key: value for key, value in config.items() if key != PARAMETERS}
    base, rope_scaling, length = rotary.base, None, rotary.max_length
    if scaling.dynamic is not None:
        rope_scaling = _rope_scaling(rotary.model, "dynamic", 1.0)
        length = _start(scaling)
    elif scaling.factor is not None:
        if scaling.method == "ntk":
            base = ntk_base(base, rotary.dim, scaling.factor)
        elif scaling.factor > 1:
            rope_scaling = _rope_scaling(rotary.model, "linear", scaling.factor)
        trained = train_length or rotary.max_length
        if trained is not None:
            length = max(round(min(trained * scaling.factor, LONGEST)), rotary.max_length or 0)

    # Some configs have a second spelling beside the one that counts; both are kept true.
    for key in {rotary.model.base_key} | ({OWN_BASE} & config.keys()):
        result[key] = base
    if rotary.partial is not None:
        result[rotary.model.partial_key] = rotary.partial
    if rotary.model.needs_head_dim:
        result["head_dim"] = rotary.head_dim
    if rope_scaling is not None or SCALING in config:
        result[SCALING] = rope_scaling
    if length is not None:
        result[LENGTH] = length
    return result


def change(rotary: Rotary, scaling: Scaling) -> Change:
    """What ``scaled_config`` does, in numbers."""
    ntk = scaling.method == "ntk" and scaling.factor is not None
    return Change(
        channels=rotary.dim,
        base=rotary.base,
        scaled_base=ntk_base(rotary.base, rotary.dim, scaling.factor_at(0)) if ntk else rotary.base,
        divisor=scaling.factor_at(0) if scaling.method == "linear" else 1.0,
        dynamic_from=_start(scaling) if scaling.dynamic is not None else None,
        scaling=scaling.to_json(),
    )


def _start(scaling: Scaling) -> int:
    """Tokens from which a dynamic scaling is above 1."""
    assert scaling.rate is not None
    assert scaling.train_length is not None
    return round(scaling.train_length / scaling.rate)


def _rope_scaling(model: RotaryModel, rope_type: str, factor: float) -> dict[str, Any]:
    """Under the key's current and its former name, since other programs read these configs too."""
    current = {} if model.legacy else {"rope_type": rope_type}
    return {**current, "type": rope_type, "factor": factor}


def check_code(config: Config) -> None:
    """Code of a checkpoint's own may turn heads by anything."""
    auto_map = config.get("auto_map")
    named = auto_map if isinstance(auto_map, Mapping) else {}
    for auto_class, target in named.items():
        if auto_class == "AutoConfig" or str(auto_class).startswith("AutoModel"):
            raise UnsupportedModel(
                f"config.json names code of the checkpoint's own (auto_map: {target}), whose rotary "
                "positions cannot be known; if transformers' own class runs the model too, remove auto_map"
            )


def _unscaled(config: Config) -> Mapping[str, Any]:
    """The contents of ``rope_parameters``, if the config has that and nothing scales it yet.

    Raises:
        UnsupportedModel: several sets of parameters, or another type than the default one.
    """
    for key in (PARAMETERS, SCALING):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise SourceError(f"config.json: {key} is {value!r}, not an object")
        if any(isinstance(entry, Mapping) for entry in value.values()):
            raise UnsupportedModel(
                f"config.json has {key} for each kind of layer ({', '.join(value)}); unclear which to scale"
            )
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default" or "mrope_section" in value:
            raise UnsupportedModel(
                f"its rotary positions are scaled already ({key} has type {kind!r}); "
                "convert the checkpoint that it was made from"
            )
    return config.get(PARAMETERS) or {}


def _number(config: Config, parameters: Mapping[str, Any], keys: set[str], parameter: str) -> float | None:
    """A number of the config under any of its keys, and of ``rope_parameters``; None if it is nowhere.

    Raises:
        SourceError: no positive number, or different ones.
    """
    found = {key: config[key] for key in sorted(keys) if config.get(key) is not None}
    if parameters.get(parameter) is not None:
        found[f"{PARAMETERS}.{parameter}"] = parameters[parameter]
    for key, value in found.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise SourceError(f"config.json: {key} is {value!r}, not a positive number")
    if len(set(found.values())) > 1:
        spelled = " and ".join(f"{key} {value:g}" for key, value in found.items())
        raise SourceError(f"config.json contradicts itself: {spelled}; remove the wrong one")
    return next((float(value) for value in found.values()), None)


def _head_dim(config: Config, model: RotaryModel) -> int:
    if model.own_head_dim or config.get("head_dim") is not None:
        return count(config, "head_dim")
    return head_dim(count(config, "hidden_size"), count(config, "num_attention_heads"))


def _window(config: Config) -> int | None:
    window = config.get("sliding_window")
    on = config.get("use_sliding_window") is not False
    return window if on and isinstance(window, int) and not isinstance(window, bool) else None
