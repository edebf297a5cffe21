"""Texts per second and memory of a converted encoder, beside its original code, stock BERT and ONNX graphs.

    python benchmarks/encoder_speed.py --original-python PATH --original-code PATH --quantised
    python benchmarks/encoder_speed.py --layers 2 --lengths 128,512 --repeats 1     # a few minutes

The model is a JinaBERT with random weights, by default of the base model's size. For each length there are
texts with 1/32 of that many tokens up to all of them. Every side embeds the same texts in batches of
the same size, and pools by the mean. Each run is a process of its own, and the sides take turns; the tables
show medians.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import click
import measuring
import numpy as np
import report
import torch
from measuring import Cell, Measured
from report import number, ratio

VOCABULARY = 30528
START, FIRST_WORD, WORDS = 1, 1000, 1024
"""Id of every text's first token; the first of the ids that texts are made of; and the number of these."""
WARM_UP_ROWS = 16
"""Texts of the run before the measurement. They hold all words, so that run reads all weights into memory."""
CODE = "jina-present"
"""The original in original_code.py. It passes the whole bias to torch's fused kernel, as the mask."""
TOLERANCE = 1e-4
"""Largest difference between the vectors of two sides in float32, relative to the largest number in them."""
CONVERTED, UNSORTED = "converted, sorted", "converted, unsorted"
PADDED, ALONE = "converted, unsorted, with padding", "converted, one text at a time"
BERT, ORIGINAL = "BERT", "original code"
GRAPH, UNSORTED_GRAPH = "ONNX, float32", "ONNX, float32, unsorted"
QUANTISED = {"ONNX, int8": ("int8", "model_quantized.onnx"), "ONNX, w8a8": ("w8a8", "model_int8.onnx")}
"""Side -> the graph's dtype, and its file in the folder ``onnx``."""
PACKAGES = ("onnxruntime",)

Texts = Sequence[Sequence[int]]
"""The token ids of each text."""
Embed = Callable[[Texts, int], np.ndarray]
"""Texts and the number of them in a batch -> vectors [texts, hidden], in the order of the texts."""


@dataclass(frozen=True)
class Job:
    """What a process measures; the original code has an environment of its own, so it is passed as JSON."""

    side: str
    """A key of ``SIDES``."""
    model: str
    """The side's model: a folder, or the file of a graph."""
    threads: int
    ordered: bool = True
    """Sort the texts by length first, so that those in a batch have similar lengths."""
    padded: bool = False
    """Compute the padding, too, which a converted encoder otherwise leaves out."""
    alone: bool = False
    """Give the model one text at a time."""
    code: str = ""
    """The folder with the original code's repositories."""
    texts: str = ""
    """A JSON file with the texts."""
    rows: int = 0
    """Texts in a batch."""


def converted(job: Job) -> Embed:
    """A model as ``AutoModel`` loads it."""
    from transformers import AutoModel

    options = {} if Path(job.model).name == "bert" else {"trust_remote_code": True}
    model = AutoModel.from_pretrained(job.model, **options).eval()
    if job.padded:
        package = type(model).__module__.rpartition(".")[0]
        sys.modules[f"{package}.ntk_symmetric"].find_texts = lambda *_: None  # type: ignore[attr-defined]
    return in_batches(lambda ids, mask: model(ids, attention_mask=mask).last_hidden_state, job.ordered)


def original(job: Job) -> Embed:
    """The model's own code with the checkpoint that was converted."""
    from originals import importable, original_run

    run = original_run(importable(CODE, job.code), Path(job.model), "Model")
    return in_batches(lambda ids, mask: run(ids, mask, None)[0], job.ordered)


def graph(job: Job) -> Embed:
    """A pooled graph in onnxruntime."""
    opened = measuring.session(Path(job.model), job.threads)
    names = {value.name for value in opened.get_inputs()}

    def pooled(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        vectors: np.ndarray = opened.run(["sentence_embedding"], {name: feed[name] for name in names})[0]
        return vectors

    return batched(pooled, job.ordered)


SIDES: dict[str, Callable[[Job], Embed]] = {
    "converted": converted,
    "original": original,
    "graph": graph,
}


def in_batches(run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ordered: bool) -> Embed:
    """The means of a torch model's hidden states [rows, tokens, hidden]."""

    @torch.inference_mode()
    def pooled(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        real = torch.from_numpy(mask)
        states = run(torch.from_numpy(ids), real).float()
        weights = real[..., None].to(states)
        means: np.ndarray = ((states * weights).sum(1) / weights.sum(1)).cpu().numpy()
        return means

    return batched(pooled, ordered)


def batched(pooled: Callable[[np.ndarray, np.ndarray], np.ndarray], ordered: bool) -> Embed:
    """Pads batches on the right for a function of ids and mask, each int64 [rows, tokens]."""

    def embed(texts: Texts, rows: int) -> np.ndarray:
        order = list(range(len(texts)))
        if ordered:
            order.sort(key=lambda index: -len(texts[index]))
        vectors: dict[int, np.ndarray] = {}
        for start in range(0, len(order), rows):
            batch = order[start : start + rows]
            lengths = np.array([len(texts[index]) for index in batch])
            mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
            ids = np.zeros_like(mask)
            ids[mask.astype(bool)] = np.concatenate([np.array(texts[index]) for index in batch])
            vectors.update(zip(batch, pooled(ids, mask), strict=True))
        return np.stack([vectors[index] for index in range(len(texts))])

    return embed


def measure_job(job: Job) -> Cell:
    """Runs all texts once; the cell has their vectors as its logits."""
    measuring.limit_memory()
    torch.set_num_threads(job.threads)
    texts = json.loads(Path(job.texts).read_text(encoding="utf-8"))
    words = np.arange(FIRST_WORD, FIRST_WORD + WORDS).reshape(WARM_UP_ROWS, -1).tolist()
    cell = Cell()
    with measuring.noting_failure(cell.prompt):
        embed = SIDES[job.side](job)
        embed([[START, *row] for row in words], WARM_UP_ROWS)
        # With one thread, the processor's time is the run's; other work on the machine matters less to it.
        clock = time.process_time if job.threads == 1 else time.perf_counter
        with measuring.noting_extra(cell.prompt):
            started = clock()
            cell.logits = [embed(texts, 1 if job.alone else job.rows)]
            cell.prompt.seconds.append(clock() - started)
        cell.resident = measuring.peak()
    return cell


# --- all sides


def jobs(folder: Path, threads: int, quantised: bool, code: Path | None) -> dict[str, Job]:
    """Side -> what to measure."""
    model, source = str(folder / "model"), str(folder / "source")
    made = {
        CONVERTED: Job("converted", model, threads),
        UNSORTED: Job("converted", model, threads, ordered=False),
        PADDED: Job("converted", model, threads, ordered=False, padded=True),
        ALONE: Job("converted", model, threads, alone=True),
        BERT: Job("converted", str(folder / "bert"), threads),
        GRAPH: Job("graph", f"{model}/model.onnx", threads),
        UNSORTED_GRAPH: Job("graph", f"{model}/model.onnx", threads, ordered=False),
    }
    for side, (_, file) in QUANTISED.items() if quantised else ():
        made[side] = Job("graph", f"{model}/onnx/{file}", threads)
    return made | ({ORIGINAL: Job("original", source, threads, code=str(code))} if code else {})


def prepare(folder: Path, quantised: bool, sizes: Mapping[str, int]) -> None:
    """Writes the checkpoint, converts and exports it, and writes the BERT; call it in a fresh process."""
    from converter import OnnxOptions, convert, export

    make_models(folder, **sizes)
    pool_by_mean(folder / "source")
    model = folder / "model"
    convert(folder / "source", model, method="none", verify=False)
    export(model, OnnxOptions(pooled=True, validate=False))
    for dtype, _ in QUANTISED.values() if quantised else ():
        export(model, OnnxOptions(pooled=True, dtype=dtype, standalone=True, validate=False))


def make_models(folder: Path, *, heads: int, layers: int, hidden: int, inner: int, longest: int) -> None:
    """Writes ``source``, a JinaBERT, and ``bert``, transformers' own BERT that is as wide and as deep."""
    from transformers import BertConfig, BertModel

    from tests import tiny

    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": longest}
    # The original code makes a bias for this many tokens when it is loaded: by default 8192, as published.
    own = {"model_max_length": longest, "hidden_dropout_prob": 0.0}
    tiny.ENCODERS["jina_bert"](folder / "source", heads, head="Model", **own, **sizes)
    torch.manual_seed(0)
    BertModel(BertConfig(num_attention_heads=heads, **sizes), add_pooling_layer=False).save_pretrained(
        folder / "bert"
    )


def pool_by_mean(folder: Path) -> None:
    """Adds what sentence-transformers says of pooling, for the graphs."""
    (folder / "1_Pooling").mkdir()
    modules = {"": "Transformer", "1_Pooling": "Pooling"}
    kinds = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules.items()]
    (folder / "modules.json").write_text(json.dumps(kinds), encoding="utf-8")
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "mean"}', encoding="utf-8")


def make_texts(length: int, count: int) -> list[list[int]]:
    """Random texts of 1/32 of ``length`` tokens up to all of them, in any order; one has all of them."""
    generator = np.random.default_rng(length)
    sizes = [length, *generator.integers(max(1, length // 32), length, size=count - 1, endpoint=True)]
    words = [generator.integers(FIRST_WORD, FIRST_WORD + WORDS, size=size - 1).tolist() for size in sizes]
    texts = [[START, *text] for text in words]
    return [texts[index] for index in generator.permutation(count)]


def padding(lengths: Sequence[int], rows: int) -> float:
    """The part of the tokens that is padding, in batches of ``rows`` texts in this order."""
    batches = [lengths[start : start + rows] for start in range(0, len(lengths), rows)]
    return 1 - sum(lengths) / sum(max(batch) * len(batch) for batch in batches)


def measure(
    sides: Mapping[str, Job], python: str, batch_tokens: int, batches: int, side: str, length: int
) -> Cell:
    """Embeds the texts of a length once; call it in a fresh process."""
    rows, file = max(1, batch_tokens // length), Path(sides[CONVERTED].model).parent / f"texts-{length}.json"
    file.write_text(json.dumps(make_texts(length, batches * rows)), encoding="utf-8")
    job = replace(sides[side], texts=str(file), rows=rows)
    if side != ORIGINAL:
        return measure_job(job)
    words = [python, __file__, "--job", json.dumps(asdict(job))]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"{side}:\n{done.stderr}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    vectors = [np.array(each, np.float32) for each in found.pop("logits")]
    return Cell(Measured(**found.pop("prompt")), Measured(**found.pop("token")), vectors, **found)


def difference(cell: Cell, other: Cell) -> float | None:
    """Largest difference of the vectors, relative to the largest number in ``other``'s."""
    if cell.failure or other.failure:
        return None
    return measuring.difference(other.logits[0], cell.logits[0])


def check(results: Mapping[int, Mapping[str, Cell]]) -> None:
    """Fails if two sides with the same weights in float32 have different vectors."""
    for length, cells in results.items():
        for side, cell in cells.items():
            gap = None if side in (BERT, *QUANTISED) else difference(cell, cells[CONVERTED])
            if gap is not None and not gap <= TOLERANCE:
                raise click.ClickException(f"{side} at {length} tokens: vectors are off by {gap:.1e}")


def rows_of(cells: Mapping[str, Cell], count: int) -> Iterator[list[str]]:
    """The lines of a length's table, one for each side; ``count`` is the number of texts."""
    base = cells[CONVERTED]
    for side, cell in cells.items():
        gap = None if side == BERT else difference(cell, base)
        yield [
            side,
            cell.failure or number(count / (cell.prompt.median or 1)),
            ratio(cell.prompt.median, base.prompt.median),
            *(cell.prompt.megabytes, ratio(cell.prompt.extra, base.prompt.extra)),
            f"{cell.resident / 1e6:.0f}",
            "-" if gap is None else f"{gap:.0e}",
        ]


@click.command(help=__doc__)
@report.numbers(layers=12, heads=12, head_dim=64, inner=3072, threads=1, repeats=3, seconds=1800.0)
@report.numbers(batch_tokens=16384, batches=2)
@report.lengths("128,512,2048,8192")
@click.option("--quantised", is_flag=True, help="Measure the graphs of 8 bits too.")
@click.option("--original-python", default="", help="Python of originals.py's environment.")
@click.option(
    "--original-code",
    type=click.Path(path_type=Path, exists=True, resolve_path=True),
    help="Folder with the code that originals.py --setup fetches.",
)
@report.common(layers=1, heads=2, head_dim=16, inner=32, lengths="16,32", batch_tokens=64, repeats=1)
def main(
    lengths: list[int],
    repeats: int,
    seconds: float,
    write: bool,
    threads: int,
    head_dim: int,
    batch_tokens: int,
    batches: int,
    quantised: bool,
    original_python: str,
    original_code: Path | None,
    **sizes: int,
) -> None:
    if bool(original_python) != bool(original_code):
        raise click.UsageError("--original-python and --original-code go together")
    before, heads = report.load(), sizes["heads"]
    with measuring.workplace(threads) as folder:
        longest = max(*lengths, 1 + WORDS // WARM_UP_ROWS)
        more = {"hidden": heads * head_dim, "longest": longest}
        measuring.fresh(prepare, folder, quantised, sizes | more)
        sides = jobs(folder, threads, quantised, original_code)
        call = partial(measure, sides, original_python, batch_tokens, batches)
        results = measuring.in_turns(call, list(sides), lengths, repeats, seconds)
        check(results)
    sections = [
        f"JinaBERT, {heads} heads x {head_dim}, {sizes['layers']} layers, feed-forward layers of "
        f"{sizes['inner']}, float32, not scaled, {threads} CPU thread(s). *x* compares with the first line. "
        "*Difference*: of the vectors, relative to the largest number in those of the first line."
    ]
    for length, cells in results.items():
        rows = max(1, batch_tokens // length)
        counts = [len(text) for text in make_texts(length, batches * rows)]
        empty = [padding(some, rows) for some in (counts, sorted(counts, reverse=True))]
        head = [f"up to {length} tokens", "texts/s", "x", "extra MB", "x", "peak MB", "difference"]
        sections.append(
            f"{len(counts)} texts in batches of {rows}; {empty[0]:.0%} padding, sorted {empty[1]:.0%}; "
            f"{len(cells[CONVERTED].prompt.seconds)} turn(s):\n\n"
            + report.table(head, rows_of(cells, len(counts)))
        )
    title = "A converted encoder beside others"
    report.finish("encoder_speed-cpu", title, sections, before, PACKAGES, write=write)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        found = asdict(measure_job(Job(**json.loads(sys.argv[2]))))
        print(f"\n{json.dumps(found, default=np.ndarray.tolist)}", flush=True)
    else:
        main()
