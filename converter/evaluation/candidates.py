"""Scalings that are worth trying for a target length, and the command that bakes one in."""

from __future__ import annotations

import shlex
from pathlib import Path

from converter.scaling import Scaling


def candidates(trained: int, target: int) -> list[Scaling]:
    """The scalings to try, the milder first.

    With r = target / trained: none; position-dynamic ntk with rates 1 and 2; ntk with factors r / 2, r and
    2 r, since on published and small models factors above and below r were best; linear with r / 2 and r.
    Length-dynamic scalings are left out: what a model has read so far changes under them while it
    writes, and they were never better than position-dynamic ones.

    Args:
        trained: trained length in tokens.
        target: tokens to reach, more than that.
    """
    ratio = target / trained
    factors = [factor for factor in (ratio / 2, ratio, 2 * ratio) if factor > 1]
    return [
        Scaling("none"),
        *(Scaling("ntk", dynamic="position", rate=rate, train_length=trained) for rate in (1.0, 2.0)),
        *(Scaling("ntk", factor=factor) for factor in factors),
        *(Scaling("linear", factor=factor) for factor in factors[:-1]),
    ]


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
