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
from evidence_measure import Run, Study, train
from lines_task import document, prompts_as_json
from text_task import read_corpus

from converter import convert, fit
from converter.errors import NoGain
from converter.evaluation.tasks import make_task
from converter.scaling.request import SLOPES_FILE
from converter.scaling.slopes import NATS

ITEMS, SEED = 1200, 1
"""Prompts to fit to, as many of each length, and the seed that draws them."""
BYTES = 1_000_000
"""Of the text to fit to."""
DOCUMENTS = 400
"""Of lines and questions, as many as are fitted to where they are taken for a text."""
MINUTES = 60.0
"""Most time of a fit: so much that its steps decide, and not the speed of the machine."""
PROMPTS_OF, TEXT_OF = "prompts", "text"


@dataclass(frozen=True)
class Form:
    """One way to fit."""

    name: str
    """In the table."""
    static: bool = True
    shared: bool = False
    temperatures: bool = False
    multiple: int = int(SCALE)
    """Fitted up to so many times the trained length."""
    of: str = PROMPTS_OF
    """What a model of lines is fitted to: prompts, or the documents it was trained on as a text."""
    text: int = BYTES
    """How many bytes a model of text is fitted to."""
    seed: int = 0
    """Of the fit."""

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
    def slug(self) -> str:
        """Its part of a folder's name."""
        return self.name.replace(" ", "-").replace(",", "")


POSITION = Form("position", static=False)
STATIC = Form("static")
AT_1X = Form("static, fitted at 1x only", multiple=1)
SHARED = Form("static, shared by the layers", shared=True)
WARM = Form("static, with temperatures", temperatures=True)
WARM_POSITION = Form("position, with temperatures", static=False, temperatures=True)
FROM_TEXT = Form("static, fitted to text", of=TEXT_OF)
OTHER_SEED = Form("static, another seed of the fit", seed=1)
LITTLE = tuple(Form(f"static, {count:,} bytes", text=count) for count in (20_000, 100_000))
FORMS: dict[Model, tuple[Form, ...]] = {
    Model("lines", 8, 0, 5): (POSITION, WARM_POSITION, STATIC, WARM, AT_1X, SHARED, FROM_TEXT, OTHER_SEED),
    Model("lines", 8, 1, 5): (POSITION, STATIC, WARM, AT_1X),
    Model("lines", 12, 0, 5): (POSITION, STATIC, WARM, AT_1X),
    Model("lines", 8, 0): (POSITION, STATIC, AT_1X),
    Model("text", 8, 0, 5): (POSITION, STATIC, *LITTLE),
    Model("text", 8, 1, 5): (POSITION, STATIC),
}
"""The models, and the ways in which each is fitted."""
RULES = {"rule of the other models, by layer": True, "rule of the other models, for all layers": False}
"""Name in the table -> whether each layer has its own; see ``rule``."""


def material(model: Model, models: Path, form: Form) -> dict[str, Any]:
    """What to fit to, as arguments of ``fit``: text like that the model was trained on, or prompts."""
    if model.task == "text":
        file = models / f"fit-{form.text}.txt"
        file.write_text(read_corpus().training[: form.text], encoding="utf-8", newline="\n")
        return {"text": [file]}
    if form.of == TEXT_OF:
        file, rng = models / "fit-lines.txt", np.random.default_rng([SEED, form.target])
        file.write_text("".join(document(rng, form.target) for _ in range(DOCUMENTS)), encoding="utf-8")
        return {"text": [file]}
    file = models / f"fit-{form.target}.jsonl"
    lengths = [length for length in LENGTHS if length <= form.target]
    rows = prompts_as_json(lengths, ITEMS // len(lengths), SEED)
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
                temperatures=form.temperatures,
                seed=form.seed,
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


def places(model: Model) -> list[float]:
    """Where heads stand: log2 of span / trained length, for each head."""
    return [float(np.log2(NATS / slope / TRAINED_LENGTH)) for slope in model.slopes]


def rule(model: Model, models: Path, *, by_layer: bool) -> Path | None:
    """The folder of the model with the exponents that other models of its task were fitted to by position.

    A head gets the exponent that heads of its place and layer have in the other models, on average; or, if
    not ``by_layer``, those of its place in any layer. So it shows whether one rule would do for all models.
    None if no other model gained.
    """
    out = models / f"{model.name}-rule-{'by-layer' if by_layer else 'shared'}"
    if out.exists():
        return out
    found = []
    for other in FORMS:
        if other.task == model.task and other != model:
            train(other, models)
            folder = fitted(other, models, POSITION)
            if folder is not None:
                found.append((places(other), exponents_of(folder)))
    if not found:
        return None
    heads, each = places(model), []
    for where, layers in found:  # between the places that are known; beyond them, the nearest one
        order = np.argsort(where)
        each.append([np.interp(heads, np.array(where)[order], np.array(row)[order]) for row in layers])
    rows = np.mean(each, axis=0)
    rows = rows if by_layer else rows.mean(axis=0, keepdims=True)
    scaling = {"type": "fitted", "train_seq_len": TRAINED_LENGTH, "dynamic": "position", "rate": 1.0}
    convert(model.folder(models), out, slopes={**scaling, "exponents": rows.round(6).tolist()})
    return out


def exponents_of(folder: Path) -> list[list[float]]:
    """The exponents of a converted model with fitted slopes, [layers, or 1 for all layers][heads]."""
    content: dict[str, Any] = json.loads((folder / SLOPES_FILE).read_text(encoding="utf-8"))
    exponents: list[list[float]] = content["exponents"]
    return exponents


def formulas_and_fits(model: Model, models: Path) -> Sequence[Run]:
    """The formulas, the fitted slopes, and the rules that follow from those of other models."""
    stock = model.folder(models)
    folders = {f"fitted, {form.name}": fitted(model, models, form) for form in FORMS[model]}
    if model.task == "lines":
        for name, by_layer in RULES.items():
            folders[name] = rule(model, models, by_layer=by_layer)
    return [
        Run(stock, {"methods": ("none", "linear", "ntk", "by-parts"), "scales": (SCALE,)}),
        Run(stock, {"methods": ("ntk", "by-parts"), "dynamic": ("position",)}),
        *(Run(folder, name=name) for name, folder in folders.items() if folder is not None),
    ]


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
                slopes[model.name][form.name] = exponents_of(folder)
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
