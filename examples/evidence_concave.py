"""A study of the evidence: a concave penalty beside by-parts and ntk, all by position.

    python examples/evidence_concave.py              # train and measure what is missing; hours on one core
    python examples/evidence_concave.py --tables     # rewrite the tables, from stored scores

Its design was fixed before anything was measured, and is in examples/evidence/README.md: the power is chosen
on some models, and judged on others. Each scaling of a model is stored as it is measured, so a stopped run
goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import evidence_large
import lines_task
import numpy as np
import text_task
import torch
import train_large
from evidence_design import EXAMPLES, TRAINED_LENGTH, Model
from evidence_measure import MODELS_FOLDER, kept, together, train
from lines_task import prompts_as_json
from numpy.typing import NDArray
from tokenizers import Tokenizer

from converter.evaluation.batches import next_tokens
from converter.evaluation.evaluated_model import EvaluatedModel, open_evaluated_model
from converter.evaluation.losses import pieces
from converter.evaluation.results import PERPLEXITY, Measurement, Metric, Results
from converter.evaluation.runner import choose
from converter.evaluation.statistics import summarise
from converter.evaluation.tasks import make_task
from converter.scaling.scaling import CONCAVE, POWERS, UNSCALED, Scaling

RESULTS = EXAMPLES / "evidence" / "concave.json"
DOCUMENT = EXAMPLES / "evidence" / "README.md"

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
MULTIPLES = (2, 4, 8, 16)
"""The lengths in trained lengths."""
LARGER = "larger"
"""The name of the larger model."""
LARGER_PROMPTS = {1024: 40, 2048: 60, 4096: 60, 8192: 24}
LARGER_WINDOW = 4096
"""Tokens of a window of its text."""
TRAINING = ("--layers", "8", "--width", "192", "--minutes", "44", "--float32")
"""How it is trained; see train_large.py."""
LATE = "last quarter"
"""The task of the perplexity in the last quarter of each piece of text."""
CLOSE = 0.01
"""Powers whose shares of right answers differ by less are chosen between by their perplexity."""


def concave(power: int, train_length: int = TRAINED_LENGTH) -> Scaling:
    """The concave penalty with this power."""
    return Scaling(CONCAVE, dynamic="position", train_length=train_length, power=power)


def scalings(train_length: int) -> tuple[Scaling, ...]:
    """All scalings of the study, in the order in which they are measured."""
    ramp = (train_length / 8, train_length / 2)
    return (
        UNSCALED,
        Scaling("by-parts", dynamic="position", train_length=train_length, ramp=ramp),
        *(concave(power, train_length) for power in POWERS),
        Scaling("ntk", dynamic="position", train_length=train_length),
    )


# --- what is measured


def windows() -> list[str]:
    """A piece of the longest length from each of so many held-out files, drawn like its place in the file."""
    rng = np.random.default_rng(SEED)
    longest, texts = LENGTHS[-1], []
    for name, path in text_task.files():
        text = path.read_bytes().decode("utf-8")
        held_out = hashlib.sha256(name.encode()).digest()[0] % 10 == 0
        if held_out and text.isascii() and len(text) > longest:
            texts.append(text)
    chosen = [texts[place] for place in rng.permutation(len(texts))[:WINDOWS]]
    starts = [int(rng.integers(len(text) - longest)) for text in chosen]
    return [text[start : start + longest] for text, start in zip(chosen, starts, strict=True)]


def measurement(
    model: str, scaling: Scaling, task: str, metric: Metric, length: int, scores: Sequence[float]
) -> Measurement:
    """Scores as a measurement, with its value and interval."""
    rounded = tuple(round(float(score), 6) for score in scores)
    return Measurement(model, str(scaling), task, metric, length, rounded, *summarise(metric, rounded))


def read_text(
    subject: EvaluatedModel, name: str, scaling: Scaling, ids: NDArray[np.int64], lengths: Sequence[int]
) -> Iterator[Measurement]:
    """The perplexity of windows [windows, longest length] in pieces of each length, and of last quarters.

    A score is the mean loss of a window's pieces.
    """
    for length in lengths:
        losses = subject.losses(scaling, next_tokens(pieces(ids, length)))[:, :-1]
        for task, start in ((PERPLEXITY, 0), (LATE, 3 * length // 4)):
            scores = losses[:, start:].reshape(len(ids), -1).mean(axis=1)
            yield measurement(name, scaling, task, PERPLEXITY, length, scores)


def answer(
    subject: EvaluatedModel, name: str, scaling: Scaling, file: Path, prompts: Mapping[int, int]
) -> Iterator[Measurement]:
    """The right answers to the prompts in a file, by length; how many there are of each."""
    task: Any = make_task("prompts", file)
    items = task.items(subject.tokenizer, [*prompts], max(prompts.values()), SEED)
    for length, asked in items.items():
        said = subject.complete(scaling, [prompt.ids for prompt in asked], task.max_new_tokens)
        scores = [task.score(prompt, text) for prompt, text in zip(asked, said, strict=True)]
        yield measurement(name, scaling, "prompts", task.metric, length, scores)


def lines_prompts(length: int) -> str:
    """The prompts of lines of a length, as JSON; with questions where there are too few keys for lines."""
    if lines_task.lines_that_fit(length) <= len(lines_task.KEYS):
        return prompts_as_json([length], PROMPTS[length], SEED)
    rng = np.random.default_rng([SEED, length])
    return "".join(json.dumps(with_questions(rng, length)) + "\n" for _ in range(PROMPTS[length]))


def with_questions(rng: np.random.Generator, length: int) -> dict[str, Any]:
    """A prompt of lines, and as many answered questions about earlier lines, as in the training.

    None of them is about the line that is asked for in the end.
    """
    records = lines_task.lines_that_fit(length)
    count = records // 2
    keys = [lines_task.KEYS[place] for place in rng.permutation(len(lines_task.KEYS))[:count]]
    values = [lines_task.VALUES[place] for place in rng.integers(len(lines_task.VALUES), size=count)]
    asked = int(rng.integers(count))
    # The first two records are lines, so that a question always has one to be about.
    is_line = [True, True, *rng.permutation([True] * (count - 2) + [False] * (records - count))]
    rows, line = [], -1
    for each in is_line:
        if each:
            line += 1
            rows.append(f"{lines_task.LINE} {keys[line]} {values[line]}")
        else:
            about = rng.choice([earlier for earlier in range(line + 1) if earlier != asked])
            rows.append(f"{lines_task.ASK} {keys[about]} {values[about]}")
    rows.append(f"{lines_task.ASK} {keys[asked]}")
    depth = round(asked / (count - 1), 2)
    return {"prompt": "\n".join(rows), "answer": values[asked], "length": length, "depth": depth}


def measured(model: Model, models: Path, subject: EvaluatedModel, scaling: Scaling) -> Results:
    """Measures one scaling of a small model."""
    if model.task == "lines":
        file = models / f"lines-{SEED}.jsonl"
        file.write_text("".join(map(lines_prompts, PROMPTS)), encoding="utf-8")
        found = [*answer(subject, model.name, scaling, file, PROMPTS)]
    else:
        ids = np.array([subject.tokenizer(text)["input_ids"] for text in windows()])
        found = [*read_text(subject, model.name, scaling, ids, LENGTHS)]
    return Results(found, {model.name: subject.describe(scaling)}, {"seed": SEED}, 0.0)


def larger_prompts(folder: Path) -> Path:
    """Writes prompts for the larger model, like those that it was trained on; see ``evidence_large``."""
    tokenizer, rows = Tokenizer.from_file(str(folder / "tokenizer.json")), []
    shares = train_large.SHARES
    joined = {kind: "".join(files) for kind, files in held_out(folder).items()}
    for length, count in LARGER_PROMPTS.items():
        rng = np.random.default_rng([SEED, length])
        for _ in range(count):
            text = joined[str(rng.choice([*shares], p=[*shares.values()]))]
            rows.append(json.dumps(evidence_large.prompt(rng, tokenizer, text, length)) + "\n")
    file = folder / f"prompts-{SEED}.jsonl"
    file.write_text("".join(rows), encoding="utf-8")
    return file


def larger_windows(folder: Path) -> NDArray[np.int64]:
    """Windows for the larger model, int64 [windows, tokens].

    Each is at a random place of another held-out file, of each kind in turn.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng, found = np.random.default_rng(SEED), []
    by_kind = []
    for files in held_out(folder).values():
        by_kind.append([files[place] for place in rng.permutation(len(files))])
    for text in chain.from_iterable(zip(*by_kind, strict=False)):
        ids = tokenizer.encode(text).ids
        if len(ids) > LARGER_WINDOW and len(found) < WINDOWS:
            start = int(rng.integers(len(ids) - LARGER_WINDOW))
            found.append(ids[start : start + LARGER_WINDOW])
    return np.array(found)


def held_out(folder: Path) -> dict[str, list[str]]:
    """Kind of text -> the files that the larger model was not trained on."""
    found: dict[str, list[str]] = json.loads((folder / "held-out.json").read_text("utf-8"))
    return found


def measured_larger(folder: Path, subject: EvaluatedModel, scaling: Scaling) -> Results:
    """Measures one scaling of the larger model."""
    lengths = [length for length in LARGER_PROMPTS if length <= LARGER_WINDOW]
    found = [
        *answer(subject, LARGER, scaling, larger_prompts(folder), LARGER_PROMPTS),
        *read_text(subject, LARGER, scaling, larger_windows(folder), lengths),
    ]
    return Results(found, {LARGER: subject.describe(scaling)}, {"seed": SEED}, 0.0)


def of_folder(
    folder: Path, stored: Path, train_length: int, measure: Callable[[EvaluatedModel, Scaling], Results]
) -> Results:
    """Measures all scalings of a trained model that are not stored yet, in files beside its folder."""
    with open_evaluated_model(folder, choose("cpu", "fp32", None), train_length=train_length) as subject:
        found = [
            kept(stored.with_name(f"{stored.name}-{number}.json"), partial(measure, subject, scaling))
            for number, scaling in enumerate(scalings(train_length))
        ]
    whole = together(found)
    [(name, about)] = whole.models.items()
    record = folder / "training.json"  # tiny-bloom was trained before this file existed
    training: Mapping[str, Any] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    return Results(whole.measurements, {name: {**about, **training}}, whole.settings)


def measure(models: Path, names: Sequence[str]) -> None:
    """Trains and measures what is not stored yet, of the models with these names."""
    for model in (*CHOOSING, *JUDGING):
        if model.name in names:
            print(model.name, flush=True)
            folder = train(model, models)
            of_folder(
                folder, models / f"concave-{model.name}", TRAINED_LENGTH, partial(measured, model, models)
            )
    if LARGER in names:
        print(LARGER, flush=True)
        folder = models / "medium"
        if not (folder / "model.safetensors").exists():
            command = [sys.executable, EXAMPLES / "train_large.py", "--out", folder, *TRAINING]
            subprocess.run(command, check=True)
        measure_larger = partial(measured_larger, folder)
        of_folder(folder, models / f"concave-{LARGER}", train_large.TRAINED_LENGTH, measure_larger)


def main() -> None:
    """Read the command line; train and measure."""
    every = [model.name for model in (*CHOOSING, *JUDGING)] + [LARGER]
    parser = argparse.ArgumentParser(description="Produce the evidence about a concave penalty.")
    parser.add_argument("--models", type=Path, default=MODELS_FOLDER, help="models' folder [.evidence]")
    parser.add_argument("--only", nargs="*", default=every, choices=every, help="by default all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    measure(arguments.models, arguments.only)


if __name__ == "__main__":
    main()
