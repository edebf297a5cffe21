"""Scalings that are worth trying for a target length, and the command that bakes one in."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from converter.errors import UsageError
from converter.scaling import Scaling

RATES = (1.0, 2.0)
"""Of the dynamic scalings."""


def candidates(trained: int, target: int, check: Callable[[Scaling], object]) -> list[Scaling]:
    """The scalings to try, of those that the model can compute; the milder first.

    With r = target / trained: none; position-dynamic ntk with rates 1 and 2; ntk with factors r / 2, r and
    2 r, since on published and small models factors above and below r were best; linear with r / 2 and r.
    Length-dynamic scalings are tried only of models that have no position-dynamic ones (the rotary): what
    a model has read so far changes under them while it writes, and on small models they found no more.

    Args:
        trained: trained length in tokens.
        target: tokens to reach, more than that.
        check: ``Recipe.check_scaling`` of the model, which raises ``UsageError`` for what it cannot compute.
    """

    def possible(scaling: Scaling) -> bool:
        try:
            check(scaling)
        except UsageError:
            return False
        return True

    ratio = target / trained
    factors = [factor for factor in (ratio / 2, ratio, 2 * ratio) if factor > 1]
    by_position = [Scaling("ntk", dynamic="position", rate=rate, train_length=trained) for rate in RATES]
    by_length = [replace(scaling, dynamic="length") for scaling in by_position]
    static = [
        *(Scaling("ntk", factor=factor) for factor in factors),
        *(Scaling("linear", factor=factor) for factor in factors[:-1]),
    ]
    dynamic = list(filter(possible, by_position)) or list(filter(possible, by_length))
    return [Scaling("none"), *dynamic, *filter(possible, static)]


def ladder(trained: int, target: int) -> list[int]:
    """The lengths of the curve: the trained one, its doublings, and the target."""
    lengths = [trained]
    while 2 * lengths[-1] < target:
        lengths.append(2 * lengths[-1])
    return [*lengths, target]


def command(model: str | Path, scaling: Scaling, train_length: int | None, revision: str | None) -> str:
    """The command line that bakes a scaling in.

    Args:
        model: as the user gave it.
        scaling: not none.
        train_length: as the user gave it, or None.
        revision: as the user gave it, or None.
    """
    options = {
        "--revision": revision,
        "--method": scaling.method if scaling.method != "ntk" else None,
        "--scale": None if scaling.factor is None else f"{scaling.factor:g}",
        "--dynamic": scaling.dynamic,
        "--rate": None if scaling.rate is None else f"{scaling.rate:g}",
        "--train-length": train_length,
        "--out": "DIR",
    }
    words = ["ntk-convert", str(model)]
    for option, value in options.items():
        words += [option, str(value)] if value is not None else []
    return shlex.join(words)
