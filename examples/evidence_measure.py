"""Train the models of the evidence, measure them, and write results and tables: what the scripts share."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from evidence_design import EXAMPLES, LENGTHS, TRAINED_LENGTH, Model
from evidence_tables import markdown
from lines_task import prompts_as_json
from text_task import read_corpus

from converter.evaluation.evaluate import evaluate
from converter.evaluation.results import PERPLEXITY, Measurement, Results
from converter.evaluation.tasks import make_task

ROOT = EXAMPLES.parent
MODELS_FOLDER = ROOT / ".evidence"

Run = tuple[Path, Mapping[str, Any]]
"""A folder, and arguments of ``evaluate``."""


def train(model: Model, models: Path) -> None:
    """Trains a missing model in a separate process, since training changes torch's global settings."""
    folder = model.folder(models)
    if folder.exists():
        return
    command = [sys.executable, str(EXAMPLES / "train.py"), "--task", model.task, "--heads", str(model.heads)]
    command += ["--seed", str(model.seed)]
    command += [] if model.bias_max is None else ["--bias-max", str(model.bias_max)]
    subprocess.run([*command, "--out", str(folder)], check=True)


def measure(
    model: Model, models: Path, runs: Sequence[Run], prompts: Mapping[int, int], windows: int
) -> Results:
    """Measures a trained model, or what was made of it, in several runs of ``evaluate``.

    Args:
        model: the model, which names the results.
        models: the folder of all models.
        runs: what to measure; the first one describes the model.
        prompts: number of prompts of the lines task for each length.
        windows: number of windows of text.
    """
    asked: dict[str, Any]
    if model.task == "lines":
        file = models / "lines.jsonl"
        rows = "".join(prompts_as_json([length], prompts[length], seed=0) for length in LENGTHS)
        file.write_text(rows, encoding="utf-8")
        asked = {"tasks": [make_task("prompts", file)], "items": max(prompts.values())}
    else:
        file = models / "held-out.txt"
        file.write_text(read_corpus().held_out, encoding="utf-8", newline="\n")
        asked = {"text": [file], "items": windows}
    parts = [
        evaluate(
            [folder],
            lengths=LENGTHS,
            train_length=TRAINED_LENGTH,
            progress=sys.stderr.isatty(),
            **asked,
            **arguments,
        )
        for folder, arguments in runs
    ]
    [about] = parts[0].models.values()
    return Results(
        [replace(each, model=model.name) for part in parts for each in part.measurements],
        {model.name: about},
        parts[0].settings,
        sum(part.seconds for part in parts),
    )


def kept(path: Path, make: Callable[[], Results]) -> Results:
    """The results in a file, which are made if it is missing."""
    if not path.exists():
        path.write_text(json.dumps(make().to_json()), encoding="utf-8")
    return Results.from_json(json.loads(path.read_text(encoding="utf-8")))


def to_text(results: Results) -> str:
    """The results as JSON, with one line per measurement."""
    content = _rounded(results.to_json())
    rows = ",\n".join(json.dumps(each, separators=(",", ":")) for each in content.pop("measurements"))
    return json.dumps(content, indent=1).removesuffix("\n}") + f',\n "measurements": [\n{rows}\n ]\n}}\n'


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
    """A smaller measurement beside the main one, with one table."""

    name: str
    """Of its results, and in the markers of its table."""
    models: Sequence[Model]
    prompts: Mapping[int, int]
    """Number of prompts of the lines task for each length."""
    windows: int
    """Number of windows of text."""
    runs: Callable[[Model, Path], Sequence[Run]]
    """What to measure of a model; it gets the folder of all models."""
    document: Path = EXAMPLES / "evidence" / "README.md"

    @property
    def stored(self) -> Path:
        """The file of its results."""
        return EXAMPLES / "evidence" / f"{self.name}.json"

    @property
    def block(self) -> re.Pattern[str]:
        """Its table in the document, with the markers."""
        start = rf"(?P<start><!-- {self.name}: [^\n]*-->\n)"
        return re.compile(rf"{start}.*?(?P<end><!-- end of {self.name} -->)", re.DOTALL)

    def results(self, models: Path) -> Results:
        """Trains and measures what is missing."""
        found = []
        for model in self.models:
            print(model.name, flush=True)
            train(model, models)
            path = models / f"{self.name}-{model.name}.json"
            found.append(kept(path, partial(self._measure, model, models)))
        return Results(
            [
                replace(each, depths=(), positions=(), tokens_per_second=0.0)
                for results in found
                for each in results.measurements
            ],
            {name: about for results in found for name, about in results.models.items()},
            {**found[0].settings, "items": {"lines": dict(self.prompts), "text": self.windows}},
            sum(results.seconds for results in found),
        )

    def _measure(self, model: Model, models: Path) -> Results:
        return measure(model, models, self.runs(model, models), self.prompts, self.windows)

    def table(self, results: Results) -> str:
        """Right answers in per cent, or perplexity, by model, scaling and length."""

        def cell(each: Measurement) -> str:
            return f"{each.value:.3f}" if each.metric == PERPLEXITY else f"{100 * each.value:.0f}"

        rows: dict[tuple[str, str], list[Measurement]] = {}
        for each in results.measurements:
            rows.setdefault((each.model, each.scaling), []).append(each)
        header = ["model", "scaling", *(f"{length // TRAINED_LENGTH}x" for length in LENGTHS)]
        return markdown(header, [[*key, *map(cell, found)] for key, found in rows.items()])

    def main(self, description: str) -> None:
        """Reads the command line; trains, measures and writes the table into the document."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--models", type=Path, default=MODELS_FOLDER, help="models' folder [.evidence]")
        parser.add_argument("--tables", action="store_true", help="only rewrite the table")
        arguments = parser.parse_args()
        if not arguments.tables:
            arguments.models.mkdir(parents=True, exist_ok=True)
            self.stored.write_text(to_text(self.results(arguments.models)), encoding="utf-8")
        table = self.table(Results.from_json(json.loads(self.stored.read_text(encoding="utf-8"))))
        text = self.document.read_text(encoding="utf-8")
        text = self.block.sub(lambda block: block["start"] + table + block["end"], text)
        self.document.write_text(text, encoding="utf-8")
        print(self.document)
