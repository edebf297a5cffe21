"""The scalings worth trying for a target length, and the command that bakes one in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from converter.errors import UsageError
from converter.recipes.overrides import words
from converter.scaling.request import Parts, command_line, request_for
from converter.scaling.scaling import UNSCALED, Dynamic, Scaling, Static

RATES = (1.0, 2.0)
"""Rates of the dynamic scalings to try."""


def candidates(
    trained: int,
    target: int,
    default_ramp: Parts,
    check: Callable[[Scaling], object],
    *,
    decoder: bool = True,
) -> list[Scaling]:
    """The scalings to try, without those that the model cannot compute; milder ones come first.

    With r = target / trained, they are: none; position-dynamic ntk and by-parts with rates 1 and 2; ntk with
    factors r / 2, r and 2 r, since on published and small models factors above and below r were best;
    by-parts with r and 2 r; linear with r / 2 and r. Length-dynamic scalings are tried for encoders, and
    for models without position-dynamic ones (rotary models). In other decoders they would change the scaling
    of text already read while the model generates, and small models retrieved no more with them.

    Args:
        trained: trained length in tokens.
        target: length to reach in tokens, above the trained length.
        default_ramp: the ramp of by-parts, see ``Recipe.defaults``.
        check: ``Recipe.check_scaling`` of the model; raises ``UsageError`` for a scaling it cannot compute.
        decoder: whether the model is causal.
    """

    def possible(scaling: Scaling) -> bool:
        try:
            check(scaling)
        except UsageError:
            return False
        return True

    ratio = target / trained
    factors = [factor for factor in (ratio / 2, ratio, 2 * ratio) if factor > 1]
    ramp = (default_ramp[0] * trained, default_ramp[1] * trained)
    by_position = [
        *(Dynamic("ntk", "position", rate, trained) for rate in RATES),
        *(Dynamic("by-parts", "position", rate, trained, ramp) for rate in RATES),
    ]
    by_length = [replace(scaling, dynamic="length") for scaling in by_position]
    static = [
        *(Static("ntk", factor) for factor in factors),
        *(Static("by-parts", factor, ramp) for factor in factors[-2:]),
        *(Static("linear", factor) for factor in factors[:-1]),
    ]
    dynamic = list(filter(possible, by_position))
    if not decoder or not dynamic:
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
    revision: str | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    told: bool = True,
    slopes: str | None = None,
) -> str:
    """The command line that bakes a scaling in.

    Args:
        model: the model as the user gave it.
        scaling: the scaling; not none.
        trained: the trained length in tokens, if it is known.
        revision: the revision as the user gave it, or None.
        overrides: the user's values for keys of the source's config, or None.
        told: whether the user gave the trained length.
        slopes: the file of a fitted scaling's slopes.
    """
    request = request_for(scaling, trained, told=told)
    if request.slopes is not None and slopes is not None:
        request = replace(request, slopes=replace(request.slopes, name=slopes))
    return command_line(str(model), request, "DIR", revision=revision, more=words(overrides or {}))
