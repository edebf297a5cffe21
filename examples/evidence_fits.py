"""Show what fitted slopes do to small models of two kinds, beside none and the formulas.

    python examples/evidence_fits.py            # train, fit and measure what is missing; half an hour
    python examples/evidence_fits.py --tables    # write only the table, from the stored results

The models are those of evidence_ramps.py. Slopes are fitted to prompts of the same task, drawn with another
seed than those that measure them, up to 4 times the trained length; 8 times is beyond what they saw. Fitted
models are kept in .evidence/, and results in examples/evidence/fits.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence_design import LENGTHS, SCALE, TRAINED_LENGTH, Model
from evidence_measure import Run, Study
from lines_task import prompts_as_json

from converter import convert, fit
from converter.evaluation.tasks import make_task

TARGET = int(SCALE) * TRAINED_LENGTH
ITEMS, SEED = 400, 1
"""Prompts of each length to fit to, and the seed that draws them."""
FORMS: dict[str, dict[str, Any]] = {"position": {}, "static": {"static": True}}
"""What is fitted: the name of the folder -> arguments of ``fit``."""


def fitted(model: Model, models: Path, form: str) -> Path:
    """The folder of the model with fitted slopes; they are fitted if it is missing."""
    out = models / f"{model.name}-fitted-{form}"
    if not out.exists():
        file = models / "fits.jsonl"
        lengths = [length for length in LENGTHS if length <= TARGET]
        file.write_text(prompts_as_json(lengths, ITEMS, SEED), encoding="utf-8")
        source = model.folder(models)
        found = fit(
            source,
            TARGET,
            prompts=[make_task("prompts", file)],
            train_length=TRAINED_LENGTH,
            progress=sys.stderr.isatty(),
            **FORMS[form],
        )
        convert(source, out, slopes=found.slopes, train_length=TRAINED_LENGTH)
    return out


def runs(model: Model, models: Path) -> Sequence[Run]:
    """The formulas, and the fitted slopes."""
    stock = model.folder(models)
    return [
        (stock, {"methods": ("none", "ntk", "by-parts"), "scales": (SCALE,), "dynamics": ("position",)}),
        *((fitted(model, models, form), {}) for form in FORMS),
    ]


STUDY = Study(
    name="fits",
    models=(Model("lines", 8, 0), Model("lines", 8, 0, 5)),
    prompts={256: 100, 512: 100, 1024: 100, 2048: 60},
    windows=16,
    runs=runs,
)

if __name__ == "__main__":
    STUDY.main("Fit slopes of small models and measure them.")
