"""The design of the evidence: models, scalings, lengths, and numbers of prompts and windows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.scaling.scaling import UNSCALED, Basis, Scaling
from converter.scaling.slopes import Slopes, exponents, stock_slopes

EXAMPLES = Path(__file__).parent
TRAINED_LENGTH = 256
MULTIPLES = (1, 2, 4, 8)
LENGTHS = tuple(multiple * TRAINED_LENGTH for multiple in MULTIPLES)
PROMPTS = {256: 300, 512: 300, 1024: 300, 2048: 100}
"""Number of prompts of the lines task for each length."""
WINDOWS = 32
"""Number of windows of text; each has the longest length and comes from a different file."""

SCALE = 4.0
# ntk-published does not change the last 4 of 12 heads, and divides the flattest slope only by 4^(7/11). With
# SMALL_SCALE, ntk divides its flattest slope by the same factor.
SMALL_SCALE = round(SCALE ** max(exponents("ntk-published", stock_slopes(12))), 2)
RATES = (1.0, 2.0)
RAMPS = ((1 / 16, 1 / 4), (1 / 8, 1 / 2), (1 / 4, 1.0))
"""Ramps of by-parts, in parts of the trained length; the second one is the default."""
TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.6)
"""Of by-parts; 0 is none."""
RUNS: tuple[dict[str, Any], ...] = (
    {"methods": ("none", "ntk"), "scales": (SCALE,), "dynamic": ("length", "position"), "rates": RATES},
    {"methods": ("linear",), "scales": (SCALE,)},
    {"methods": ("by-parts",), "scales": (SCALE,), "dynamic": ("position",), "ramps": RAMPS},
)
"""The scalings that every model gets, as arguments of ``evaluate``."""
RUNS_OF_12_HEADS: tuple[dict[str, Any], ...] = (
    {"methods": ("ntk-published",), "scales": (SCALE,)},
    {"methods": ("ntk",), "scales": (SMALL_SCALE,)},
)
"""More scalings for the models with 12 heads. With 8 or any power of two, ntk-published equals ntk."""

# The names of scalings in results.
NONE = str(UNSCALED)
LINEAR = str(Scaling("linear", SCALE))
NTK = str(Scaling("ntk", SCALE))
SMALL_NTK = str(Scaling("ntk", SMALL_SCALE))
PUBLISHED = str(Scaling("ntk-published", SCALE))
RAMP = (TRAINED_LENGTH / 8, TRAINED_LENGTH / 2)
"""The default ramp of by-parts, in tokens."""
LOW_RAMP = (TRAINED_LENGTH / 16, TRAINED_LENGTH / 4)


def by_parts(ramp: tuple[float, float] = RAMP) -> str:
    """The name of position-dynamic by-parts in results, given a ramp in tokens."""
    return str(Scaling("by-parts", dynamic="position", train_length=TRAINED_LENGTH, ramp=ramp))


def static_by_parts(ramp: tuple[float, float] = RAMP) -> str:
    """The name of static by-parts in results, given a ramp in tokens."""
    return str(Scaling("by-parts", SCALE, ramp))


BY_PARTS, STATIC_BY_PARTS = by_parts(), static_by_parts()
TEMPERED = {f"C = {each}": f"{BY_PARTS}, temperature {each}" for each in TEMPERATURES}
"""Column of a table -> position-dynamic by-parts with this temperature."""
FITTED = "fitted, position"


def dynamic(kind: Basis, rate: float) -> str:
    """The name of a dynamic ntk scaling in results."""
    return str(Scaling("ntk", dynamic=kind, rate=rate, train_length=TRAINED_LENGTH))


SCALINGS = (
    NONE,
    LINEAR,
    NTK,
    SMALL_NTK,
    PUBLISHED,
    *(dynamic("length", rate) for rate in RATES),
    *(dynamic("position", rate) for rate in RATES),
    *(static_by_parts((start * TRAINED_LENGTH, end * TRAINED_LENGTH)) for start, end in RAMPS),
    *(by_parts((start * TRAINED_LENGTH, end * TRAINED_LENGTH)) for start, end in RAMPS),
)
"""All scalings, in the order of the tables."""


@dataclass(frozen=True)
class Model:
    """One of the trained models."""

    task: str
    heads: int
    seed: int
    bias_max: int | None = None
    """``alibi_bias_max`` of an MPT; None for a BLOOM."""
    falcon: bool = False
    """Whether it is a Falcon, whose bias is divided by sqrt(head size)."""

    @property
    def kind(self) -> str:
        """The name of all models that differ from it only in their seed."""
        return f"{self.task}-{self.heads}{self._bias}"

    @property
    def name(self) -> str:
        """Its name in results."""
        return f"{self.task}-{self.heads}-{self.seed}{self._bias}"

    @property
    def _bias(self) -> str:
        if self.falcon:
            return "-falcon"
        return "" if self.bias_max is None else f"-max-{self.bias_max}"

    @property
    def slopes(self) -> Slopes:
        """Its stock slopes."""
        return stock_slopes(self.heads, 8 if self.bias_max is None else self.bias_max)

    def folder(self, models: Path) -> Path:
        """The folder of its weights; the first model's are in this repository."""
        return EXAMPLES / "tiny-bloom" if self.name == "lines-8-0" else models / self.name


KINDS = tuple(
    tuple(Model(task, heads, seed, bias_max) for seed in range(seeds))
    for task, heads, bias_max, seeds in (
        ("lines", 8, None, 4),
        ("lines", 12, None, 2),
        ("text", 8, None, 2),
        ("text", 12, None, 2),
        ("lines", 8, 5, 2),
        ("lines", 12, 5, 1),
        ("text", 8, 5, 2),
    )
)
"""Models of a kind differ only in their seed. The flattest head sees 5 times the trained length or, with a
`bias_max` of 5, 0.6 times that length."""
MODELS = tuple(model for kind in KINDS for model in kind)
