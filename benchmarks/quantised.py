"""What quantised graphs of trained models lose.

    python benchmarks/quantised.py language     # graphs of the language models of make evidence
    python benchmarks/quantised.py encoders     # graphs of the encoders of examples/evidence_encoders.py

They train what is missing in ``.evidence``, which takes minutes for each model, and run every graph in
onnxruntime on the same windows, prompts or texts.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import encoder_speed
import measuring
import numpy as np
import report
from numpy.typing import NDArray

sys.path.insert(0, str(report.ROOT / "examples"))

import evidence_design
import evidence_encoders
import evidence_measure
import lines_task
import pairs_task
import text_task
import train_encoders

from converter import OnnxOptions, convert, export
from converter.evaluation.statistics import compare_scores as compare
from converter.evaluation.statistics import summarise
from converter.evaluation.tasks import scores as scores_of

GRAPHS = {
    "fp32": ("model.onnx", {"dtype": "fp32"}),
    "int8": ("model_quantized.onnx", {"dtype": "int8"}),
    "w8a8": ("model_int8.onnx", {"dtype": "w8a8"}),
    "int4": ("model_q4.onnx", {"dtype": "int4"}),
}
"""Name -> file in ``onnx/``, and the options of the export."""
CALIBRATED = "int4, `--calibrate`"
BASE = "fp32"
PACKAGES = ("onnx", "onnxruntime")
Array = NDArray[Any]
FOLDER = evidence_measure.MODELS_FOLDER


@click.group(help=__doc__)
def main() -> None:
    pass


# --- language models

TRAINED = evidence_design.TRAINED_LENGTH
MODELS = [each for each in evidence_design.MODELS if each.bias_max is None and each.seed < 2]
LENGTHS = (TRAINED, 4 * TRAINED)
ITEMS, PROMPTS = 64, 200
"""Windows of the longer length; prompts of each length."""
CHARACTERS, DOCUMENTS = 100_000, 80
"""Of the text to calibrate on, and of lines; it took part in the training, and not in the measuring."""
LANGUAGE = f"""\
Small BLOOMs, trained at {TRAINED} tokens and converted with the default scaling. Text: perplexity of {ITEMS}
windows, in brackets the change from fp32. Lines: right answers in percent of {PROMPTS} prompts, in brackets
the change in points. A star marks a change with p < 0.05 over the same windows or prompts. The models are
far smaller than published ones: measure yours."""


def material(task: str, folder: Path, tokenizer: Any) -> tuple[Path, dict[int, list[Array]]]:
    """A text to calibrate on; length -> token ids to measure with, each [1, L]; of lines with the answer."""
    text = folder / "calibration.txt"
    if task == "lines":
        rng = np.random.default_rng(7)
        documents = (lines_task.document(rng, 2 * TRAINED) for _ in range(DOCUMENTS))
        text.write_text("".join(documents), encoding="utf-8")
        items = {}
        for length in LENGTHS:
            rng = np.random.default_rng([1, length])
            prompts = [lines_task.evaluation_prompt(rng, tokens=length) for _ in range(PROMPTS)]
            items[length] = [np.append(each.input_ids, each.answer_id)[None] for each in prompts]
        return text, items
    corpus = text_task.read_corpus(LENGTHS[-1])
    text.write_text(corpus.training[:CHARACTERS], encoding="utf-8", newline="\n")
    ids = np.array(tokenizer(corpus.held_out, verbose=False)["input_ids"][: ITEMS * LENGTHS[-1]])
    return text, {length: list(ids.reshape(-1, 1, length)) for length in LENGTHS}


def scores(task: str, graph: Any, items: Sequence[Array]) -> list[float]:
    """The loss of each window in nats per token, or whether each answer is right."""
    pasts = [one for one in graph.get_inputs() if one.name.startswith("past")]
    empty = {one.name: np.zeros((1, int(one.shape[1]), 0, int(one.shape[3])), np.float32) for one in pasts}
    found = []
    for ids in items:
        feed = {"input_ids": ids[:, :-1], "attention_mask": np.ones_like(ids[:, :-1])}
        [[logits]] = graph.run(["logits"], feed | empty)
        if task == "lines":
            found.append(float(logits[-1].argmax() == ids[0, -1]))
            continue
        logits = logits.astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        found.append(-float(logits[np.arange(len(logits)), ids[0, 1:]].mean()))
    return found


def language_cell(task: str, found: Sequence[float], base: Sequence[float]) -> str:
    """A value and, unless it is the base itself, its change."""
    metric = "perplexity" if task == "text" else "accuracy"
    value, right = summarise(metric, found)[0], summarise(metric, base)[0]
    said = f"{value:.3f}" if task == "text" else f"{100 * value:.1f}"
    if found is base:
        return said
    star = "*" if compare(metric, found, base).significant else ""
    change = f"{100 * (value / right - 1):+.2f} %" if task == "text" else f"{100 * (value - right):+.1f}"
    return f"{said} ({change}{star})"


@main.command()
@report.common()
def language(write: bool) -> None:
    """Perplexity and right answers of graphs of small trained language models."""
    from transformers import AutoTokenizer

    before, rows = report.load(), []
    FOLDER.mkdir(exist_ok=True)
    for model in MODELS:
        source = evidence_measure.train(model, FOLDER)
        with measuring.workplace() as temporary:
            out = temporary / "converted"
            convert(source, out, train_length=TRAINED)
            tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
            text, items = material(model.task, temporary, tokenizer)
            base: dict[int, list[float]] = {}
            for name, (file, options) in {**GRAPHS, CALIBRATED: GRAPHS["int4"]}.items():
                calibrate = (text,) if name == CALIBRATED else ()
                export(out, OnnxOptions(standalone=True, calibrate=calibrate, **options))
                graph = measuring.session(out / "onnx" / file)
                found = {length: scores(model.task, graph, items[length]) for length in LENGTHS}
                base = base or found
                cells = [language_cell(model.task, found[length], base[length]) for length in LENGTHS]
                rows.append([model.name, name, *cells])
                report.say(" | ".join(rows[-1]))
    head = ["model", "graph", *(f"{length} tokens" for length in LENGTHS)]
    sections = [LANGUAGE, report.table(head, rows, texts=2)]
    title = "Quantised graphs of language models"
    report.finish("quantised_graphs", title, sections, before, PACKAGES, write=write)


# --- encoders

MULTIPLES = (1, 4, 8)
PAIRS, SEED, ROWS = 128, 2000, 16
"""Queries, and documents, of each length; their seed; texts that are run at once."""
ENCODERS = f"""\
Small MosaicBERTs, trained at {train_encoders.TRAINED_LENGTH} tokens to find the document that holds a pair of
words, and converted with `--method ntk --dynamic length`. For each length there are {PAIRS} queries and
{PAIRS} documents. A cell is nDCG@10 in percent. In brackets is the mean change from fp32 over the same
queries, with its 95 % confidence interval. The models are far smaller than published ones: measure yours."""


def with_graphs(model: Path, work: Path) -> Path:
    """Converts a model, which pools by the mean, and writes its graphs; the converted repository."""
    source, out = Path(shutil.copytree(model, work / "source")), work / "converted"
    encoder_speed.pool_by_mean(source)
    convert(source, out, method="ntk", dynamic="length", train_length=train_encoders.TRAINED_LENGTH)
    for _, options in GRAPHS.values():
        export(out, OnnxOptions(standalone=True, pooled=True, **options))
    return out


def vectors(graph: Any, texts: Array) -> Array:
    """Vectors of texts of the same length, float32 [texts, hidden]."""
    found = []
    for start in range(0, len(texts), ROWS):
        ids = np.asarray(texts[start : start + ROWS], np.int64)
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        found.append(graph.run(["sentence_embedding"], feed)[0])
    return np.concatenate(found)


def ndcg(queries: Array, documents: Array) -> list[float]:
    """nDCG@10 of each query, whose only relevant document is the one with its number."""
    units = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in (queries, documents)]
    similar = units[0].astype(np.float64) @ units[1].astype(np.float64).T
    return [scores_of.ndcg(np.argsort(-row), {number: 1}) for number, row in enumerate(similar)]


@main.command()
@report.common()
def encoders(write: bool) -> None:
    """nDCG@10 of graphs of small trained encoders."""
    before, rows = report.load(), []
    FOLDER.mkdir(exist_ok=True)
    for model in (each for each in evidence_encoders.MODELS if each.task == "pairs"):
        source = evidence_measure.train(model, FOLDER, evidence_encoders.SCRIPT)
        with measuring.workplace() as temporary:
            out = with_graphs(source, temporary)
            for length in (multiple * train_encoders.TRAINED_LENGTH for multiple in MULTIPLES):
                rng = np.random.default_rng([SEED, length])
                queries, documents = pairs_task.draw(rng, pairs=PAIRS, length=length)
                found = {}
                for name, (file, _) in GRAPHS.items():
                    graph = measuring.session(out / "onnx" / file)
                    found[name] = ndcg(vectors(graph, queries), vectors(graph, documents))
                rows.append([model.name, str(length), *(encoder_cell(found, name) for name in GRAPHS)])
                report.say(" | ".join(rows[-1]))
    sections = [ENCODERS, report.table(["model", "tokens", *GRAPHS], rows)]
    title = "Quantised graphs of encoders"
    report.finish("quantised_encoders", title, sections, before, PACKAGES, write=write)


def encoder_cell(found: dict[str, list[float]], name: str) -> str:
    """The value and, for a quantised graph, its change from fp32."""
    value = f"{100 * float(np.mean(found[name])):.1f}"
    if name == BASE:
        return value
    change = compare("ndcg@10", found[name], found[BASE])
    mean, low, high = (f"{100 * each:+.1f}" for each in (change.difference, change.low, change.high))
    return f"{value} ({mean}: {low} to {high})"


if __name__ == "__main__":
    main()
