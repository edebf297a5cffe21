"""The scalings to try: the cross product of the user's lists."""

from __future__ import annotations

from collections.abc import Sequence

from converter.errors import UsageError
from converter.scaling.request import BY_PARTS, Parts, Request
from converter.scaling.scaling import Basis, Method


def trials(
    methods: Sequence[Method],
    scales: Sequence[float] = (),
    dynamics: Sequence[Basis] = (),
    rates: Sequence[float] = (),
    train_length: int | None = None,
    ramps: Sequence[Parts] = (),
) -> list[Request]:
    """Every method with every scale, and with every dynamic form and rate; ``none`` comes first, and once.

    Args:
        methods: names from ``converter.scaling.scaling.METHODS``; repetitions are ignored.
        scales: static scale factors.
        dynamics: ``length`` and ``position``.
        rates: rates of the dynamic forms; 1 by default.
        train_length: trained length in tokens, if the checkpoint does not give it.
        ramps: ramps of ``by-parts``; by default the model's own one.

    Raises:
        UsageError: a method has no strength, or a strength has no method.
    """
    scaling = [method for method in dict.fromkeys(methods) if method != "none"]
    if scaling and not scales and not dynamics:
        raise UsageError(f"`methods` {scaling[0]} needs a strength; give `scales` 2,4 or `dynamics` position")
    if (scales or dynamics) and not scaling:
        raise UsageError("`scales` and `dynamics` need a method that scales; add e.g. `methods` ntk")
    if rates and not dynamics:
        raise UsageError("`rates` belongs to `dynamics`; add e.g. `dynamics` position, or drop `rates`")
    if ramps and BY_PARTS not in methods:
        raise UsageError("`ramps` belongs to by-parts; add `methods` by-parts, or drop `ramps`")
    found = [Request("none", train_length=train_length)] if "none" in methods else []
    for method in scaling:
        for ramp in dict.fromkeys(ramps) if ramps and method == BY_PARTS else (None,):
            found += [
                Request(method, scale=scale, train_length=train_length, ramp=ramp)
                for scale in dict.fromkeys(scales)
            ]
            found += [
                Request(method, dynamic=dynamic, rate=rate, train_length=train_length, ramp=ramp)
                for dynamic in dict.fromkeys(dynamics)
                for rate in dict.fromkeys(rates or (1.0,))
            ]
    return found
