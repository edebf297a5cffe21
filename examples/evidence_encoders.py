"""Show what scaling does to small encoders: train them, measure them, write the tables.

    python examples/evidence_encoders.py            # train and measure what is missing; half an hour
    python examples/evidence_encoders.py --tables    # rewrite comparisons and tables, from stored scores

Models are kept in .evidence/, and results in examples/evidence/encoders.json and index.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pairs_task
from evidence_design import EXAMPLES, Model
from evidence_measure import MODELS_FOLDER, against_none, compare_again, kept, read, to_text, together, train
from evidence_tables import cell, markdown, with_tables
from text_task import read_corpus
from train_encoders import TRAINED_LENGTH

from converter import convert, fit
from converter.errors import NoGain
from converter.evaluation.embeddings import embed, rank
from converter.evaluation.evaluate import evaluate
from converter.evaluation.evaluated_model import open_evaluated_model as open_subject
from converter.evaluation.results import Measurement, Results
from converter.evaluation.runner import choose
from converter.evaluation.statistics import compare_scores as compare
from converter.evaluation.statistics import summarise
from converter.evaluation.tasks.beir import Beir
from converter.evaluation.tasks.scores import ndcg
from converter.evaluation.tasks.task import Collection
from converter.scaling.request import Request
from converter.scaling.scaling import UNSCALED, Scaling

SCRIPT = "train_encoders.py"
RESULTS = EXAMPLES / "evidence" / "encoders.json"
DOCUMENT = EXAMPLES / "evidence" / "encoders.md"
MULTIPLES = (1, 2, 4, 8, 16)
LENGTHS = tuple(multiple * TRAINED_LENGTH for multiple in MULTIPLES)
PAIRS = {128: 64, 256: 64, 512: 64, 1024: 64, 2048: 32}
"""Queries, and documents, of each length."""
INDEX = EXAMPLES / "evidence" / "index.json"
INDEX_LENGTHS = (32, 64, *LENGTHS)
IN_INDEX = 48
"""Documents of each length in the index that has them all."""
OLD = "old vectors"
WINDOWS = 12
SCALE = 4.0
NONE = str(UNSCALED)
CHUNKS = f"none, chunks of {TRAINED_LENGTH} tokens averaged"
FITTED = f"fitted to text, up to {SCALE:g}x"
BYTES = 1_000_000
"""Of the text to fit to."""
MINUTES = 60.0
"""Most time of a fit: so much that its steps decide, and not the speed of the machine."""
SCALINGS: tuple[dict[str, Any], ...] = (
    {"methods": ("none", "ntk"), "scales": (SCALE,), "dynamic": ("length", "position")},
    {"methods": ("by-parts",), "dynamic": ("length",)},
    {"methods": ("linear",), "scales": (SCALE,)},
)
"""What every model gets, as arguments of ``evaluate``."""
MODELS = (
    Model("pairs", 8, 0),
    Model("pairs", 8, 1),
    Model("pairs", 12, 0),
    Model("masked", 8, 0),
    Model("masked", 8, 1),
    Model("masked", 12, 0),
)


def measure(model: Model, models: Path) -> Results:
    """Measures a trained model under every scaling, and what chunks give."""
    folder = train(model, models, SCRIPT)
    found: list[Results] = []
    others: list[Measurement] = []
    """Those whose name is not their scaling's."""
    facts = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    text = models / "held-out.txt"
    text.write_text(read_corpus().held_out, encoding="utf-8", newline="\n")
    for arguments in SCALINGS:
        if model.task == "masked":
            found.append(_run(folder, lengths=LENGTHS, text=[text], items=WINDOWS, **arguments))
        else:
            found += [
                _run(folder, lengths=[length], tasks=[pairs_of(models, length)], **arguments)
                for length in LENGTHS
            ]
    if model.task == "pairs":
        others = [in_chunks(folder, pairs_of(models, length), length) for length in LENGTHS]
    else:
        slopes, facts["fit"] = fitted(folder, models)
        if slopes is not None:
            fits = _run(slopes, lengths=LENGTHS, text=[text], items=WINDOWS)
            others = [replace(each, scaling=FITTED) for each in fits.measurements]
    [about] = found[0].models.values()
    about = {**about, **facts}
    measured = [each for results in found for each in results.measurements] + others
    return Results(
        [replace(each, model=model.name) for each in measured],
        {model.name: about},
        found[0].settings,
        sum(results.seconds for results in found),
    )


def _run(folder: Path, **arguments: Any) -> Results:
    return evaluate([folder], train_length=TRAINED_LENGTH, progress=sys.stderr.isatty(), **arguments)


def fitted(folder: Path, models: Path) -> tuple[Path | None, str]:
    """Fits slopes to the text that the model was trained on.

    Returns:
        The folder of the model with these slopes, None without a gain; and what ``fit`` found, in words.
    """
    out = folder.with_name(f"{folder.name}-fitted")
    file = models / "fit-masked.txt"
    file.write_text(read_corpus().training[:BYTES], encoding="utf-8", newline="\n")
    try:
        found = fit(
            folder,
            int(SCALE) * TRAINED_LENGTH,
            text=[file],
            minutes=MINUTES,
            train_length=TRAINED_LENGTH,
            progress=sys.stderr.isatty(),
        )
    except NoGain as error:
        return None, str(error)
    convert(folder, out, slopes=found.slopes, train_length=TRAINED_LENGTH, overwrite=True)
    return out, f"{found.steps} steps"


def pairs_of(models: Path, length: int) -> Beir:
    """The queries and documents of a length, which are written into the folder of all models."""
    folder = models / f"pairs-{length}-tokens"
    return Beir.read(pairs_task.write_beir(folder, pairs=PAIRS[length], length=length, seed=1000))


def in_chunks(folder: Path, task: Beir, length: int) -> Measurement:
    """What users do without scaling: a document's vector is the mean of its chunks' vectors."""
    hardware = choose("cpu", "fp32", None)
    with open_subject(folder, hardware, train_length=TRAINED_LENGTH) as subject:
        model = subject.scaled(UNSCALED)
        texts = task.items(subject.tokenizer, [length], 0, 0)[length]
        inside = TRAINED_LENGTH - 2  # <cls> and <sep> stand around each chunk
        vectors = []
        for document in texts.documents:
            start, *words, end = document
            parts = [(start, *words[at : at + inside], end) for at in range(0, len(words), inside)]
            vectors.append(embed(model, subject.pooling, hardware, parts).mean(axis=0))
        means = np.stack(vectors)
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        ranked = rank(embed(model, subject.pooling, hardware, texts.queries), means, texts)
        scores = tuple(map(task.score, ranked, texts.relevant))
        value, low, high = summarise(task.metric, scores)
        return Measurement(
            subject.model.name, CHUNKS, task.name, task.metric, length, scores, value, low, high
        )


def texts_of_all_lengths() -> tuple[Collection, list[int]]:
    """Documents of all lengths, each with its query; and the length of each document."""
    found: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
    for length in INDEX_LENGTHS:
        queries, documents = pairs_task.draw(np.random.default_rng([2000, length]), pairs=64, length=length)
        fresh = [
            (tuple(query), (tuple(document), length))
            for query, document in zip(queries.tolist(), documents.tolist(), strict=True)
            if tuple(query) not in found
        ]
        found |= fresh[:IN_INDEX]
    chosen = [document for document, _ in found.values()]
    relevant = [{place: 1} for place in range(len(chosen))]
    return Collection([*found], chosen, relevant), [length for _, length in found.values()]


def in_index(model: Model, models: Path) -> Results:
    """What a model finds in an index of vectors from before and after a conversion, by document length.

    The queries are those of the converted model. In a mixed index, every second document has its old vector.
    """
    hardware = choose("cpu", "fp32", None)
    texts, lengths = texts_of_all_lengths()
    measured: list[Measurement] = []
    with open_subject(train(model, models, SCRIPT), hardware, train_length=TRAINED_LENGTH) as subject:

        def vectors(scaling: Scaling, rows: Sequence[Any]) -> Any:
            return embed(subject.scaled(scaling), subject.pooling, hardware, rows)

        def add(name: str, queries: Any, documents: Any) -> None:
            ranked = rank(queries, documents, texts)
            scores = [ndcg(places, grades) for places, grades in zip(ranked, texts.relevant, strict=True)]
            for length in INDEX_LENGTHS:
                own = tuple(score for score, at in zip(scores, lengths, strict=True) if at == length)
                old = next((each for each in measured if (each.scaling, each.length) == (OLD, length)), None)
                pair = None if old is None else compare("ndcg@10", own, old.scores)
                numbers = summarise("ndcg@10", own)
                measured.append(
                    Measurement(model.name, name, "index", "ndcg@10", length, own, *numbers, comparison=pair)
                )

        asked, old = vectors(UNSCALED, texts.queries), vectors(UNSCALED, texts.documents)
        about = subject.describe(subject.scaled(UNSCALED))
        add(OLD, asked, old)
        ends = [
            (*row[: TRAINED_LENGTH - 1], row[-1]) if len(row) > TRAINED_LENGTH else row
            for row in texts.documents
        ]
        add(f"{OLD}, texts cut at {TRAINED_LENGTH} tokens", asked, vectors(UNSCALED, ends))
        for request in (
            Request("ntk", dynamic="length"),
            Request("by-parts", dynamic="length"),
            Request("ntk", scale=SCALE),
        ):
            scaling = subject.model.resolve(request)
            asked, new = vectors(scaling, texts.queries), vectors(scaling, texts.documents)
            mixed = np.where(np.arange(len(new))[:, None] % 2, old, new)
            name = scaling.method + ("" if scaling.static else ", length-dynamic")
            if scaling.static:  # others leave the queries as they are, so this would be the first row
                add(f"{name}: {OLD}", asked, old)
            add(f"{name}: half old, half new", asked, mixed)
            add(f"{name}: new vectors", asked, new)
            same = (new * old).sum(axis=1)
            about[name] = {
                str(length): round(float(np.mean(same[np.equal(lengths, length)])), 4)
                for length in INDEX_LENGTHS
            }
    return Results(
        measured, {model.name: about}, {"lengths": list(INDEX_LENGTHS), "documents": IN_INDEX}, 0.0
    )


def joined(found: Sequence[Results]) -> Results:
    """Joins the results of all models and compares each scaling with none."""
    compared = [each for results in found for each in against_none(results.measurements)]
    measurements = [replace(each, depths=(), positions=()) for each in compared]
    settings = {**found[0].settings, "items": {"pairs": dict(PAIRS), "masked": WINDOWS}}
    return replace(together(found), measurements=measurements, settings=settings)


def table(results: Results, task: str) -> str:
    """A row for each scaling, with one number a model in each cell; a star marks a difference from none."""
    of = "pairs" if task == "index" else task
    names = [model.name for model in MODELS if model.task == of and model.name in results.models]
    lengths = INDEX_LENGTHS if task == "index" else LENGTHS
    found = {
        (each.model, each.scaling, each.length): each for each in results.measurements if each.model in names
    }
    scalings = [*dict.fromkeys(scaling for _, scaling, _ in found)]
    if task == "masked" and FITTED not in scalings:
        scalings.append(FITTED)

    def shown(name: str, scaling: str, length: int) -> str:
        each, base = (found.get((name, of, length)) for of in (scaling, scalings[0]))
        return cell(each, base) if each and base else "no gain"

    rows = [
        [scaling, *(" / ".join(shown(name, scaling, length) for name in names) for length in lengths)]
        for scaling in scalings
    ]
    what = "perplexity of masked bytes" if task == "masked" else "nDCG@10, %"
    multiples = (f"{length / TRAINED_LENGTH:g}x" for length in lengths)
    return markdown([f"{what}: {' / '.join(names)}", *multiples], rows)


def page(results: Results, index: Results) -> str:
    """The document with its tables."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return with_tables(text, "encoders", lambda name: table(index if name == "index" else results, name))


def main() -> None:
    """Read the command line; train, measure and write."""
    parser = argparse.ArgumentParser(description="Produce the evidence about encoders.")
    parser.add_argument("--models", type=Path, default=MODELS_FOLDER, help="models' folder [.evidence]")
    parser.add_argument("--tables", action="store_true", help="only rewrite comparisons and tables")
    arguments = parser.parse_args()
    if not arguments.tables:
        arguments.models.mkdir(parents=True, exist_ok=True)
        found = []
        for model in MODELS:
            print(model.name, flush=True)
            stored = arguments.models / f"encoders-{model.name}.json"
            found.append(kept(stored, partial(measure, model, arguments.models)))
        RESULTS.write_text(to_text(joined(found)), encoding="utf-8")
        found = [
            kept(arguments.models / f"index-{model.name}.json", partial(in_index, model, arguments.models))
            for model in MODELS
            if model.task == "pairs"
        ]
        INDEX.write_text(to_text(together(found)), encoding="utf-8")
    compare_again(RESULTS)
    DOCUMENT.write_text(page(read(RESULTS), read(INDEX)), encoding="utf-8")
    print(DOCUMENT)


if __name__ == "__main__":
    main()
