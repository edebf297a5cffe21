"""Measures what quantised graphs of small trained language models lose.

    python benchmarks/quantised_graphs.py --write

The models are those of ``make evidence``: four that read text, and four that retrieve lines. They are trained
if they are missing, which takes minutes each, and converted with the default scaling. onnxruntime runs every
graph on the same windows or prompts. The text of the calibration took part in the training, and not in the
measuring.

Beside the graphs, torch runs the same models with weights that were rounded in ways that are not offered:
k-quant of onnxruntime's quantisers, and 8 bits in the attention or in the first and the last layer.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import ROOT, clean_up_when_terminated, load, table, write

sys.path.insert(0, str(ROOT / "examples"))

import lines_task
from evidence_design import TRAINED_LENGTH, Model
from evidence_measure import MODELS_FOLDER, train
from text_task import read_corpus
from transformers import AutoTokenizer

from converter import OnnxOptions, convert, export
from converter.evaluation.results import PERPLEXITY
from converter.evaluation.statistics import compare, summarise
from converter.exports.onnx.rounding import BLOCK, rounded
from converter.exports.onnx.session import Session

MODELS = (
    *(Model("text", heads, seed) for heads in (8, 12) for seed in (0, 1)),
    *(Model("lines", heads, seed) for heads in (8, 12) for seed in (0, 1)),
)
LENGTHS = (TRAINED_LENGTH, 4 * TRAINED_LENGTH)
ITEMS, PROMPTS = 64, 200
"""Windows of the longer length; prompts of each length."""
CHARACTERS, DOCUMENTS = 100_000, 80
"""Of the text to calibrate on, and of lines."""
BASE = "fp32"
GRAPHS = {
    BASE: ("model.onnx", {"dtype": "fp32", "standalone": True}),
    "int8": ("model_quantized.onnx", {"dtype": "int8"}),
    "w8a8": ("model_int8.onnx", {"dtype": "w8a8"}),
    "int4": ("model_q4.onnx", {"dtype": "int4"}),
    "int4, `--calibrate`": ("model_q4.onnx", {"dtype": "int4"}),
}
"""Name -> file in ``onnx/``, and the options of the export."""
STEPS = 32 + 4
"""Bits of a block's scale and zero point."""
PACKAGES = ("onnx", "onnxruntime")
INTRO = f"""\
Small BLOOMs, trained at {TRAINED_LENGTH} tokens and converted with the default scaling. Text: perplexity of
{ITEMS} windows, in brackets the change from fp32. Lines: right answers in percent of {PROMPTS} prompts, in
brackets the change in points. A star marks a change with p < 0.05 over the same windows or prompts (sign
test). The models are far smaller than published ones: measure yours."""
ROUNDED = """\
The same models in torch, with float32 activations. The rows that are not in the table above are ways of
rounding that this tool does not offer. Bits: of a weight of the layers, on average, scales and zero points
included."""

Array = NDArray[Any]
Run = Callable[[Array], Array]
"""Token ids [B, L] -> logits [B, L, vocabulary]."""


def material(model: Model, folder: Path, tokenizer: Any) -> tuple[Path, dict[int, list[Array]]]:
    """A text to calibrate on; length -> token ids to measure with, each [1, L]; of lines with the answer."""
    text = folder / "calibration.txt"
    if model.task == "lines":
        rng = np.random.default_rng(7)
        documents = (lines_task.document(rng, 2 * TRAINED_LENGTH) for _ in range(DOCUMENTS))
        text.write_text("".join(documents), encoding="utf-8")
        items = {}
        for length in LENGTHS:
            rng = np.random.default_rng([1, length])
            prompts = [lines_task.evaluation_prompt(rng, tokens=length) for _ in range(PROMPTS)]
            items[length] = [np.append(each.input_ids, each.answer_id)[None] for each in prompts]
        return text, items
    corpus = read_corpus(LENGTHS[-1])
    text.write_text(corpus.training[:CHARACTERS], encoding="utf-8", newline="\n")
    ids = np.array(tokenizer(corpus.held_out, verbose=False)["input_ids"][: ITEMS * LENGTHS[-1]])
    return text, {length: list(ids.reshape(-1, 1, length)) for length in LENGTHS}


def scores(model: Model, run: Run, items: Sequence[Array]) -> list[float]:
    """The loss of each window in nats per token, or whether each answer is right."""
    found = []
    for ids in items:
        logits = run(ids[:, :-1])[0].astype(np.float64)
        if model.task == "lines":
            found.append(float(logits[-1].argmax() == ids[0, -1]))
            continue
        logits -= logits.max(axis=-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        found.append(-float(logits[np.arange(len(logits)), ids[0, 1:]].mean()))
    return found


def graphs(out: Path, text: Path) -> Iterator[tuple[str, Run]]:
    """Every graph of a converted model, under onnxruntime."""
    for name, (file, options) in GRAPHS.items():
        calibrate = (text,) if "calibrate" in name else ()
        export(out, OnnxOptions(**options, calibrate=calibrate))
        session = Session(out / "onnx" / file, "cpu")
        yield name, lambda ids, session=session: session.step(ids, np.ones_like(ids))[0].values


def k_quant(weight: Array) -> Array:
    """A weight [outputs, inputs] rounded by k-quant of onnxruntime's quantisers."""
    from onnxruntime.quantization.neural_compressor.weight_only import quant_tensor_k_quant_cpu

    numbers, scales, zeros = quant_tensor_k_quant_cpu(weight.reshape(-1, BLOCK), num_bits=4, group_size=BLOCK)
    return ((numbers - zeros.astype(np.float32)) * scales).astype(np.float32).reshape(weight.shape)


def roundings(layers: int) -> dict[str, Callable[[str, Array], tuple[int, Array]]]:
    """Ways to round a layer's weight: its name and its values -> bits, and new values."""

    def mixed(name: str, weight: Array, wide: str) -> tuple[int, Array]:
        bits = 8 if re.search(wide, name) else 4
        return bits, rounded(weight, 8 if bits == 8 else 4)

    return {
        "int8": lambda _, weight: (8, rounded(weight, 8)),
        "int4": lambda _, weight: (4, rounded(weight, 4)),
        "int4, k-quant": lambda _, weight: (4, k_quant(weight)),
        "int4, int8 in the attention": lambda name, weight: mixed(name, weight, "self_attention"),
        "int4, int8 in the first and last layer": lambda name, weight: mixed(
            name, weight, rf"\.h\.(0|{layers - 1})\."
        ),
    }


def in_torch(out: Path) -> Iterator[tuple[str, float, Run]]:
    """The model with rounded weights, and the bits of a layer's weight."""
    import torch
    from transformers import AutoModelForCausalLM

    def fresh() -> Any:
        return AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32)

    def runs(model: Any) -> Run:
        with_no_cache = {"use_cache": False}
        return lambda ids: model(torch.from_numpy(ids), **with_no_cache).logits.detach().numpy()

    model = fresh()
    yield BASE, 32.0, runs(model)
    for name, rounding in roundings(model.config.num_hidden_layers).items():
        model, bits, count = fresh(), 0.0, 0
        for key, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            weight = parameter.detach().numpy()
            if ".h." not in key:
                values = rounded(weight, 8)  # the head and the embeddings, in every graph
            else:
                width, values = rounding(key, weight)
                bits += (width + STEPS / BLOCK) * weight.size
                count += weight.size
            parameter.data = torch.from_numpy(values)
        yield name, bits / count, runs(model)


def cell(task: str, found: Sequence[float], base: Sequence[float]) -> str:
    """A value and, unless it is the base itself, its change."""
    metric = PERPLEXITY if task == "text" else "accuracy"
    value, right = summarise(metric, found)[0], summarise(metric, base)[0]
    change = compare(metric, found, base)
    star = "*" if change.p < 0.05 else ""
    if found is base:
        return f"{value:.3f}" if task == "text" else f"{100 * value:.1f}"
    if task == "text":
        return f"{value:.3f} ({100 * (value / right - 1):+.2f} %{star})"
    return f"{100 * value:.1f} ({100 * (value - right):+.1f}{star})"


def measure(model: Model, models: Path) -> tuple[dict[str, list[str]], dict[str, tuple[float, list[str]]]]:
    """A row of cells for each graph, and for each way of rounding in torch, with its bits."""
    train(model, models)
    of_graphs: dict[str, list[str]] = {}
    of_torch: dict[str, tuple[float, list[str]]] = {}
    with tempfile.TemporaryDirectory(prefix="ntk-benchmark-") as name:
        out = Path(name) / "converted"
        convert(model.folder(models), out, train_length=TRAINED_LENGTH)
        text, items = material(model, Path(name), AutoTokenizer.from_pretrained(out, trust_remote_code=True))

        def row(run: Run, base: list[list[float]]) -> list[str]:
            found = [scores(model, run, items[length]) for length in LENGTHS]
            base[:] = base or found
            return [cell(model.task, one, right) for one, right in zip(found, base, strict=True)]

        base: list[list[float]] = []
        for side, run in graphs(out, text):
            of_graphs[side] = row(run, base)
        base = []
        for side, bits, run in in_torch(out):
            of_torch[side] = bits, row(run, base)
    return of_graphs, of_torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=MODELS_FOLDER, help="trained models [.evidence]")
    parser.add_argument("--only", help="names of models, with commas [all]")
    parser.add_argument("--write", action="store_true", help="write the tables into results/")
    options = parser.parse_args()
    clean_up_when_terminated()
    before = load()
    options.models.mkdir(parents=True, exist_ok=True)
    chosen = [each for each in MODELS if not options.only or each.name in options.only.split(",")]
    first, second = [], []
    for model in chosen:
        print(model.name, file=sys.stderr)
        of_graphs, of_torch = measure(model, options.models)
        first += [[model.name, side, *cells] for side, cells in of_graphs.items()]
        second += [[model.name, side, f"{bits:.1f}", *cells] for side, (bits, cells) in of_torch.items()]
    columns = [f"{length} tokens" for length in LENGTHS]
    text = [
        INTRO,
        table(["model", "graph", *columns], first, texts=2),
        ROUNDED,
        table(["model", "weights", "bits", *columns], second, texts=2),
    ]
    if options.write:
        print(write("quantised_graphs", "Quantised graphs of language models", text, before, PACKAGES))
    else:
        print("\n\n".join(text))


if __name__ == "__main__":
    main()
