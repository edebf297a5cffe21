"""A study of the evidence: a concave penalty beside by-parts and ntk, all by position.

    python examples/evidence_concave.py              # train and measure what is missing; hours on one core
    python examples/evidence_concave.py --tables     # rewrite the tables, from stored scores

Its design was fixed before anything was measured, and is in examples/evidence/README.md: the power is chosen
on some models, and judged on others. Each scaling of a model is stored as it is measured, so a stopped run
goes on.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import evidence_large
import lines_task
import numpy as np
import text_task
import torch
import train_large
from evidence_design import EXAMPLES, TRAINED_LENGTH, Model
from evidence_measure import MODELS_FOLDER, kept, read, to_text, together, train
from evidence_tables import compared, difference, markdown, with_tables
from lines_task import prompts_as_json
from numpy.typing import NDArray
from tokenizers import Tokenizer

from converter.evaluation.batches import next_tokens
from converter.evaluation.evaluated_model import EvaluatedModel, open_evaluated_model
from converter.evaluation.losses import pieces
from converter.evaluation.results import PERPLEXITY, Comparison, Measurement, Metric, Results
from converter.evaluation.runner import choose
from converter.evaluation.statistics import summarise
from converter.evaluation.tasks import make_task
from converter.scaling.scaling import CONCAVE, UNSCALED, Scaling, short_names

RESULTS = EXAMPLES / "evidence" / "concave.json"
DOCUMENT = EXAMPLES / "evidence" / "README.md"

CHOOSING = (
    Model("lines", 8, 0),
    Model("lines", 8, 2),
    Model("lines", 8, 0, 5),
    Model("text", 8, 0),
)
"""On which the power is chosen."""
JUDGING = (
    Model("lines", 8, 1),
    Model("lines", 8, 0, 4),
    Model("text", 8, 0, falcon=True),
    Model("text", 8, 0, 12),
    Model("text", 12, 0),
)
"""On which the chosen power is compared with by-parts."""
POWERS = (8, 16)
"""Tried; a converted model has the chosen one."""
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
"""The model of 10 million parameters, which is trained for this study; see train_large.py."""
LARGER_TRAINING = ("--minutes", "66", "--float32")
LARGER_PROMPTS = {1024: 60, 2048: 100, 4096: 60, 8192: 24}
LARGER_LENGTHS = tuple(LARGER_PROMPTS)
LARGER_SCALINGS = (1, 2)
"""Places in ``scalings`` of by-parts and of the chosen power, which are compared; each takes half an hour."""
LATE = "last quarter"
"""The task of the perplexity in the last quarter of each piece of text."""
CLOSE = 0.01
"""Powers whose shares of right answers differ by less are chosen between by their perplexity."""


def scalings(train_length: int) -> tuple[Scaling, ...]:
    """All scalings of the study, in the order in which they are measured."""
    ramp = (train_length / 8, train_length / 2)
    return (
        UNSCALED,
        Scaling("by-parts", dynamic="position", train_length=train_length, ramp=ramp),
        *(Scaling(CONCAVE, dynamic="position", train_length=train_length, power=power) for power in POWERS),
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
            yield measurement(name, scaling, task, "perplexity", length, scores)


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


def of_model(model: Model, models: Path) -> Results:
    """The results of a small model, which is trained and measured where that is missing."""
    folder = train(model, models)
    every = dict(enumerate(scalings(TRAINED_LENGTH)))
    return of_folder(folder, models, model.name, TRAINED_LENGTH, every, partial(measured, model, models))


def larger_prompts(folder: Path) -> Path:
    """Writes prompts for the larger model, like those that it was trained on; see ``evidence_large``."""
    tokenizer, rows = Tokenizer.from_file(str(folder / "tokenizer.json")), []
    joined = {kind: "".join(files) for kind, files in held_out(folder).items()}
    for length, count in LARGER_PROMPTS.items():
        rng = np.random.default_rng([SEED, length])
        for _ in range(count):
            text = joined[str(rng.choice([*train_large.SHARES], p=[*train_large.SHARES.values()]))]
            rows.append(json.dumps(evidence_large.prompt(rng, tokenizer, text, length)) + "\n")
    file = folder / f"prompts-{SEED}.jsonl"
    file.write_text("".join(rows), encoding="utf-8")
    return file


def larger_windows(folder: Path) -> NDArray[np.int64]:
    """Windows of text for the larger model, int64 [windows, longest length].

    Each is at a random place of another held-out file, of each kind in turn.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng, longest = np.random.default_rng(SEED), LARGER_LENGTHS[-1]
    found: list[list[int]] = []
    by_kind = [[files[place] for place in rng.permutation(len(files))] for files in held_out(folder).values()]
    for text in chain.from_iterable(zip(*by_kind, strict=False)):
        if len(found) == WINDOWS:
            break
        ids = tokenizer.encode(text).ids
        if len(ids) > longest:
            start = int(rng.integers(len(ids) - longest))
            found.append(ids[start : start + longest])
    return np.array(found)


def held_out(folder: Path) -> dict[str, list[str]]:
    """Kind of text -> the files that the larger model was not trained on."""
    found: dict[str, list[str]] = json.loads((folder / "held-out.json").read_text("utf-8"))
    return found


def measured_larger(folder: Path, subject: EvaluatedModel, scaling: Scaling) -> Results:
    """Measures one scaling of the larger model."""
    found = [
        *answer(subject, LARGER, scaling, larger_prompts(folder), LARGER_PROMPTS),
        *read_text(subject, LARGER, scaling, larger_windows(folder), LARGER_LENGTHS),
    ]
    return Results(found, {LARGER: subject.describe(scaling)}, {"seed": SEED}, 0.0)


def of_larger_model(models: Path) -> Results:
    """The results of the larger model, which is trained and measured where that is missing."""
    folder = models / "large"
    if not (folder / "model.safetensors").exists():
        command = [sys.executable, str(EXAMPLES / "train_large.py"), "--out", str(folder), *LARGER_TRAINING]
        subprocess.run(command, check=True)
    every = scalings(train_large.TRAINED_LENGTH)
    some = {number: every[number] for number in LARGER_SCALINGS}
    measure = partial(measured_larger, folder)
    return of_folder(folder, models, LARGER, train_large.TRAINED_LENGTH, some, measure)


def of_folder(
    folder: Path,
    models: Path,
    name: str,
    train_length: int,
    numbered: Mapping[int, Scaling],
    measure: Callable[[EvaluatedModel, Scaling], Results],
) -> Results:
    """The results of a trained model under these scalings; what files have is not measured again."""
    files = {scaling: models / f"concave-{name}-{number}.json" for number, scaling in numbered.items()}
    if not all(file.exists() for file in files.values()):
        hardware = choose("cpu", "fp32", None)
        with open_evaluated_model(folder, hardware, train_length=train_length) as subject:
            for scaling, file in files.items():
                kept(file, partial(measure, subject, scaling))
    whole = together([read(file) for file in files.values()])
    [(name, about)] = whole.models.items()
    record = folder / "training.json"  # tiny-bloom was trained before this file existed
    training: Mapping[str, Any] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    return Results(whole.measurements, {name: {**about, **training}}, whole.settings)


def without(results: Results, names: Sequence[str]) -> Results:
    """The stored results of all models but these."""
    measurements = [each for each in results.measurements if each.model not in names]
    models = {name: about for name, about in results.models.items() if name not in names}
    return Results(measurements, models, results.settings)


def joined(found: Sequence[Results]) -> Results:
    """The results of several models as one."""
    whole = together(found)
    items = {"lines": PROMPTS, LARGER: LARGER_PROMPTS, "windows": WINDOWS}
    return Results(whole.measurements, whole.models, {**whole.settings, "items": items})


# --- the tables


SHORT = {
    **short_names(map(str, scalings(TRAINED_LENGTH))),
    **short_names(map(str, scalings(train_large.TRAINED_LENGTH))),
}
"""Name of a scaling in results -> its short one, which is the same for both trained lengths."""
NAMES = tuple(dict.fromkeys(SHORT.values()))
NONE, BY_PARTS, *POWERED, NTK = NAMES
OF_POWER = dict(zip(POWERS, POWERED, strict=True))
RIGHT = "prompts"
MEASURES = {RIGHT: "right", PERPLEXITY: PERPLEXITY, LATE: LATE}
"""Task -> what a table calls it."""

Place = tuple[str, str, str, int]
"""Model, short name of the scaling, task, and multiple of the trained length."""
Found = Mapping[Place, Measurement]


def places(results: Results) -> Found:
    """The measurements by their place."""
    found = {}
    for each in results.measurements:
        multiple = each.length // results.models[each.model]["train_length"]
        found[each.model, SHORT[each.scaling], each.task, multiple] = each
    return found


def names_of(results: Results, models: Sequence[Model], task: str) -> list[str]:
    """The measured models of a task."""
    return [model.name for model in models if model.task == task and model.name in results.models]


def average(found: Found, names: Sequence[str], scaling: str, task: str, multiple: int) -> float:
    """The mean over models: the share of right answers, or the perplexity as a ratio to that of none."""
    if task == RIGHT:
        return mean(found[name, scaling, task, multiple].value for name in names)
    pairs = [(found[name, scaling, task, multiple], found[name, NONE, task, multiple]) for name in names]
    return mean(ours.value / unscaled.value for ours, unscaled in pairs)


def chosen(results: Results) -> int:
    """The power that is best on the models for the choice."""
    found, names = places(results), names_of(results, CHOOSING, "lines")
    right = {
        power: mean(average(found, names, name, RIGHT, multiple) for multiple in (4, 8))
        for power, name in OF_POWER.items()
    }
    if max(right.values()) - min(right.values()) >= CLOSE:
        return max(right, key=right.__getitem__)
    names = names_of(results, CHOOSING, "text")
    return min(POWERS, key=lambda power: average(found, names, OF_POWER[power], LATE, 8))


def choice(results: Results) -> str:
    """What the powers give on the models for the choice."""
    found, rows = places(results), []
    lines, text = (names_of(results, CHOOSING, task) for task in ("lines", "text"))
    for name in (NONE, BY_PARTS, *POWERED):
        right = [average(found, lines, name, RIGHT, multiple) for multiple in (4, 8)]
        late = average(found, text, name, LATE, 8)
        shares = [f"{100 * each:.1f} %" for each in (*right, mean(right))]
        rows.append([name, *shares, "" if name == NONE else f"{100 * late - 100:+.2f} %"])
    head = ["scaling", "right, 4x", "right, 8x", "their mean", "perplexity of the last quarter, 8x"]
    return markdown(head, rows)


def means(results: Results, lines: Sequence[str], text: Sequence[str]) -> str:
    """Means over models: right answers, and the perplexity, or its change from none."""
    found = places(results)
    columns = [
        (task, multiple, names)
        for task, names in ((RIGHT, lines), (PERPLEXITY, text), (LATE, text))
        for multiple in MULTIPLES
        if (names[0], NONE, task, multiple) in found
    ]
    rows = []
    for scaling in NAMES:
        cells = []
        for task, multiple, names in columns:
            value = average(found, names, scaling, task, multiple)
            if task == RIGHT:
                cells.append(f"{100 * value:.1f} %")
            elif scaling == NONE:
                unscaled = mean(found[name, NONE, task, multiple].value for name in names)
                cells.append(f"{unscaled:.3f}")
            else:
                cells.append(f"{100 * value - 100:+.2f} %")
        rows.append([scaling, *cells])
    return markdown(["scaling", *(f"{MEASURES[task]}, {multiple}x" for task, multiple, _ in columns)], rows)


def judged(results: Results) -> str:
    """The means over the models for the judgement."""
    return means(results, *(names_of(results, JUDGING, task) for task in ("lines", "text")))


def larger(results: Results) -> str:
    """The larger model: right answers, and the perplexity per token."""
    found, rows = places(results), []
    columns = [(task, multiple) for task in MEASURES for multiple in MULTIPLES]
    for scaling in NAMES:
        cells = [found.get((LARGER, scaling, *column)) for column in columns]
        if any(cells):
            shown = [
                f"{100 * each.value:.1f} %" if each.task == RIGHT else f"{each.value:.1f}"
                for each in cells
                if each is not None
            ]
            rows.append([scaling, *shown])
    return markdown(["scaling", *(f"{MEASURES[task]}, {multiple}x" for task, multiple in columns)], rows)


BLOOMS = "BLOOMs"
"""The kind that is no criterion."""


def kinds(results: Results) -> dict[str, list[str]]:
    """Kind of models -> those of them for the judgement that are measured."""
    by_kind = {
        "all": JUDGING,
        "Falcons": [model for model in JUDGING if model.falcon],
        "bias_max 12": [model for model in JUDGING if model.bias_max == 12],
        "bias_max 4": [model for model in JUDGING if model.bias_max == 4],
        BLOOMS: [model for model in JUDGING if model.bias_max is None and not model.falcon],
    }
    names = {kind: [model.name for model in models] for kind, models in by_kind.items()}
    names[LARGER] = [LARGER]
    return {kind: [name for name in of_kind if name in results.models] for kind, of_kind in names.items()}


def compare(
    found: Found, names: Sequence[str], scalings: tuple[str, str], task: str, multiple: int
) -> tuple[Metric, list[Sequence[float]], list[Sequence[float]]] | None:
    """The metric and, of each of two scalings, the scores by model; None if no model has them."""
    ours, theirs = (
        [found[name, each, task, multiple] for name in names if (name, each, task, multiple) in found]
        for each in scalings
    )
    if not ours:
        return None
    return ours[0].metric, [each.scores for each in ours], [each.scores for each in theirs]


def kills(task: str, multiple: int, shown: Comparison) -> bool:
    """Whether such a difference from by-parts is a reason against the default."""
    counts = task == LATE or (task == RIGHT and multiple >= 4)
    return counts and shown.loses


def pairs(results: Results) -> str:
    """The concave penalty beside others, on the same prompts and windows; a star marks what would kill it."""
    found, rows = places(results), []
    best = OF_POWER[chosen(results)]
    other = next(name for name in POWERED if name != best)
    every = kinds(results)
    compared_with = [(best, BY_PARTS, kind) for kind in every]
    compared_with += [(best, NTK, "all"), (other, BY_PARTS, "all")]
    for ours, theirs, kind in compared_with:
        judged = (ours, theirs) == (best, BY_PARTS) and kind != BLOOMS
        for task, what in MEASURES.items():
            cells, count = [], 0
            for multiple in MULTIPLES:
                pair = compare(found, every[kind], (ours, theirs), task, multiple)
                if pair is None:
                    continue
                count = len(pair[1])
                star = "*" if judged and kills(task, multiple, difference(*pair)) else ""
                cells.append(compared(*pair) + star)
            if cells:
                rows.append([f"{ours}, against {theirs}", f"{kind}, {count}", what, *cells])
    return markdown(["compared", "models", "measured", *(f"{multiple}x" for multiple in MULTIPLES)], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "choice": choice,
    "judged": judged,
    "larger": larger,
    "pairs": pairs,
}
"""Name in a marker ``<!-- concave NAME: ... -->`` of the document -> the function that makes the table."""


def page(results: Results) -> str:
    """The document with its tables."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return with_tables(text, "concave", lambda name: TABLES[name](results))


def as_csv(results: Results) -> str:
    """Right answers in per cent, or the perplexity, of each model and scaling."""
    found, text = places(results), io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "measured", "scaling", *(f"{multiple}x" for multiple in MULTIPLES)])
    for name, scaling, task in dict.fromkeys(place[:3] for place in found):
        cells = []
        for multiple in MULTIPLES:
            each = found.get((name, scaling, task, multiple))
            value = (
                "" if each is None else f"{each.value:.3f}" if task != RIGHT else f"{100 * each.value:.1f}"
            )
            cells.append(value)
        writer.writerow([name, MEASURES[task], scaling, *cells])
    return text.getvalue()


def main() -> None:
    """Read the command line; train, measure and write."""
    every: dict[str, Callable[[Path], Results]] = {
        model.name: partial(of_model, model) for model in (*CHOOSING, *JUDGING)
    }
    every[LARGER] = of_larger_model
    parser = argparse.ArgumentParser(description="Produce the evidence about a concave penalty.")
    parser.add_argument("--models", type=Path, default=MODELS_FOLDER, help="models' folder [.evidence]")
    parser.add_argument("--only", nargs="*", default=every, choices=every, help="models, by default all")
    parser.add_argument("--tables", action="store_true", help="only rewrite the tables")
    arguments = parser.parse_args()
    if not arguments.tables:
        arguments.models.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        found = [without(read(RESULTS), arguments.only)] if RESULTS.exists() else []
        for name in arguments.only:
            print(name, flush=True)
            found.append(every[name](arguments.models))
        RESULTS.write_text(to_text(joined(found)), encoding="utf-8")
    results = read(RESULTS)
    DOCUMENT.write_text(page(results), encoding="utf-8")
    RESULTS.with_suffix(".csv").write_text(as_csv(results), encoding="utf-8")
    print(DOCUMENT)


if __name__ == "__main__":
    main()
