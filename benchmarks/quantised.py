"""What quantised weights, caches and graphs lose.

    python benchmarks/quantised.py language     # graphs of the language models of make evidence
    python benchmarks/quantised.py encoders     # graphs of the encoders of examples/evidence_encoders.py
    python benchmarks/quantised.py packages     # transformers with torchao, bitsandbytes, hqq and quanto

The first two train what is missing in ``.evidence``, which takes minutes for each model, and run every graph in
onnxruntime on the same windows, prompts or texts. ``packages`` has tiny random models: it shows which ways
work, and says nothing about the quality of a trained model.
"""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import measuring
import numpy as np
import report
import torch
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
from converter.evaluation.statistics import compare, summarise
from tests import tiny

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
FOLDER = click.option("--models", type=Path, default=evidence_measure.MODELS_FOLDER, help="Trained models.")
ONLY = click.option("--only", help="Names of models, with commas between them.  [all]")


def session(graph: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    return onnxruntime.InferenceSession(str(graph), options, ["CPUExecutionProvider"])


@click.group(help=__doc__)
def main() -> None:
    pass


# --- language models

TRAINED = evidence_design.TRAINED_LENGTH
MODELS = tuple(
    evidence_design.Model(task, heads, seed)
    for task in ("text", "lines")
    for heads in (8, 12)
    for seed in (0, 1)
)
LENGTHS = (TRAINED, 4 * TRAINED)
ITEMS, PROMPTS = 64, 200
"""Windows of the longer length; prompts of each length."""
CHARACTERS, DOCUMENTS = 100_000, 80
"""Of the text to calibrate on, and of lines; it took part in the training, and not in the measuring."""
LANGUAGE = f"""\
Small BLOOMs, trained at {TRAINED} tokens and converted with the default scaling. Text: perplexity of {ITEMS}
windows, in brackets the change from fp32. Lines: right answers in percent of {PROMPTS} prompts, in brackets the
change in points. A star marks a change with p < 0.05 over the same windows or prompts (sign test). The models
are far smaller than published ones: measure yours."""


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
    star = "*" if compare(metric, found, base).p < 0.05 else ""
    change = f"{100 * (value / right - 1):+.2f} %" if task == "text" else f"{100 * (value - right):+.1f}"
    return f"{said} ({change}{star})"


@main.command()
@FOLDER
@ONLY
@report.common()
def language(models: Path, only: str | None, folder: Path | None, write: bool) -> None:
    """Perplexity and right answers of graphs of small trained language models."""
    from transformers import AutoTokenizer

    before, rows = report.load(), []
    models.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        if only and model.name not in only.split(","):
            continue
        evidence_measure.train(model, models)
        with measuring.workplace(folder) as temporary:
            out = temporary / "converted"
            convert(model.folder(models), out, train_length=TRAINED)
            tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
            text, items = material(model.task, temporary, tokenizer)
            base: dict[int, list[float]] = {}
            for name, (file, options) in {**GRAPHS, CALIBRATED: GRAPHS["int4"]}.items():
                calibrate = (text,) if name == CALIBRATED else ()
                export(out, OnnxOptions(standalone=True, calibrate=calibrate, **options))
                graph = session(out / "onnx" / file)
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
PAIRS, SEED, ROWS, TOP = 128, 2000, 16, 10
"""Queries, and documents, of each length; the seed of their words; texts that are run at once; ranks that count."""
MODULES = ("Transformer", "Pooling", "Normalize")
ENCODERS = f"""\
Small MosaicBERTs, trained at {train_encoders.TRAINED_LENGTH} tokens to find the document that holds a pair of
words, and converted with `--method ntk --dynamic length`. For each length there are {PAIRS} queries and {PAIRS}
documents. A cell is nDCG@{TOP} in percent. In brackets is the mean change from fp32 over the same queries, with
its 95 % confidence interval. The models are far smaller than published ones: measure yours."""


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
    convert(source, out, method="ntk", dynamic="length", train_length=train_encoders.TRAINED_LENGTH)
    for _, options in GRAPHS.values():
        export(out, OnnxOptions(standalone=True, pooled=True, **options))
    return out


def vectors(graph: Any, texts: Array) -> Array:
    """Vectors of length 1 of texts of the same length, float32 [texts, hidden]."""
    found = []
    for start in range(0, len(texts), ROWS):
        ids = np.asarray(texts[start : start + ROWS], np.int64)
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        found.append(graph.run(["sentence_embedding"], feed)[0])
    return np.concatenate(found)


def ndcg(queries: Array, documents: Array) -> list[float]:
    """nDCG@10 of each query, whose only relevant document is the one with its number."""
    similar = queries.astype(np.float64) @ documents.astype(np.float64).T
    ranks = (similar > np.diag(similar)[:, None]).sum(1) + 1
    return [1 / math.log2(1 + rank) if rank <= TOP else 0.0 for rank in ranks]


@main.command()
@FOLDER
@ONLY
@report.common()
def encoders(models: Path, only: str | None, folder: Path | None, write: bool) -> None:
    """nDCG@10 of graphs of small trained encoders."""
    before, rows = report.load(), []
    models.mkdir(parents=True, exist_ok=True)
    for model in evidence_encoders.MODELS:
        if model.task != "pairs" or (only and model.name not in only.split(",")):
            continue
        source = evidence_encoders.train(model, models)
        with measuring.workplace(folder) as temporary:
            out = with_graphs(source, temporary)
            for length in (multiple * train_encoders.TRAINED_LENGTH for multiple in MULTIPLES):
                rng = np.random.default_rng([SEED, length])
                queries, documents = pairs_task.draw(rng, pairs=PAIRS, length=length)
                found = {}
                for name, (file, _) in GRAPHS.items():
                    graph = session(out / "onnx" / file)
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


# --- transformers with packages that quantise

FAMILIES = ("bloom", "mpt")
HEADS, BATCH, TOKENS = 16, 2, 60
TINY = f"""\
Tiny random models with {HEADS} heads, position-dynamic, on the CPU; {BATCH} rows of {TOKENS} tokens. Each
number is the norm of the change of the logits, relative to the norm of the logits in float32. *Weights*
compares the whole prompt, *caches* the second new token of `generate`, which reads the cache."""


def torchao(name: str, **options: Any) -> dict[str, Any]:
    """Keywords of ``from_pretrained`` for a config class of torchao."""
    from torchao import quantization
    from transformers import TorchAoConfig

    settings = TorchAoConfig(quant_type=getattr(quantization, name)(**options))
    return {"quantization_config": settings, "device_map": "cpu"}


def bitsandbytes(**options: Any) -> dict[str, Any]:
    from transformers import BitsAndBytesConfig

    importlib.import_module("bitsandbytes")  # transformers' own error does not name the package
    return {"quantization_config": BitsAndBytesConfig(**options), "device_map": "cpu"}


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8_ACTIVATIONS = "Int8DynamicActivationInt8WeightConfig"
WEIGHTS: dict[str, Callable[[], dict[str, Any]]] = {
    "bfloat16, not quantised": lambda: {"dtype": "bfloat16"},
    "torchao, `Int8WeightOnlyConfig`": lambda: torchao("Int8WeightOnlyConfig"),
    f"torchao, `{INT8_ACTIVATIONS}`": lambda: torchao(INT8_ACTIVATIONS),
    "torchao, `IntxWeightOnlyConfig(weight_dtype=torch.int4)`": lambda: torchao(
        "IntxWeightOnlyConfig", weight_dtype=torch.int4
    ),
    "bitsandbytes, `load_in_8bit`": lambda: bitsandbytes(load_in_8bit=True),
    "bitsandbytes, `load_in_4bit` with nf4": lambda: bitsandbytes(**NF4),
}
HQQ = {"backend": "hqq", "q_group_size": 16, "axis_key": 1, "axis_value": 1}
CACHES: tuple[dict[str, Any], ...] = (
    {**HQQ, "nbits": 8},
    {**HQQ, "nbits": 4},
    {"backend": "quanto", "nbits": 4, "q_group_size": 16},
    {"backend": "fp8"},
)


def changes(family: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Each way to quantise one family, and the change of its logits or, in one line, why there is none."""
    from transformers import AutoModelForCausalLM

    source = tiny.FACTORIES[family](folder / "source", HEADS, use_cache=True)
    convert(source, folder / "out", method="ntk", dynamic="position", train_length=24, verify=False)
    ids = torch.from_numpy(tiny.token_ids(BATCH, TOKENS))

    def model(**options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / "out", trust_remote_code=True, **options).eval()

    plain = model()
    new = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    new |= {"attention_mask": torch.ones_like(ids), "output_logits": True, "return_dict_in_generate": True}
    runs: dict[str, Callable[[], torch.Tensor]] = {
        name: lambda options=options: model(**options())(ids).logits for name, options in WEIGHTS.items()
    }
    for settings in CACHES:
        cache = {"cache_implementation": "quantized", "cache_config": settings}
        runs[f"cache, `{json.dumps(settings)}`"] = lambda cache=cache: plain.generate(
            ids, **new, **cache
        ).logits[1]
    with torch.no_grad():
        whole, second = plain(ids).logits, plain.generate(ids, **new).logits[1]
        for name, call in runs.items():
            right = second if name.startswith("cache") else whole
            try:
                yield name, f"{((call().float() - right).norm() / right.norm()).item():.2g}"
            except Exception as error:  # packages say in many ways that they cannot run here
                yield name, report.sentence(error)[:90]


@main.command()
@report.common()
def packages(folder: Path | None, write: bool) -> None:
    """Logits of transformers with quantised weights and caches."""
    before, found = report.load(), []
    for family in FAMILIES:
        with measuring.workplace(folder) as temporary:
            found.append(dict(changes(family, temporary)))
    rows = [[name, *(each[name] for each in found)] for name in found[0]]
    sections = [TINY, report.table(["way", *FAMILIES], rows)]
    names = ("torchao", "bitsandbytes", "hqq", "optimum-quanto")
    report.finish("quantised", "Quantised weights and caches", sections, before, names, write=write)


if __name__ == "__main__":
    main()
