"""Measures the memory of `ntk-convert fit` on a model of BLOOM-1b7's sizes, beside what it states.

    python benchmarks/fit_size.py --write
    python benchmarks/fit_size.py --layers 2 --length 1024     # a minute

The weights are random, so the slopes that it finds mean nothing. The text is the standard library's Python
code, one token for each byte. Peaks are sampled (RssAnon).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click
import report
import torch
from conversion import SAMPLING, memory
from safetensors.torch import save_file
from size import Layout

sys.path.append(str(report.ROOT / "examples"))
from text_task import build_tokenizer, read_corpus

BLOOM_1B7 = Layout(hidden=2048, heads=16, layers=24, vocabulary=250880)
WINDOWS = 16
"""The fewest that `fit` takes: to learn from, to stop by and to judge by."""
STATED = re.compile(r"about ([\d.]+) (.B) for the weights and ([\d.]+) (.B) for a step")
UNITS = {"MB": 1e6, "GB": 1e9}


def write_model(folder: Path, layout: Layout) -> None:
    """Writes a checkpoint with random weights, and its tokenizer."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for shapes in layout.files:
        for name, shape in shapes.items():
            centre = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
            tensors[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(
                centre, 0.02, generator=generator
            )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(layout.config))
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def run(command: list[str], cwd: Path) -> tuple[str, float, int]:
    """Runs a command; what it printed, its seconds, and the peak of its anonymous memory in bytes."""
    started, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(command, cwd=cwd, stdout=printed, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, memory(process.pid)[1])
            time.sleep(SAMPLING)
        seconds = time.perf_counter() - started
        printed.seek(0)
        return printed.read().decode(), seconds, peak


@click.command(help=__doc__)
@click.option("--length", default=8192, show_default=True, help="Target length in tokens.")
@click.option("--layers", default=BLOOM_1B7.layers, show_default=True)
@click.option("--steps", default=2, show_default=True)
@click.option("--dtype", default="bf16", show_default=True)
@click.option("--write", is_flag=True, help="Write results/fit_size.md.")
def main(length: int, layers: int, steps: int, dtype: str, write: bool) -> None:
    load_before = report.load()
    with tempfile.TemporaryDirectory(prefix="ntk-convert-") as name:
        folder = Path(name)
        write_model(folder / "model", replace(BLOOM_1B7, layers=layers))
        text = read_corpus().training[: WINDOWS * length]
        (folder / "text.txt").write_text(text, encoding="utf-8", newline="\n")
        command = [sys.executable, "-m", "converter", "fit", "model", "--target-length", str(length)]
        command += ["--text", "text.txt", "--train-length", "2048", "--steps", str(steps), "--minutes", "600"]
        command += ["--dtype", dtype, "--device", "cpu", "--out", "out"]
        printed, seconds, peak = run(command, folder)
    found = STATED.search(printed)
    judged = "checked slopes" in printed or "no fitted slopes are better" in printed
    if found is None or not judged:
        raise click.ClickException(f"fit did not come to a verdict:\n{printed}")
    weights, step = float(found[1]) * UNITS[found[2]], float(found[3]) * UNITS[found[4]]
    head = ["", "GB"]
    rows = [
        ["weights, stated", f"{weights / 1e9:.1f}"],
        ["a step, stated", f"{step / 1e9:.1f}"],
        ["weights and a step, stated", f"{(weights + step) / 1e9:.1f}"],
        ["the whole process without the weights, which are mapped; peak measured", f"{peak / 1e9:.1f}"],
    ]
    sections = [
        f"BLOOM's layout with {layers} layers of {BLOOM_1B7.hidden} channels, {BLOOM_1B7.heads} heads and a "
        f"vocabulary of {BLOOM_1B7.vocabulary}, {dtype}, on the CPU: `fit --target-length {length}` with "
        f"{steps} steps and {WINDOWS} windows took {seconds:.0f} s in all, verdict and conversion included.",
        report.table(head, rows),
    ]
    if write:
        click.echo(report.write("fit_size", "Memory of a fit", sections, load_before))
    else:
        click.echo("\n\n".join(sections))


if __name__ == "__main__":
    main()
