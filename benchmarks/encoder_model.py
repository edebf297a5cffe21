"""Compares a converted encoder, in torch and as a graph, with the same model computing the whole bias.

    python benchmarks/encoder_model.py --write

The model is a JinaBERT with the base model's width, random weights and few layers. *Whole bias* is what the
original code of these models and its exports compute: explicit attention weights, with a bias of [heads,
length, length]. Here it is the converted model's own eager attention, in torch and exported by torch.onnx.
Each measurement runs in a separate process on one thread.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import report
import torch
from encoder_attention import proc

HEADS, WIDTH, INNER, VOCABULARY = 12, 768, 3072, 30528
PEER = "whole_bias.onnx"


class Measured(NamedTuple):
    seconds: float
    extra: int
    """Bytes at the peak beyond those of the loaded model."""
    output: np.ndarray
    """Hidden states of some tokens, float32 [tokens, hidden]."""


def prepare(folder: Path, layers: int) -> None:
    """Writes and converts the checkpoint, and writes both graphs; call it in a fresh process."""
    from converter import OnnxOptions, convert, export
    from tests import tiny

    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers}
    sizes |= {"vocab_size": VOCABULARY}
    source = tiny.ENCODERS["jina_bert"](folder / "source", HEADS, head="Model", **sizes)
    convert(source, folder / "model", scale=4, verify=False)
    export(folder / "model", OnnxOptions(validate=False))
    model = load(folder, "eager")
    ids = torch.ones(2, 64, dtype=torch.long)
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
            return hidden

    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    program = torch.onnx.export(
        Hidden().eval(),
        kwargs=inputs,
        dynamic_shapes=dict.fromkeys(inputs, dynamic),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.save(folder / PEER)


def load(folder: Path, attention: str) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(
        folder / "model", trust_remote_code=True, attn_implementation=attention
    ).eval()


def in_torch(attention: str) -> Callable[[Path], Callable[[np.ndarray], np.ndarray]]:
    def opened(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
        model = load(folder, attention)

        def run(ids: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                hidden: np.ndarray = model(torch.from_numpy(ids)).last_hidden_state.numpy()
            return hidden

        return run

    return opened


def in_onnxruntime(name: str) -> Callable[[Path], Callable[[np.ndarray], np.ndarray]]:
    def opened(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
        import onnxruntime

        from converter.exports.onnx.session_options import session_options

        options = session_options()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(folder / name, options, ["CPUExecutionProvider"])
        named = {value.name for value in session.get_inputs()}

        def run(ids: np.ndarray) -> np.ndarray:
            feed = {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "token_type_ids": np.zeros_like(ids),
            }
            hidden: np.ndarray = session.run(None, {name: feed[name] for name in named})[0]
            return hidden

        return run

    return opened


WAYS = {
    "torch, whole bias": in_torch("eager"),
    "torch, converted": in_torch("sdpa"),
    "onnxruntime, whole bias": in_onnxruntime(PEER),
    "onnxruntime, exported": in_onnxruntime("model/model.onnx"),
}


def measure(folder: Path, way: str, length: int) -> Measured:
    """Measures one way at one length, twice; call it in a fresh process."""
    torch.set_num_threads(1)
    run = WAYS[way](folder)
    ids = np.random.default_rng(0).integers(4, VOCABULARY, size=(1, length))
    run(ids[:, :64])
    before = proc("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    times = []
    for _ in range(2):
        start = time.perf_counter()
        hidden = run(ids)
        times.append(time.perf_counter() - start)
    kept = np.linspace(0, length - 1, 64).astype(int)
    return Measured(min(times), proc("VmHWM") - before, hidden[0, kept].astype(np.float32))


def fresh(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@click.command(help=__doc__)
@click.option("--lengths", default="512,2048,8192", show_default=True, help="Tokens.")
@click.option("--layers", default=2, show_default=True)
@click.option("--write", is_flag=True, help="Write results/encoder_model-cpu.md.")
def main(lengths: str, layers: int, write: bool) -> None:
    load_before = report.load()
    rows = []
    with tempfile.TemporaryDirectory(prefix="ntk-convert-") as name:
        folder = Path(name)
        fresh(prepare, folder, layers)
        for length in map(int, lengths.split(",")):
            first: Measured | None = None
            for way in WAYS:
                cell: Measured = fresh(measure, folder, way, length)
                first = first or cell
                error = np.abs(cell.output - first.output).max() / np.abs(first.output).max()
                peer = way.replace("converted", "whole bias").replace("exported", "whole bias")
                rows.append((length, way, peer, cell, error))
                click.echo(f"{length} {way}: {cell.seconds:.2f} s, {cell.extra >> 20} MiB", err=True)
    cells = {(length, way): cell for length, way, _, cell, _ in rows}
    table = [
        [
            f"{length}: {way}",
            f"{cell.seconds:.2f}",
            f"{cells[length, peer].seconds / cell.seconds:.2f}",
            f"{cell.extra / 2**20:.0f}",
            f"{cells[length, peer].extra / max(cell.extra, 1):.1f}",
            f"{error:.0e}",
        ]
        for length, way, peer, cell, error in rows
    ]
    head = ["tokens: model", "seconds", "whole bias / this", "extra MiB", "whole bias / this", "difference"]
    sections = [
        f"JinaBERT, {HEADS} heads x {WIDTH // HEADS}, {layers} layers, float32, one row, one thread, ntk "
        "scaling by 4. *Difference* is the largest relative difference to the first way at the same length.",
        report.table(head, table),
    ]
    if write:
        click.echo(
            report.write("encoder_model-cpu", "A bidirectional encoder at length", sections, load_before)
        )
    else:
        click.echo("\n\n".join(sections))


if __name__ == "__main__":
    main()
