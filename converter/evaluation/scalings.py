"""The scalings to measure, and the command that bakes one in."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from converter.errors import UsageError, option
from converter.formatting import argv
from converter.model.model import Model
from converter.model.open import SourceOptions
from converter.model.overrides import set_values
from converter.scaling.request import BY_PARTS, NTK, Parts, Request, request_for
from converter.scaling.scaling import CONCAVE, POWER, UNSCALED, Basis, Method, Scaling

RATES = (1.0, 2.0)
"""Rates of the dynamic scalings that ``tune`` tries."""


def grid(
    methods: Sequence[Method],
    scales: Sequence[float] = (),
    dynamic: Sequence[Basis] = (),
    rates: Sequence[float] = (),
    train_length: int | None = None,
    ramps: Sequence[Parts] = (),
) -> list[Request]:
    """Every method with every scale, and with every dynamic form and rate.

    ``none`` comes first, and once; ``concave``, which has no strength, comes last. Without ``rates`` the
    dynamic forms have rate 1, and without ``ramps`` by-parts has the model's own ramp. Raises ``UsageError``
    for a method without a strength, or a strength without a method.
    """
    scaling_methods = [method for method in dict.fromkeys(methods) if method not in ("none", CONCAVE)]
    _check_grid(scaling_methods, scales, dynamic, rates, ramps)
    found: list[Request] = []
    if "none" in methods:
        found.append(Request("none", train_length=train_length))
    for method in scaling_methods:
        own_ramps: Sequence[Parts | None] = [None]
        if method == BY_PARTS and ramps:
            own_ramps = list(dict.fromkeys(ramps))
        for ramp in own_ramps:
            for scale in dict.fromkeys(scales):
                found.append(Request(method, scale=scale, ramp=ramp, train_length=train_length))
            for basis in dict.fromkeys(dynamic):
                for rate in dict.fromkeys(rates or (1.0,)):
                    found.append(
                        Request(method, dynamic=basis, rate=rate, ramp=ramp, train_length=train_length)
                    )
    if CONCAVE in methods:
        found.append(Request(CONCAVE, train_length=train_length))
    return found


def _check_grid(
    methods: Sequence[Method],
    scales: Sequence[float],
    dynamic: Sequence[Basis],
    rates: Sequence[float],
    ramps: Sequence[Parts],
) -> None:
    """Raises ``UsageError`` for what belongs to an option that is not given.

    ``methods`` are those that take a strength: without ``none`` and ``concave``.
    """
    if rates and not dynamic:
        raise UsageError(
            f"{option.rates} belongs to {option.dynamic}; add e.g. {option.dynamic} position, or drop "
            f"{option.rates}"
        )
    if methods and not scales and not dynamic:
        raise UsageError(
            f"{option.methods} {methods[0]} needs a strength; give {option.scales} 2,4 or {option.dynamic} "
            "position"
        )
    if (scales or dynamic) and not methods:
        given = option.scales if scales else option.dynamic
        raise UsageError(
            f"{given} needs a method that takes one; add e.g. {option.methods} ntk, or drop {given}"
        )
    if ramps and BY_PARTS not in methods:
        raise UsageError(
            f"{option.ramps} belongs to by-parts; add {option.methods} by-parts, or drop {option.ramps}"
        )


def candidates(model: Model, trained: int, target: int) -> list[Scaling]:
    """The scalings to try, without those that the model cannot compute.

    With r = target / trained, they are: none; concave; position-dynamic by-parts and ntk with rates 1 and 2;
    ntk with factors r / 2, r and 2 r, since on published and small models factors above and below r were
    best; by-parts with r and 2 r; linear with r / 2 and r.
    Length-dynamic scalings are tried for encoders, and for models without position-dynamic ones (rotary
    models). In other decoders they would change the scaling of text already read while the model generates,
    and small models retrieved no more with them.
    """
    ratio = target / trained
    start, end = model.defaults.ramp
    ramp = (start * trained, end * trained)
    by_position: list[Scaling] = []
    for rate in RATES:
        by_position.append(Scaling(BY_PARTS, ramp=ramp, dynamic="position", rate=rate, train_length=trained))
    for rate in RATES:
        by_position.append(Scaling(NTK, dynamic="position", rate=rate, train_length=trained))
    by_length = [replace(scaling, dynamic="length") for scaling in by_position]
    concave = Scaling(CONCAVE, dynamic="position", train_length=trained, power=POWER)
    # Half of a small ratio would be no factor.
    ntk_factors = [factor for factor in (ratio / 2, ratio, 2 * ratio) if factor > 1]
    linear_factors = [factor for factor in (ratio / 2, ratio) if factor > 1]
    static = [
        *(Scaling(NTK, factor) for factor in ntk_factors),
        *(Scaling(BY_PARTS, factor, ramp) for factor in (ratio, 2 * ratio)),
        *(Scaling("linear", factor) for factor in linear_factors),
    ]
    dynamic = _possible(model, [concave, *by_position])
    if not model.decoder or not dynamic:
        dynamic = [*_possible(model, by_length), *dynamic]
    return [UNSCALED, *dynamic, *_possible(model, static)]


def _possible(model: Model, scalings: Sequence[Scaling]) -> list[Scaling]:
    """Those that the model can compute."""
    found = []
    for scaling in scalings:
        try:
            model.check_scaling(scaling)
        except UsageError:
            continue
        found.append(scaling)
    return found


def command(
    model: str | Path,
    scaling: Scaling,
    trained: int | None,
    source: SourceOptions,
    *,
    slopes: str | None = None,
) -> str:
    """The command line that bakes a scaling in; ``slopes`` is the file of a fitted scaling."""
    request = request_for(scaling, trained, told=source.get("train_length") is not None)
    if request.slopes is not None and slopes is not None:
        request = replace(request, slopes=replace(request.slopes, name=slopes))
    return shlex.join(
        argv(
            None,
            str(model),
            revision=source.get("revision"),
            subfolder=source.get("subfolder"),
            **request.options,
            out="DIR",
            set=set_values(source.get("overrides") or {}),
        )
    )
