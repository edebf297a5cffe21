"""The scalings to measure, the lengths to measure them at, and the command that bakes one in."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from converter.argv import argv
from converter.errors import UsageError
from converter.model.model import Model
from converter.model.open import SourceOptions
from converter.model.overrides import set_values
from converter.scaling.request import BY_PARTS, NTK, Parts, Request, request_for
from converter.scaling.scaling import UNSCALED, Basis, Method, Scaling

RATES = (1.0, 2.0)
"""Rates of the dynamic scalings that ``tune`` tries."""


def trials(
    methods: Sequence[Method],
    scales: Sequence[float] = (),
    dynamic: Sequence[Basis] = (),
    rates: Sequence[float] = (),
    train_length: int | None = None,
    ramps: Sequence[Parts] = (),
) -> list[Request]:
    """Every method with every scale, and with every dynamic form and rate; ``none`` comes first, and once.

    Without ``rates`` the dynamic forms have rate 1, and without ``ramps`` by-parts has the model's own ramp.
    Raises ``UsageError`` for a method without a strength, or a strength without a method.
    """
    scaling = [method for method in dict.fromkeys(methods) if method != "none"]
    if rates and not dynamic:
        raise UsageError("`rates` belongs to `dynamic`; add e.g. `dynamic` position, or drop `rates`")
    if scaling and not scales and not dynamic:
        raise UsageError(f"`methods` {scaling[0]} needs a strength; give `scales` 2,4 or `dynamic` position")
    if (scales or dynamic) and not scaling:
        given = "`scales`" if scales else "`dynamic`"
        raise UsageError(f"{given} needs a method that scales; add e.g. `methods` ntk")
    if ramps and BY_PARTS not in methods:
        raise UsageError("`ramps` belongs to by-parts; add `methods` by-parts, or drop `ramps`")
    found = [Request("none", train_length=train_length)] if "none" in methods else []
    for method in scaling:
        for ramp in dict.fromkeys(ramps) if ramps and method == BY_PARTS else (None,):
            more: dict[str, Any] = {"train_length": train_length, "ramp": ramp}
            found += [Request(method, scale=scale, **more) for scale in dict.fromkeys(scales)]
            found += [
                Request(method, dynamic=basis, rate=rate, **more)
                for basis in dict.fromkeys(dynamic)
                for rate in dict.fromkeys(rates or (1.0,))
            ]
    return found


def candidates(model: Model, trained: int, target: int) -> list[Scaling]:
    """The scalings to try, without those that the model cannot compute; milder ones come first.

    With r = target / trained, they are: none; position-dynamic by-parts and ntk with rates 1 and 2; ntk with
    factors r / 2, r and 2 r, since on published and small models factors above and below r were best;
    by-parts with r and 2 r; linear with r / 2 and r.
    Length-dynamic scalings are tried for encoders, and for models without position-dynamic ones (rotary
    models). In other decoders they would change the scaling of text already read while the model generates,
    and small models retrieved no more with them.
    """

    def possible(scaling: Scaling) -> bool:
        try:
            model.check_scaling(scaling)
        except UsageError:
            return False
        return True

    ratio = target / trained
    factors = [factor for factor in (ratio / 2, ratio, 2 * ratio) if factor > 1]
    start, end = model.defaults.ramp
    ramp = (start * trained, end * trained)
    by_position = [
        Scaling(method, ramp=own, dynamic="position", rate=rate, train_length=trained)
        for method, own in ((BY_PARTS, ramp), (NTK, None))
        for rate in RATES
    ]
    by_length = [replace(scaling, dynamic="length") for scaling in by_position]
    static = [
        *(Scaling("ntk", factor) for factor in factors),
        *(Scaling("by-parts", factor, ramp) for factor in factors[-2:]),
        *(Scaling("linear", factor) for factor in factors[:-1]),
    ]
    dynamic = list(filter(possible, by_position))
    if not model.decoder or not dynamic:
        dynamic = [*filter(possible, by_length), *dynamic]
    return [UNSCALED, *dynamic, *filter(possible, static)]


def ladder(trained: int, target: int) -> list[int]:
    """The lengths of the curve: the trained length, its doublings, and the target."""
    lengths = [trained]
    while 2 * lengths[-1] < target:
        lengths.append(2 * lengths[-1])
    return [*lengths, target]


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
