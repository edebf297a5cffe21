"""A study of the evidence: what fitted slopes do to small models, beside none and the formulas.

The flattest head of all models but the first sees 0.6 times the trained length, as in BLOOM-1b7 and MPT-7B
(their slopes have MPT's `alibi_bias_max` of 5). Slopes are fitted to prompts of the same task, drawn with
another seed than those that measure them, or to text of other files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from evidence_design import LENGTHS, SCALE, TRAINED_LENGTH, Model
from evidence_measure import Run, Study
from lines_task import prompts_as_json
from text_task import read_corpus

from converter import convert, fit
from converter.errors import NoGain
from converter.evaluation.tasks import make_task
from converter.scaling.request import SLOPES_FILE
from converter.scaling.slopes import NATS

ITEMS, SEED = 1200, 1
"""Prompts to fit to, as many of each length, and the seed that draws them."""
CHARACTERS = 400_000
"""Of the text to fit to."""
MINUTES = 60.0
"""Most time of a fit: so much that its steps decide, and not the speed of the machine."""


@dataclass(frozen=True)
class Form:
    """One way to fit."""

    name: str
    """In the table."""
    static: bool = True
    shared: bool = False
    multiple: int = int(SCALE)
    """Fitted up to so many times the trained length."""

    @property
    def target(self) -> int:
        """The longest sequence to fit to, in tokens."""
        return self.multiple * TRAINED_LENGTH

    @property
    def start(self) -> int:
        """What the fit takes for the trained length.

        A target must be longer; so if there is to be no length above the trained one, a shorter length has to
        stand for it. Then the factor is the same, and no slope means anything else.
        """
        return TRAINED_LENGTH if self.multiple > 1 else TRAINED_LENGTH // int(SCALE)

    @property
    def lengths(self) -> Sequence[int]:
        """Lengths of the prompts to fit to."""
        return [length for length in LENGTHS if length <= self.target]

    @property
    def slug(self) -> str:
        """Its part of a folder's name."""
        return self.name.replace(" ", "-").replace(",", "")


POSITION = Form("position", static=False)
STATIC = Form("static")
AT_1X = Form("static, fitted at 1x only", multiple=1)
SHARED = Form("static, shared by the layers", shared=True)
FORMS = {
    Model("lines", 8, 0, 5): (POSITION, STATIC, AT_1X, SHARED),
    Model("text", 8, 0, 5): (POSITION, STATIC),
    Model("lines", 8, 0): (POSITION,),
}
"""The models, and the ways in which each is fitted."""


def material(model: Model, models: Path, form: Form) -> dict[str, Any]:
    """What to fit to, as arguments of ``fit``: text that the model was trained on, or prompts."""
    if model.task == "text":
        file = models / "fit.txt"
        file.write_text(read_corpus().training[:CHARACTERS], encoding="utf-8", newline="\n")
        return {"text": [file]}
    file = models / f"fit-{form.target}.jsonl"
    rows = prompts_as_json(form.lengths, ITEMS // len(form.lengths), SEED)
    file.write_text(rows, encoding="utf-8")
    return {"prompts": [make_task("prompts", file)]}


def fitted(model: Model, models: Path, form: Form) -> Path | None:
    """The folder of the model with fitted slopes, which are fitted if it is missing; None without a gain."""
    out = models / f"{model.name}-fitted-{form.slug}"
    nothing = out.with_name(f"{out.name}.nothing")  # a fit without a gain is not tried again
    if not out.exists() and not nothing.exists():
        source = model.folder(models)
        try:
            found = fit(
                source,
                form.target,
                static=form.static,
                shared=form.shared,
                minutes=MINUTES,
                train_length=form.start,
                progress=sys.stderr.isatty(),
                **material(model, models, form),
            )
        except NoGain as error:
            print(f"{model.name}, {form.name}: {error}", flush=True)
            nothing.write_text(f"{error}\n", encoding="utf-8")
            return None
        print(f"{model.name}, {form.name}: {found.steps} steps, {found.seconds:.0f} s", flush=True)
        convert(source, out, slopes=found.slopes, train_length=TRAINED_LENGTH)
    return out if out.exists() else None


def formulas_and_fits(model: Model, models: Path) -> Sequence[Run]:
    """The formulas, and the fitted slopes."""
    stock = model.folder(models)
    folders = {form.name: fitted(model, models, form) for form in FORMS[model]}
    return [
        Run(stock, {"methods": ("none", "linear", "ntk", "by-parts"), "scales": (SCALE,)}),
        Run(stock, {"methods": ("ntk", "by-parts"), "dynamics": ("position",)}),
        *(Run(folder, name=f"fitted, {name}") for name, folder in folders.items() if folder is not None),
    ]


def places(model: Model) -> list[float]:
    """Where heads stand: log2 of span / trained length, for each head."""
    return [float(np.log2(NATS / slope / TRAINED_LENGTH)) for slope in model.slopes]


def kept(models: Path) -> dict[str, Any]:
    """What is kept with the results: what ``fit`` found, by model and form.

    Under ``slopes`` the exponents, [layers, or 1 for all layers][heads]; under ``nothing`` the message of
    a fit that gained nothing.
    """
    slopes: dict[str, dict[str, Any]] = {}
    nothing: dict[str, dict[str, str]] = {}
    for model, forms in FORMS.items():
        slopes[model.name], nothing[model.name] = {}, {}
        for form in forms:
            folder = models / f"{model.name}-fitted-{form.slug}"
            if folder.exists():
                content = json.loads((folder / SLOPES_FILE).read_text(encoding="utf-8"))
                slopes[model.name][form.name] = content["exponents"]
            else:
                said = folder.with_name(f"{folder.name}.nothing").read_text(encoding="utf-8")
                nothing[model.name][form.name] = said.strip()
    return {"slopes": slopes, "nothing": nothing}


STUDY = Study(
    name="fits",
    models=tuple(FORMS),
    prompts={256: 200, 512: 200, 1024: 200, 2048: 100},
    windows=16,
    longest=16 * TRAINED_LENGTH,
    runs=formulas_and_fits,
    found=kept,
)
