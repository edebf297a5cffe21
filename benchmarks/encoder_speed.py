"""Compares a converted encoder with its original code, a stock BERT and ONNX graphs, on unequal texts.

    python benchmarks/encoder_speed.py --original-python PATH --original-code PATH --quantised --write
    python benchmarks/encoder_speed.py --layers 2 --lengths 128,512 --repeats 1     # a few minutes

The model is a JinaBERT with random weights, by default of the base model's size. For each length there are
texts with a quarter of that many tokens up to all of them. Every side embeds the same texts in batches of
the same size, and pools by the mean. Each run is a process of its own, and the sides take turns; the tables
show medians, and ratios of runs of the same turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import click
import encoder_attention
import limits
import numpy as np
import originals
import report
from encoder_side import FIRST_WORD, START, WORDS, Job, Measured
from torch_speed import fresh, integers, number, say

VOCABULARY = 30528
CODE = "jina-present"
"""The original in original_code.py. It passes the whole bias to torch's fused kernel, as the mask."""
TOLERANCE = 1e-4
"""Largest difference between the vectors of two sides in float32, relative to the largest number in them."""
UNSORTED, CONVERTED, SENTENCES = (
    "converted, unsorted",
    "converted, sorted",
    "converted, sentence-transformers",
)
BERT, ORIGINAL, GRAPH = "BERT, sentence-transformers", "original code", "ONNX, float32"
QUANTISED = {"ONNX, int8": ("int8", "model_quantized.onnx"), "ONNX, w8a8": ("w8a8", "model_int8.onnx")}
"""Side -> the graph's dtype, and its file in the folder ``onnx``."""
SHARES = {
    "ours": "Toeplitz view",
    "ours, padding": "Toeplitz view, padding channels",
    "no bias": "no bias (not ALiBi)",
}
"""Name of an attention kernel in the table -> its name in encoder_attention.py."""
MODULES = {"": "Transformer", "1_Pooling": "Pooling"}
"""Folder -> what sentence-transformers loads from it."""
PACKAGES = ("onnxruntime", "sentence-transformers")


@dataclass(frozen=True)
class Setup:
    """The settings that a run needs."""

    folder: Path
    """Holds the models, the texts and what the sides write."""
    layers: int
    heads: int
    head_dim: int
    inner: int
    threads: int
    longest: int
    quantised: bool
    original_python: str | None
    original_code: Path | None

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def sides(self) -> dict[str, Mapping[str, Any]]:
        """Side -> the fields of its ``Job`` that are its own."""
        model = str(self.folder / "model")
        sides: dict[str, Mapping[str, Any]] = {
            CONVERTED: {"side": "converted", "model": model, "ordered": True},
            UNSORTED: {"side": "converted", "model": model},
            SENTENCES: {"side": "sentence-transformers", "model": model},
            BERT: {"side": "sentence-transformers", "model": str(self.folder / "bert")},
            GRAPH: {"side": "graph", "model": str(self.folder / "model" / "model.onnx"), "ordered": True},
        }
        for side, (_, file) in QUANTISED.items() if self.quantised else ():
            path = self.folder / "model" / "onnx" / file
            sides[side] = {"side": "graph", "model": str(path), "ordered": True}
        if self.original_python:
            words = {"original": CODE, "code": str(self.original_code)}
            source = str(self.folder / "source")
            sides[ORIGINAL] = {"side": "original", "model": source, "ordered": True, **words}
        return sides

    def limit(self, machine: limits.Machine, side: str, lengths: Sequence[int]) -> float:
        sizes = limits.Encoder(self.hidden, self.layers, self.inner, gated=side != BERT)
        return sizes.seconds(machine, lengths)


@dataclass
class Cell:
    """One side at one length."""

    runs: list[Measured] = field(default_factory=list)
    """The run of each turn."""
    vectors: np.ndarray | None = None
    """float32 [texts, hidden]."""
    failure: str | None = None

    def median(self, of: Callable[[Measured], float]) -> float:
        return statistics.median(of(run) for run in self.runs)

    def ratio(self, other: Cell, of: Callable[[Measured], float]) -> float | None:
        """How many times ``other`` this is, by the median of the turns that both have."""
        if self.failure or other.failure:
            return None
        pairs = zip(self.runs, other.runs, strict=False)
        return statistics.median(of(mine) / (of(its) or 1) for mine, its in pairs)


Results = dict[int, dict[str, Cell]]
"""Length -> side -> measurements."""


def prepare(setup: Setup) -> None:
    """Writes the checkpoint, converts and exports it, and writes the BERT; call it in a fresh process."""
    import torch
    from transformers import BertConfig, BertModel

    from converter import OnnxOptions, convert, export
    from tests import tiny

    longest = {"max_position_embeddings": setup.longest}
    sizes = {"num_hidden_layers": setup.layers, "vocab_size": VOCABULARY, "intermediate_size": setup.inner}
    sizes |= {"hidden_size": setup.hidden, **longest}
    source = setup.folder / "source"
    # The original code makes a bias for this many tokens when it is loaded: by default 8192, as published.
    tiny.ENCODERS["jina_bert"](
        source, setup.heads, head="Model", model_max_length=setup.longest, hidden_dropout_prob=0.0, **sizes
    )
    torch.manual_seed(0)
    stock = BertConfig(num_attention_heads=setup.heads, **sizes)
    BertModel(stock).save_pretrained(setup.folder / "bert")
    for folder in (source, setup.folder / "bert"):
        complete(folder, setup)
    convert(source, setup.folder / "model", method="none", verify=False)
    export(setup.folder / "model", OnnxOptions(pooled=True, validate=False))
    for dtype, _ in QUANTISED.values() if setup.quantised else ():
        export(setup.folder / "model", OnnxOptions(pooled=True, dtype=dtype, standalone=True, validate=False))


def complete(folder: Path, setup: Setup) -> None:
    """Adds the tokenizer and the files of sentence-transformers, with pooling by the mean."""
    from tests import tiny

    tiny.tokenizer(folder, VOCABULARY)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    # As the published tokenizers of encoders.
    settings |= {"padding_side": "right", "model_max_length": setup.longest}
    (folder / "1_Pooling").mkdir()
    for name, content in {
        "tokenizer_config.json": settings,
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(MODULES.items())
        ],
        "sentence_bert_config.json": {"max_seq_length": setup.longest, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": setup.hidden,
            "pooling_mode_mean_tokens": True,
        },
    }.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def make_texts(length: int, count: int) -> list[list[int]]:
    """Random texts of a quarter of ``length`` tokens up to all of them; the first has all of them."""
    generator = np.random.default_rng(length)
    sizes = [length, *generator.integers(length // 4, length, size=count - 1, endpoint=True)]
    words = [generator.integers(FIRST_WORD, FIRST_WORD + WORDS, size=size - 1).tolist() for size in sizes]
    texts = [[START, *text] for text in words]
    # In any order, as texts come.
    return [texts[index] for index in generator.permutation(count)]


def padding(lengths: Sequence[int], rows: int) -> float:
    """The part of the tokens that is padding, in batches of ``rows`` texts in this order."""
    batches = [lengths[start : start + rows] for start in range(0, len(lengths), rows)]
    return 1 - sum(lengths) / sum(max(batch) * len(batch) for batch in batches)


def run(setup: Setup, side: str, texts: Path, rows: int) -> tuple[Measured, np.ndarray | None]:
    """Embeds the texts once, in a new process; also returns the vectors.

    Raises:
        SystemExit: it failed, and not for lack of memory.
    """
    own = setup.sides[side]
    vectors = setup.folder / "vectors.npy"
    job = Job(texts=str(texts), rows=rows, threads=setup.threads, vectors=str(vectors), **own)
    file = setup.folder / "job.json"
    file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    python = setup.original_python if side == ORIGINAL else sys.executable
    script = Path(__file__).with_name("encoder_side.py")
    done = subprocess.run([str(python), str(script), str(file)], capture_output=True, text=True)
    if done.returncode == -9:  # killed in spite of the limit
        return Measured(failure="out of memory"), None
    if done.returncode:
        raise SystemExit(f"{side}:\n{done.stderr}")
    measured = Measured(**json.loads(done.stdout.strip().splitlines()[-1]))
    return measured, None if measured.failure else np.load(vectors)


def measure(
    setup: Setup, texts: Mapping[int, list[list[int]]], rows: Mapping[int, int], repeats: int, limit: float
) -> Results:
    """Runs all sides in turn at each length; no new turn of a length starts after ``limit`` seconds."""
    results: Results = {}
    failures: dict[str, str] = {}
    for length, known in texts.items():
        file = setup.folder / f"texts-{length}.json"
        file.write_text(json.dumps(known), encoding="utf-8")
        # Longer texts would fail too.
        cells = results[length] = {side: Cell(failure=failures.get(side)) for side in setup.sides}
        started = monotonic()
        for turn in range(repeats):
            if turn and monotonic() - started > limit:
                break
            for side, cell in cells.items():
                if cell.failure:
                    continue
                measured, cell.vectors = run(setup, side, file, rows[length])
                if measured.failure:
                    failures[side] = cell.failure = measured.failure
                else:
                    cell.runs.append(measured)
                say(f"{length} tokens, turn {turn + 1}, {side}: " + described(measured))
    return results


def described(measured: Measured) -> str:
    if measured.failure:
        return measured.failure
    return f"{number(measured.seconds)} s, {measured.extra / 1e6:.0f} MB"


def difference(cell: Cell, other: Cell) -> float | None:
    """Largest difference of the vectors, relative to the largest number in ``other``'s."""
    if cell.vectors is None or other.vectors is None:
        return None
    return float(np.abs(cell.vectors - other.vectors).max() / np.abs(other.vectors).max())


def check(results: Results) -> None:
    """Fails if two sides with the same weights in float32 have different vectors."""
    for length, cells in results.items():
        for side, cell in cells.items():
            gap = None if side in (BERT, *QUANTISED) else difference(cell, cells[CONVERTED])
            if gap is not None and not gap <= TOLERANCE:
                raise click.ClickException(f"{side} at {length} tokens: vectors are off by {gap:.1e}")


def rows_of(
    setup: Setup, cells: Mapping[str, Cell], lengths: Sequence[int], machine: limits.Machine
) -> Iterator[list[str]]:
    """The lines of a length's table, one for each side."""
    base = cells[CONVERTED]
    for side, cell in cells.items():
        if cell.failure:
            yield [side, cell.failure, *["-"] * 7]
            continue
        seconds = cell.median(lambda run: run.seconds)
        gap = None if side == BERT else difference(cell, base)
        yield [
            side,
            number(len(lengths) / seconds),
            number(seconds),
            times(cell.ratio(base, lambda run: run.seconds)),
            f"{cell.median(lambda run: run.extra) / 1e6:.0f}",
            times(cell.ratio(base, lambda run: run.extra)),
            f"{cell.median(lambda run: run.peak) / 1e6:.0f}",
            # The limit is that of float32.
            "-" if side in QUANTISED else f"{setup.limit(machine, side, lengths) / seconds:.0%}",
            "-" if gap is None else f"{gap:.0e}",
        ]


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def overview(texts: Mapping[int, list[list[int]]], rows: Mapping[int, int], results: Results) -> str:
    """What was embedded at each length, and what sorting saved."""
    lines = []
    for length, known in texts.items():
        sizes = [len(text) for text in known]
        ordered = sorted(sizes, reverse=True)
        cells = results[length]
        ratio = cells[UNSORTED].ratio(cells[CONVERTED], lambda run: run.seconds)
        lines.append(
            [
                *(str(count) for count in (length, len(known), rows[length], sum(sizes))),
                *(f"{padding(some, rows[length]):.0%}" for some in (sizes, ordered)),
                times(ratio),
                str(len(cells[CONVERTED].runs)),
            ]
        )
    head = ["tokens at most", "texts", "in a batch", "tokens of all", "padding", "padding if sorted"]
    return report.table([*head, "time unsorted / sorted", "turns"], lines)


def kernels(setup: Setup, lengths: Sequence[int], machine: limits.Machine) -> str:
    """The attention of one layer by itself, beside its part of the limit."""
    sizes = limits.Encoder(setup.hidden, 1, setup.inner, gated=True)
    lines = []
    for length in lengths:
        line = [str(length)]
        for name, way in SHARES.items():
            arguments = (way, setup.heads, setup.head_dim, length, "float32", 4, setup.threads)
            found = fresh(encoder_attention.measure, *arguments)
            share = 1000 * sizes.attention_seconds(machine, [length]) / found.milliseconds
            line += [number(found.milliseconds), f"{share:.0%}"]
            say(f"attention of {length} tokens, {name}: {line[-2]} ms, {line[-1]} of the limit")
        lines.append(line)
    return report.table(["tokens", *(word for name in SHARES for word in (f"{name} ms", "share"))], lines)


def measure_machine(threads: int) -> limits.Machine:
    found: limits.Machine = fresh(limits.measure, threads)
    return found


@click.command(help=__doc__)
@click.option("--layers", default=12, show_default=True)
@click.option("--heads", default=12, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option("--inner", default=3072, show_default=True, help="Width of the feed-forward layers.")
@click.option("--lengths", default="128,512,2048,8192", show_default=True, callback=integers, help="Tokens.")
@click.option("--batch-tokens", default=16384, show_default=True, help="A batch has this / length texts.")
@click.option("--batches", default=2, show_default=True, help="Batches of each length.")
@click.option("--threads", default=1, show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Turns of each side.")
@click.option(
    "--seconds", default=1800.0, show_default=True, help="Start no new turn of a length after this."
)
@click.option("--quantised", is_flag=True, help="Measure the graphs of 8 bits too.")
@click.option("--original-python", help="Interpreter of the environment for the original code.")
@click.option(
    "--original-code",
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    help="Folder with the original code, as originals.py --setup fetches it.",
)
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="Folder for temporary files.")
@click.option("--write", is_flag=True, help="Write results/encoder_speed-cpu.md.")
def main(
    lengths: list[int],
    batch_tokens: int,
    batches: int,
    repeats: int,
    seconds: float,
    folder: Path | None,
    write: bool,
    **options: Any,
) -> None:
    if bool(options["original_python"]) != bool(options["original_code"]):
        raise click.UsageError("--original-python and --original-code go together")
    report.clean_up_when_terminated()
    load_before = report.load()
    rows = {length: max(1, batch_tokens // length) for length in lengths}
    texts = {length: make_texts(length, batches * rows[length]) for length in lengths}
    with tempfile.TemporaryDirectory(prefix="ntk-benchmark-", dir=folder) as temporary:
        # transformers caches a repository's code by name; a new cache is never stale.
        os.environ["HF_MODULES_CACHE"] = str(Path(temporary, "modules"))
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        os.environ |= {"OMP_NUM_THREADS": str(options["threads"]), "TOKENIZERS_PARALLELISM": "false"}
        setup = Setup(Path(temporary), longest=max(lengths), **options)
        machine = measure_machine(setup.threads)
        fresh(prepare, setup)
        results = measure(setup, texts, rows, repeats, seconds)
        check(results)
        machine = machine.or_better(measure_machine(setup.threads))
        kernel_table = kernels(setup, lengths, machine)
    old = ""
    if setup.original_python:
        old = f" The original code ran under {originals.start(setup.original_python, 'versions')}."
    sections = [
        f"JinaBERT, {setup.heads} heads x {setup.head_dim}, {setup.layers} layers, feed-forward layers of "
        f"{setup.inner}, float32, not scaled, {setup.threads} CPU thread(s).{old} The fastest product of "
        f"matrices has {machine.operations / 1e9:.0f} GFLOP/s. *x* compares with the first line.",
        overview(texts, rows, results),
    ]
    head = ["texts/s", "seconds", "x", "extra MB", "x", "peak MB", "share", "difference"]
    for length, cells in results.items():
        sizes = [len(text) for text in texts[length]]
        lines = rows_of(setup, cells, sizes, machine)
        sections.append(report.table([f"up to {length} tokens", *head], lines))
    sections.append(
        f"The attention of one layer by itself, one row without padding:\n\n{kernel_table}",
    )
    click.echo("\n\n".join(sections))
    if write:
        title = "A converted encoder beside others"
        say(f"wrote {report.write('encoder_speed-cpu', title, sections, load_before, PACKAGES).name}")


if __name__ == "__main__":
    sys.exit(main())
