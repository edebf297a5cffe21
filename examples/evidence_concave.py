"""A study of the evidence: a concave penalty beside by-parts and ntk, all by position.

Its design was fixed before anything was measured, and is in examples/evidence/README.md: the power is chosen on
some models, and judged on others.
"""

from __future__ import annotations

from evidence_design import BY_PARTS, NONE, TRAINED_LENGTH, Model, dynamic

from converter.scaling.scaling import CONCAVE, POWERS, UNSCALED, Scaling

CHOOSING = (
    Model("lines", 8, 0),
    Model("lines", 8, 2),
    Model("lines", 8, 0, 5),
    Model("text", 8, 0),
    Model("text", 8, 0, 5),
)
"""On which the power is chosen."""
JUDGING = (
    Model("lines", 8, 1),
    Model("lines", 8, 0, falcon=True),
    Model("lines", 8, 0, 12),
    Model("lines", 8, 0, 4),
    Model("lines", 12, 0),
    Model("text", 8, 0, falcon=True),
    Model("text", 12, 0),
    Model("text", 8, 0, 4),
)
"""On which the chosen power is compared with by-parts."""
SEED = 55
"""Of the prompts and of the places of windows: none that was used before."""
PROMPTS = {512: 60, 1024: 100, 2048: 60, 4096: 24}
"""Number of prompts of lines for each length."""
WINDOWS = 12
"""Number of windows of text; each has the longest length, and comes from another file."""
LENGTHS = tuple(PROMPTS)


def concave(power: int) -> Scaling:
    """The concave penalty with this power."""
    return Scaling(CONCAVE, dynamic="position", train_length=TRAINED_LENGTH, power=power)


SCALINGS = (
    UNSCALED,
    Scaling(
        "by-parts",
        dynamic="position",
        train_length=TRAINED_LENGTH,
        ramp=(TRAINED_LENGTH / 8, TRAINED_LENGTH / 2),
    ),
    *map(concave, POWERS),
    Scaling("ntk", dynamic="position", train_length=TRAINED_LENGTH),
)
assert [*map(str, SCALINGS)][:2] == [NONE, BY_PARTS]
assert str(SCALINGS[-1]) == dynamic("position", 1)
CLOSE = 0.01
"""Powers whose shares of right answers differ by less are chosen between by their perplexity."""
