"""Train the models of the evidence, measure them, and write results and tables: what the scripts share."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from evidence_design import EXAMPLES, LENGTHS, NONE, TRAINED_LENGTH, Model
from lines_task import prompts_as_json
from text_task import read_corpus

from converter.evaluation.benchmark import doubling_lengths as ladder
from converter.evaluation.evaluate import evaluate
from converter.evaluation.results import Measurement, Results
from converter.evaluation.statistics import compare_scores as compare
from converter.evaluation.tasks import make_task

ROOT = EXAMPLES.parent
MODELS_FOLDER = ROOT / ".evidence"


@dataclass(frozen=True)
class Run:
    """One call of ``evaluate``."""

    folder: Path
    arguments: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    """Of its one scaling in results, where the scaling's own name would not tell it from others."""


def train(model: Model, models: Path, script: str = "train.py") -> Path:
    """The folder of a model; a missing one is trained in a process of its own, as that sets torch up."""
    folder = model.folder(models)
    if folder.exists():
        return folder
    command = [sys.executable, str(EXAMPLES / script), "--task", model.task, "--heads", str(model.heads)]
    command += ["--seed", str(model.seed)]
    command += [] if model.bias_max is None else ["--bias-max", str(model.bias_max)]
    command += ["--falcon"] if model.falcon else []
    subprocess.run([*command, "--out", str(folder)], check=True)
    return folder


def kept(path: Path, make: Callable[[], Results]) -> Results:
    """The results in a file, which are made if it is missing."""
    if not path.exists():
        path.write_text(json.dumps(make().to_json()), encoding="utf-8")
    return read(path)


def read(path: Path) -> Results:
    """The results in a file."""
    return Results.from_json(json.loads(path.read_text(encoding="utf-8")))


def together(found: Sequence[Results]) -> Results:
    """The results of several models as one."""
    return Results(
        [each for results in found for each in results.measurements],
        {name: about for results in found for name, about in results.models.items()},
        found[0].settings,
        sum(results.seconds for results in found),
    )


def to_text(results: Results) -> str:
    """The results as JSON, with one line per measurement."""
    content = _rounded(results.to_json())
    rows = ",\n".join(json.dumps(each, separators=(",", ":")) for each in content.pop("measurements"))
    return json.dumps(content, indent=1).removesuffix("\n}") + f',\n "measurements": [\n{rows}\n ]\n}}\n'


def against_none(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The measurements of one model with rounded scores, each scaling compared with none."""
    # Rounded before the comparison, so that the file's scores give the same comparisons.
    rounded = [replace(each, scores=tuple(round(score, 6) for score in each.scores)) for each in measurements]
    unscaled = {(each.metric, each.length): each.scores for each in rounded if each.scaling == NONE}
    pairs = [compare(each.metric, each.scores, unscaled[each.metric, each.length]) for each in rounded]
    return [
        replace(each, comparison=None if each.scaling == NONE else pair)
        for each, pair in zip(rounded, pairs, strict=True)
    ]


def compare_again(path: Path) -> None:
    """Writes the comparisons in a file of results anew, from its scores: the tests may have changed."""
    results = read(path)
    by_model = ([each for each in results.measurements if each.model == name] for name in results.models)
    found = [each for measurements in by_model for each in against_none(measurements)]
    path.write_text(to_text(replace(results, measurements=found)), encoding="utf-8")


def _rounded(value: Any) -> Any:
    """The value with floats rounded to seven digits, and written as integers if they are whole."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.7g}")
    return value


@dataclass(frozen=True)
class Study:
    """What is measured of some models; the results are in one file."""

    name: str
    models: Sequence[Model]
    prompts: Mapping[int, int]
    """Number of prompts of the lines task for each length."""
    windows: int
    """Number of windows of text."""
    runs: Callable[[Model, Path], Sequence[Run]]
    """What to measure of a model, given the folder of all models."""
    longest: int = LENGTHS[-1]
    """Tokens of a window; a power of two times the trained length."""
    drawn: frozenset[Model] = frozenset()
    """Models whose results by depth and position are kept for pictures, beyond the trained length."""
    found: Callable[[Path], Mapping[str, Any]] = lambda _: {}
    """More to keep with the results, given the folder of all models."""

    @property
    def stored(self) -> Path:
        """The file of its results."""
        return EXAMPLES / "evidence" / f"{self.name}.json"

    def run(self, models: Path) -> None:
        """Trains and measures what is missing, given the folder of all models, and stores the results."""
        found: dict[Model, Results] = {}
        for model in self.models:
            print(f"{self.name}: {model.name}", flush=True)
            train(model, models)
            path = models / f"{self.name}-{model.name}.json"
            found[model] = kept(path, partial(self._measure, model, models))
        self.stored.write_text(to_text(self._joined(found, models)), encoding="utf-8")

    def _measure(self, model: Model, models: Path) -> Results:
        """Measures a trained model, or what was made of it; the first run describes the model."""
        asked: dict[str, Any]
        if model.task == "lines":
            file = models / "lines.jsonl"
            rows = "".join(prompts_as_json([length], count, seed=0) for length, count in self.prompts.items())
            file.write_text(rows, encoding="utf-8")
            asked = {"tasks": [make_task("prompts", file)], "items": max(self.prompts.values())}
            asked["lengths"] = [*self.prompts]
        else:
            file = models / f"held-out-{self.longest}.txt"
            file.write_text(read_corpus(self.longest).held_out, encoding="utf-8", newline="\n")
            asked = {"text": [file], "items": self.windows, "lengths": ladder(TRAINED_LENGTH, self.longest)}
        asked |= {"train_length": TRAINED_LENGTH, "progress": sys.stderr.isatty()}
        found = []
        for run in self.runs(model, models):
            part = evaluate([run.folder], **asked, **run.arguments)
            named = [
                replace(each, model=model.name, scaling=run.name or each.scaling)
                for each in part.measurements
            ]
            found.append(replace(part, measurements=named))
        [about] = found[0].models.values()
        return replace(together(found), models={model.name: about})

    def _joined(self, found: Mapping[Model, Results], models: Path) -> Results:
        """Joins the results of all models, compares each scaling with none, and drops what is not shown."""
        measurements: list[Measurement] = []
        described: dict[str, dict[str, Any]] = {}
        settings: dict[str, Any] = {}
        for model, results in found.items():
            record = model.folder(models) / "training.json"  # tiny-bloom was trained before this file existed
            training = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
            described[model.name] = {**results.models[model.name], **training}
            settings |= results.settings
            for each in against_none(results.measurements):
                shown = model in self.drawn and each.length > TRAINED_LENGTH
                measurements.append(each if shown else replace(each, depths=(), positions=()))
        settings |= {**self.found(models), "items": {"lines": dict(self.prompts), "text": self.windows}}
        seconds = sum(results.seconds for results in found.values())
        return Results(measurements, described, settings, seconds)
