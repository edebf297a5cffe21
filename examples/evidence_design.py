"""What the evidence consists of: models, scalings, lengths, and how much is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.scaling import Dynamic, Scaling
from converter.slopes import exponents, stock_slopes

EXAMPLES = Path(__file__).parent
TRAINED_LENGTH = 256
MULTIPLES = (1, 2, 4, 8)
LENGTHS = tuple(multiple * TRAINED_LENGTH for multiple in MULTIPLES)
PROMPTS = {256: 300, 512: 300, 1024: 300, 2048: 100}
"""Of the lines, by length."""
WINDOWS = 32
"""Of the text, each of the longest length, and each of another file."""

SCALE = 4.0
# ntk-published leaves the last 4 of 12 heads alone, and divides the flattest by 4^(7/11) only. This is the
# scale of the ntk that divides its flattest head by as much.
SMALL_SCALE = round(SCALE ** max(exponents("ntk-published", stock_slopes(12))), 2)
RATES = (1.0, 2.0)
RUNS: tuple[dict[str, Any], ...] = (
    {"methods": ("none", "ntk"), "scales": (SCALE,), "dynamics": ("length", "position"), "rates": RATES},
    {"methods": ("linear",), "scales": (SCALE,)},
)
"""What every model is scaled by, as arguments of ``evaluate``."""
RUNS_OF_12_HEADS: tuple[dict[str, Any], ...] = (
    {"methods": ("ntk-published",), "scales": (SCALE,)},
    {"methods": ("ntk",), "scales": (SMALL_SCALE,)},
)
"""And those of 12 heads besides: with 8, as with any power of two, ntk-published is ntk."""

# As results name them.
NONE = str(Scaling("none"))
LINEAR = str(Scaling("linear", SCALE))
NTK = str(Scaling("ntk", SCALE))
SMALL_NTK = str(Scaling("ntk", SMALL_SCALE))
PUBLISHED = str(Scaling("ntk-published", SCALE))


def dynamic(kind: Dynamic, rate: float) -> str:
    """The name of a dynamic ntk."""
    return str(Scaling("ntk", dynamic=kind, rate=rate, train_length=TRAINED_LENGTH))


SCALINGS = (
    NONE,
    LINEAR,
    NTK,
    SMALL_NTK,
    PUBLISHED,
    *(dynamic("length", rate) for rate in RATES),
    *(dynamic("position", rate) for rate in RATES),
)
"""In the order of the tables."""


@dataclass(frozen=True)
class Model:
    """One of the trained models."""

    task: str
    heads: int
    seed: int

    @property
    def name(self) -> str:
        """As results name it."""
        return f"{self.task}-{self.heads}-{self.seed}"

    def folder(self, models: Path) -> Path:
        """Where its weights are; the first one's are in the repository."""
        return EXAMPLES / "tiny-bloom" if self.name == "lines-8-0" else models / self.name


TASKS = ("lines", "text")
HEADS = (8, 12)
SEEDS = {("lines", 8): 4, ("lines", 12): 2, ("text", 8): 2, ("text", 12): 2}
"""How many models of each kind, with seeds from 0."""
MODELS = tuple(Model(task, heads, seed) for (task, heads), seeds in SEEDS.items() for seed in range(seeds))
