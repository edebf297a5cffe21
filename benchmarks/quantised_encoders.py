"""Measures what quantised graphs of small trained encoders lose in retrieval.

    python benchmarks/quantised_encoders.py --write

The encoders are those of ``examples/evidence_encoders.py`` for the task ``pairs``. They are trained if they
are missing, which takes minutes, and converted. Each gets standalone graphs with vectors of texts, which
onnxruntime runs. The same queries and documents are ranked with every graph.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report import ROOT, clean_up_when_terminated, load, table, write

sys.path.insert(0, str(ROOT / "examples"))

import pairs_task
from evidence_encoders import MODELS, train
from evidence_measure import MODELS_FOLDER
from train_encoders import TRAINED_LENGTH
from transformers import AutoTokenizer

from converter import OnnxOptions, convert, export
from converter.evaluation.embeddings import rank
from converter.evaluation.statistics import compare, summarise
from converter.evaluation.tasks.beir import Beir
from converter.exports.onnx.session_options import session_options

GRAPHS = {
    "fp32": "model.onnx",
    "int8": "model_quantized.onnx",
    "w8a8": "model_int8.onnx",
    "int4": "model_q4.onnx",
}
"""Dtype -> file in ``onnx/``."""
MULTIPLES = (1, 4, 8)
PAIRS, SEED, ROWS = 128, 2000, 16
"""Queries, and documents, of each length; the seed of their words; texts that are run at once."""
MODULES = ("Transformer", "Pooling", "Normalize")
PACKAGES = ("onnx", "onnxruntime")
INTRO = f"""\
Small MosaicBERTs, trained at {TRAINED_LENGTH} tokens to find the document that holds a pair of words, and
converted with `--method ntk --dynamic length`. For each length there are {PAIRS} queries and {PAIRS}
documents. A cell is nDCG@10 in percent. In brackets is the mean change from fp32 over the same queries, with
its 95 % confidence interval. The models are far smaller than published ones: measure yours."""


@dataclass(frozen=True)
class Scores:
    """One model's scores at one length."""

    model: str
    length: int
    of: dict[str, tuple[float, ...]]
    """Dtype -> nDCG@10 of each query, from 0 to 1."""


def with_graphs(model: Path, work: Path) -> Path:
    """Converts a model, which pools by the mean, and writes its graphs; the converted repository."""
    source, out = Path(shutil.copytree(model, work / "source")), work / "converted"
    parts = [("", MODULES[0]), *((f"{place}_{kind}", kind) for place, kind in enumerate(MODULES) if place)]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in parts]
    (source / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    for path, kind in parts[1:]:
        (source / path).mkdir(exist_ok=True)
        settings = {"pooling_mode": "mean"} if kind == "Pooling" else {}
        (source / path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    convert(source, out, method="ntk", dynamic="length", train_length=TRAINED_LENGTH)
    for dtype in GRAPHS:
        export(out, OnnxOptions(dtype=dtype, standalone=True, pooled=True))
    return out


def vectors(graph: Path, texts: Sequence[Sequence[int]]) -> Any:
    """Vectors of length 1, float32 [texts, hidden]."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(graph), session_options(), ["CPUExecutionProvider"])
    found = []
    for start in range(0, len(texts), ROWS):
        part = texts[start : start + ROWS]
        mask = np.zeros((len(part), max(map(len, part))), dtype=np.int64)
        ids = np.zeros_like(mask)
        for row, text in enumerate(part):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        found.append(session.run(["sentence_embedding"], feed)[0])
    return np.concatenate(found)


def measure(model: Path, work: Path) -> list[Scores]:
    """Measures the graphs of one trained model at all lengths."""
    out = with_graphs(model, work)
    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    found = []
    for length in (multiple * TRAINED_LENGTH for multiple in MULTIPLES):
        folder = pairs_task.write_beir(work / f"pairs-{length}", pairs=PAIRS, length=length, seed=SEED)
        task = Beir.read(folder)
        texts = task.collections(tokenizer, [length], 0, 0)[length]
        scores = {}
        for dtype, name in GRAPHS.items():
            graph = out / "onnx" / name
            queries, documents = vectors(graph, texts.queries), vectors(graph, texts.documents)
            ranked = rank(queries, documents, texts)
            scores[dtype] = tuple(map(task.score, ranked, texts.relevant))
        found.append(Scores(model.name, length, scores))
    return found


def cell(found: Scores, dtype: str) -> str:
    """The value and, for a quantised graph, its change from fp32."""
    value, _, _ = summarise(Beir.metric, found.of[dtype])
    if dtype == "fp32":
        return f"{100 * value:.1f}"
    change = compare(Beir.metric, found.of[dtype], found.of["fp32"])
    mean, low, high = (f"{100 * each:+.1f}" for each in (change.difference, change.low, change.high))
    return f"{100 * value:.1f} ({mean}: {low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=MODELS_FOLDER, help="trained models [.evidence]")
    parser.add_argument("--write", action="store_true", help="write the table into results/")
    options = parser.parse_args()
    clean_up_when_terminated()
    before, found = load(), []
    options.models.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        if model.task == "pairs":
            source = train(model, options.models)
            with tempfile.TemporaryDirectory(prefix="ntk-benchmark-") as folder:
                found += measure(source, Path(folder))
    rows = [[each.model, str(each.length), *(cell(each, dtype) for dtype in GRAPHS)] for each in found]
    text = [INTRO, table(["model", "tokens", *GRAPHS], rows)]
    if options.write:
        write("quantised_encoders", "Quantised graphs of encoders", text, before, PACKAGES)
    else:
        print("\n\n".join(text))


if __name__ == "__main__":
    main()
