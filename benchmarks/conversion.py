"""Compares time and memory of a conversion with ``cp -r``, and with load and save in transformers.

    python benchmarks/conversion.py
    python benchmarks/conversion.py --gigabytes 1 --bin-gigabytes 0.5 --repeats 3

The checkpoint is a BLOOM of the requested size with random bfloat16 weights, so a conversion verifies it like
a real one. All commands run as users run them, each in a new process.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import report
import torch
from safetensors.torch import save_file

Format = Literal["safetensors", "bin"]

HIDDEN, HEADS, VOCABULARY = 2048, 16, 32768
SAMPLING = 0.005
"""Seconds between two samples of a process's memory."""
CONVERT = [sys.executable, "-m", "converter", "{source}", "--scale", "2", "--out", "{out}", "-q"]
TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").save_pretrained(sys.argv[2])
"""
COMMANDS = {
    "cp -r": ["cp", "-r", "{source}", "{out}"],
    "ntk-convert": CONVERT,
    "ntk-convert --no-verify": [*CONVERT, "--no-verify"],
    "transformers load + save": [sys.executable, "-c", TRANSFORMERS, "{source}", "{out}"],
}
BASELINES: dict[Format, str] = {"safetensors": "cp -r", "bin": "transformers load + save"}


@dataclass(frozen=True)
class Run:
    """One run of a command; memory is in bytes, and 0 if there is no /proc."""

    returned: float
    """Seconds until the process ended."""
    stored: float
    """Seconds until everything it wrote was also on the disk."""
    resident: int
    """Peak of all its pages in memory (VmHWM), including those of mapped files and its workers."""
    anonymous: int
    """Peak of the memory that it allocated (RssAnon, sampled), without mapped files."""


def layer_shapes(layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors in one BLOOM layer."""
    matrices = {
        "self_attention.query_key_value": (3 * HIDDEN, HIDDEN),
        "self_attention.dense": (HIDDEN, HIDDEN),
        "mlp.dense_h_to_4h": (4 * HIDDEN, HIDDEN),
        "mlp.dense_4h_to_h": (HIDDEN, 4 * HIDDEN),
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield from norm_shapes(f"transformer.h.{layer}.{name}")
    for name, shape in matrices.items():
        yield f"transformer.h.{layer}.{name}.weight", shape
        yield f"transformer.h.{layer}.{name}.bias", shape[:1]


def norm_shapes(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (HIDDEN,)
    yield f"{name}.bias", (HIDDEN,)


def write_checkpoint(folder: Path, gigabytes: float, shards: int, fmt: Format) -> int:
    """Writes a sharded BLOOM of about ``gigabytes``; returns the bytes of the largest shard."""
    layer_bytes = 2 * sum(torch.Size(shape).numel() for _, shape in layer_shapes(0))
    layers = max(1, round((gigabytes * 1e9 - 2 * VOCABULARY * HIDDEN) / layer_bytes))
    shapes = [("transformer.word_embeddings.weight", (VOCABULARY, HIDDEN))]
    shapes += norm_shapes("transformer.word_embeddings_layernorm")
    for layer in range(layers):
        shapes += layer_shapes(layer)
    shapes += norm_shapes("transformer.ln_f")
    config = {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": HIDDEN,
        "n_head": HEADS,
        "n_layer": layers,
        "vocab_size": VOCABULARY,
        "seq_length": 2048,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2))

    stem, suffix = ("model", "safetensors") if fmt == "safetensors" else ("pytorch_model", "bin")
    total = 2 * sum(torch.Size(shape).numel() for _, shape in shapes)
    limit = total / shards
    weight_map, largest, done = {}, 0, 0
    for number in range(1, shards + 1):
        file = f"{stem}-{number:05}-of-{shards:05}.{suffix}"
        tensors: dict[str, torch.Tensor] = {}
        while shapes and (done < number * limit or number == shards):
            name, shape = shapes.pop(0)
            tensors[name] = random_tensor(name, shape)
            done += tensors[name].nbytes
        if fmt == "safetensors":
            save_file(tensors, folder / file, metadata={"format": "pt"})
        else:
            torch.save(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
        largest = max(largest, (folder / file).stat().st_size)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index, indent=2))
    return largest


def random_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A random bfloat16 tensor; the weights of norms are near one, everything else near zero."""
    centre = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
    return torch.empty(shape, dtype=torch.bfloat16).normal_(centre, 0.02)


def run(words: Sequence[str], source: Path, out: Path) -> Run:
    """Runs a command with the source in the page cache, and waits until its output is on the disk.

    Raises:
        ClickException: the command failed.
    """
    for path in source.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(8 << 20):
                pass
    started = time.perf_counter()
    returned, resident, anonymous = watch(words, source, out)
    flush(out)
    return Run(returned, time.perf_counter() - started, resident, anonymous)


def watch(words: Sequence[str], source: Path, out: Path) -> tuple[float, int, int]:
    """Runs a command; returns its seconds, and its peaks of resident and anonymous memory in bytes.

    Raises:
        ClickException: the command failed.
    """
    command = [word.format(source=source, out=out) if "{" in word else word for word in words]
    environment = {**os.environ, "PYTHONPATH": str(report.ROOT), "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    resident = anonymous = 0
    while process.poll() is None:
        peak, own = memory(process.pid)
        resident, anonymous = max(resident, peak), max(anonymous, own)
        time.sleep(SAMPLING)
    seconds = time.perf_counter() - started
    if process.returncode:
        assert process.stderr is not None
        raise click.ClickException(f"{command} failed: {process.stderr.read().decode()[-2000:]}")
    return seconds, resident, anonymous


def memory(pid: int) -> tuple[int, int]:
    """VmHWM and RssAnon of a process and its descendants, in bytes.

    ``ru_maxrss`` is of no use: a child starts with its parent's value, and this parent has made tensors.
    """
    found = {"VmHWM:": 0, "RssAnon:": 0}
    for one in family(pid):
        with suppress(OSError):
            for line in Path(f"/proc/{one}/status").read_text().splitlines():
                key, _, rest = line.partition("\t")
                if key in found:
                    found[key] += int(rest.split()[0]) << 10
    return found["VmHWM:"], found["RssAnon:"]


def family(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                yield from family(int(child))


def flush(folder: Path) -> None:
    """Waits until every file of a folder is on the disk."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def compare(folder: Path, gigabytes: float, shards: int, fmt: Format, repeats: int) -> str:
    """Runs the baseline and the conversions in turn; returns a Markdown section."""
    names = [BASELINES[fmt], "ntk-convert", "ntk-convert --no-verify"]
    source = folder / "source"
    largest = write_checkpoint(source, gigabytes, shards, fmt)
    flush(source)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            out = folder / "out"
            result = run(COMMANDS[name], source, out)
            shutil.rmtree(out)
            runs[name].append(result)
            click.echo(f"{fmt}: {name}: {result.returned:.2f} s, on disk {result.stored:.2f} s", err=True)
    total = sum(path.stat().st_size for path in source.iterdir())
    shutil.rmtree(source)

    rows = []
    baseline = [median(runs[names[0]], key) for key in ("returned", "stored")]
    for name in names:
        both = [median(runs[name], key) for key in ("returned", "stored")]
        row = [f"`{name}`" if name != BASELINES["bin"] else name]
        for seconds, reference in zip(both, baseline, strict=True):
            row += [f"{seconds:.2f}", f"{seconds / reference:.2f}x"]
        peaks = [max(getattr(one, key) for one in runs[name]) for key in ("resident", "anonymous")]
        rows.append([*row, *(f"{peak / 1e6:.0f}" if name != "cp -r" else "-" for peak in peaks)])
    head = ["command", "s, returned", "ratio", "s, on disk", "ratio", "peak resident MB", "peak anonymous MB"]
    return (
        f"`.{fmt}`: {total / 1e9:.2f} GB in {shards} files, the largest {largest / 1e6:.0f} MB. Times are "
        f"medians of {repeats} runs in turn, ratios are to the first line, peaks are the largest of all "
        "runs:\n\n" + report.table(head, rows)
    )


def median(runs: Sequence[Run], key: str) -> float:
    return statistics.median(getattr(one, key) for one in runs)


@click.command()
@click.option("--gigabytes", default=3.0, show_default=True, help="Size of the safetensors; 0 skips them.")
@click.option("--bin-gigabytes", default=1.5, show_default=True, help="Size of the .bin files; 0 skips them.")
@click.option("--shards", default=3, show_default=True, help="Files in each checkpoint.")
@click.option("--repeats", default=5, show_default=True, help="Runs of each command.")
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="Folder for temporary files.")
@click.option("--write", is_flag=True, help="Write the tables to benchmarks/results/.")
def main(
    gigabytes: float, bin_gigabytes: float, shards: int, repeats: int, folder: Path | None, write: bool
) -> None:
    """Compares conversion with ``cp -r`` (safetensors), and with transformers' load and save (.bin)."""
    report.clean_up_when_terminated()
    load_before = report.load()
    sections = []
    with tempfile.TemporaryDirectory(prefix="ntk-benchmark-", dir=folder) as temporary:
        sizes: dict[Format, float] = {"safetensors": gigabytes, "bin": bin_gigabytes}
        for fmt, size in sizes.items():
            if size:
                sections.append(compare(Path(temporary), size, shards, fmt, repeats))
    click.echo("\n" + "\n\n".join(sections))
    if write:
        path = report.write("conversion", "Conversion: time and memory", sections, load_before)
        click.echo(f"wrote results/{path.name}", err=True)


if __name__ == "__main__":
    main()
