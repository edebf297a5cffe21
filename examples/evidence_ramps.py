"""A study of the evidence: where the ramp of by-parts should lie, on small models of two kinds.

In BLOOM's slopes, down to 2^-8, the flattest head of these models sees 5 times their trained length. With
MPT's `alibi_bias_max` of 5, it sees 0.6 times that length, as in BLOOM-1b7 and MPT-7B.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence_design import SCALE, TRAINED_LENGTH, Model
from evidence_measure import Run, Study

from converter.scaling.slopes import NATS

RAMPS = ((1 / 32, 1 / 8), (1 / 16, 1 / 4), (1 / 8, 1 / 2), (1 / 4, 1))
"""Ramps in parts of the trained length."""
RANKS = ((0, 0.5),)
"""Ramps by the rank of a head: its place from the steepest, 0, to the flattest, 1. From 0 to 1 is ntk."""


def by_rank(model: Model, ranks: tuple[float, float]) -> tuple[float, float]:
    """The ramp between the spans at two ranks, in parts of the trained length.

    The slopes of 12 heads are not evenly spaced, so a rank is a place between the shortest span and the
    longest, by their logarithms.
    """
    shortest, longest = (NATS / slope / TRAINED_LENGTH for slope in (max(model.slopes), min(model.slopes)))
    start, end = (shortest * (longest / shortest) ** rank for rank in ranks)
    return start, end


def runs(model: Model, models: Path) -> Sequence[Run]:
    """The scalings that every model gets."""
    ramps = [*RAMPS, *(by_rank(model, ranks) for ranks in RANKS)]
    scalings: tuple[dict[str, Any], ...] = (
        {"methods": ("none", "linear", "ntk"), "scales": (SCALE,)},
        {"methods": ("by-parts",), "scales": (SCALE,), "ramps": ramps},
        {"methods": ("ntk",), "dynamic": ("position",)},
        {"methods": ("by-parts",), "dynamic": ("position",), "ramps": RAMPS[1:2]},
    )
    return [Run(model.folder(models), each) for each in scalings]


STUDY = Study(
    name="ramps",
    models=(Model("lines", 8, 0), Model("lines", 8, 0, 5)),
    prompts={256: 100, 512: 60, 1024: 60, 2048: 40},
    windows=16,
    runs=runs,
)
