"""A study of the evidence: which temperature by-parts should have, on all models and both kinds of text.

A temperature C multiplies the queries of a head by a^(C * t), where t is the exponent of the head's slope: so
far as a head is stretched, so much more closely it looks at the content of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evidence_design import LENGTHS, MODELS, TEMPERATURES, WINDOWS, Model
from evidence_measure import Run, Study


def runs(model: Model, models: Path) -> Sequence[Run]:
    """The scalings that every model gets."""
    scalings = {
        "methods": ("none", "by-parts"),
        "dynamic": ("position",),
        "temperatures": (0.0, *TEMPERATURES),
    }
    return [Run(model.folder(models), scalings)]


STUDY = Study(
    name="temperatures",
    models=sorted(MODELS, key=lambda model: (model.seed, model.heads)),  # one of each kind comes first
    prompts=dict.fromkeys(LENGTHS, 300),
    windows=WINDOWS,
    runs=runs,
)
