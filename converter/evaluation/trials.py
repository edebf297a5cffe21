"""Which scalings are tried: the cross product of what the user lists."""

from __future__ import annotations

from collections.abc import Sequence

from converter.errors import UsageError
from converter.scaling import Dynamic, Method, Request


def trials(
    methods: Sequence[Method],
    scales: Sequence[float] = (),
    dynamics: Sequence[Dynamic] = (),
    rates: Sequence[float] = (),
    train_length: int | None = None,
) -> list[Request]:
    """Every method with every scale, and with every dynamic form and rate; ``none`` once, and first.

    Args:
        methods: of ``converter.scaling.METHODS``; a repeated one counts once.
        scales: static scale factors.
        dynamics: ``length`` and ``position``.
        rates: of the dynamic forms; 1 if there is none.
        train_length: trained length in tokens, where the checkpoint does not tell.

    Raises:
        UsageError: a method without a strength, or a strength without a method.
    """
    scaling = [method for method in dict.fromkeys(methods) if method != "none"]
    if scaling and not scales and not dynamics:
        raise UsageError(f"--methods {scaling[0]} needs a strength; give --scales 2,4 or --dynamic position")
    if (scales or dynamics) and not scaling:
        raise UsageError("--scales and --dynamic need a method that scales; give --methods ntk, for one")
    if rates and not dynamics:
        raise UsageError("--rates belongs to --dynamic; give --dynamic position, for one, or drop --rates")
    found = [Request("none", train_length=train_length)] if "none" in methods else []
    for method in scaling:
        found += [Request(method, scale=scale, train_length=train_length) for scale in dict.fromkeys(scales)]
        found += [
            Request(method, dynamic=dynamic, rate=rate, train_length=train_length)
            for dynamic in dict.fromkeys(dynamics)
            for rate in dict.fromkeys(rates or (1.0,))
        ]
    return found
