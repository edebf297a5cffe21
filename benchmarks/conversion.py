"""What a conversion takes, beside copying, for models of all sizes; and the memory of ``ntk-convert fit``.

    python benchmarks/conversion.py copy        # beside cp -r
    python benchmarks/conversion.py size        # 350 GB beside 3 GB
    python benchmarks/conversion.py fit         # memory of a fit of BLOOM-1b7's sizes, beside what it states

Checkpoints have BLOOM's layout and random bfloat16 weights, so a conversion verifies them like real ones. All
commands run as users run them, each in a new process.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import click
import measuring
import report
import torch

SAMPLING = 0.005
"""Seconds between two samples of a process's memory."""
CLI = [sys.executable, "-m", "converter"]
CONVERT = [*CLI, "{source}", "--scale", "2", "--out", "{out}", "-q"]
COPYING = {
    "`cp -r`": ["cp", "-r", "{source}", "{out}"],
    "`ntk-convert`": CONVERT,
    "`ntk-convert --no-verify`": [*CONVERT, "--no-verify"],
}
"""The first is the base of the ratios."""
SIZES = {
    "`inspect`": [*CLI, "inspect", "{source}"],
    "`--dry-run`": [*CONVERT, "--dry-run"],
    "`--hard-link --no-verify`": [*CONVERT, "--hard-link", "--no-verify"],
    "`--hard-link`": [*CONVERT, "--hard-link"],
    "copy, `--no-verify`": [*CONVERT, "--no-verify"],
    "copy": CONVERT,
    "`--dtype fp16 --no-verify`": [*CONVERT, "--dtype", "fp16", "--no-verify"],
}
COPIES = ("copy, `--no-verify`", "copy", "`--dtype fp16 --no-verify`")
"""Left out if the disk has too little space. A conversion checks for it even if files have holes."""
ROW_STEP = 48
"""Verification runs this many tokens, spread over the vocabulary."""
WINDOWS = 16
"""The fewest that ``fit`` takes: to learn from, to stop by and to judge by."""
STATED = re.compile(r"about (.+) for the weights and (.+) for a step")

LAYOUTS = {
    "tiny": {"hidden_size": 64, "n_head": 4, "n_layer": 2, "vocab_size": 512},
    "3GB": {"hidden_size": 2048, "n_head": 16, "n_layer": 28, "vocab_size": 32768},
    "30GB": {"hidden_size": 4096, "n_head": 32, "n_layer": 70, "vocab_size": 250880},
    "350GB": {"hidden_size": 14336, "n_head": 112, "n_layer": 70, "vocab_size": 250880},
    "1b7": {"hidden_size": 2048, "n_head": 16, "n_layer": 24, "vocab_size": 250880},
}
"""The sizes of BLOOMs, with the keys of their config; the last are those of BLOOM-1b7."""


def write_checkpoint(folder: Path, layout: Mapping[str, int], *, holes: bool) -> None:
    """Writes a BLOOM in bfloat16, in files of the full size with random weights.

    With ``holes``, only what verification runs is data: the first layer, the norms outside of layers, and
    some rows of the embeddings.
    """
    from transformers import BloomConfig, BloomForCausalLM

    folder.mkdir()
    config = BloomConfig(**layout, seq_length=2048, bos_token_id=1, eos_token_id=2, pad_token_id=3)
    more = {"architectures": ["BloomForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | more))
    with torch.device("meta"):
        shapes_of = [(name, [*each.shape]) for name, each in BloomForCausalLM(config).named_parameters()]
    # A file for the embeddings, for each layer, and for the last norm.
    parts = [dict(part) for _, part in groupby(shapes_of, lambda each: re.findall(r"\.h\.\d+", each[0]))]
    # The values repeat after a prime number of them, so no two rows of a matrix are the same.
    generator = torch.Generator().manual_seed(0)
    values = torch.empty(7_999_993, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(parts, start=1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        weight_map |= dict.fromkeys(shapes, name)
        offsets, end = {}, 0
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for tensor, shape in shapes.items():
            offsets[tensor], start = end, end
            end += 2 * math.prod(shape)
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            data = file.tell()
            file.truncate(data + end)
            for tensor, shape in shapes.items() if not holes or number in (1, 2, len(parts)) else ():
                if holes and tensor.endswith("word_embeddings.weight"):
                    rows, width = shape
                    for row in range(0, rows, rows // ROW_STEP):
                        file.seek(data + offsets[tensor] + 2 * row * width)
                        file.write(as_bytes(values[row : row + width]))
                    continue
                file.seek(data + offsets[tensor])
                left = math.prod(shape)
                # The weights of norms are near one, everything else near zero.
                centre = 1.0 if len(shape) == 1 and tensor.endswith("weight") else 0.0
                while left:
                    block = values[:left] + centre
                    file.write(as_bytes(block))
                    left -= len(block)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def as_bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


class Cost(NamedTuple):
    """One run of a command and its child processes; memory is in bytes, and 0 if there is no /proc."""

    seconds: float
    resident: int
    """Peak of all pages in memory (VmHWM), including those of mapped files."""
    anonymous: int
    """Peak of what was allocated (RssAnon, sampled), without mapped files."""
    printed: str


def watch(words: Sequence[str], cwd: Path | None = None, right: str = "$^", **places: Path) -> Cost:
    """Runs a command, in whose words ``places`` are filled in.

    Args:
        right: pattern of what it prints if its failure is none.

    Raises:
        ClickException: the command failed.
    """
    command = [word.format(**places) if re.fullmatch(r"{\w+}", word) else word for word in words]
    paths = [str(report.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    resident = anonymous = 0
    with tempfile.TemporaryFile() as printed:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, cwd=cwd, stdout=printed, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            peak, own = measuring.memory_of(process.pid)
            resident, anonymous = max(resident, peak), max(anonymous, own)
            time.sleep(SAMPLING)
        seconds = time.perf_counter() - started
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    if process.returncode and not re.search(right, text):
        raise click.ClickException(f"{command} failed: {text[-2000:]}")
    return Cost(seconds, resident, anonymous, text)


def flush(folder: Path) -> None:
    """Waits until every file of a folder is on the disk."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.option("--layout", type=click.Choice(list(LAYOUTS)), default="3GB", show_default=True)
@report.numbers(repeats=5)
@report.common(layout="tiny", repeats=1)
def copy(layout: str, repeats: int, write: bool) -> None:
    """Compares conversion with ``cp -r``."""
    before = report.load()
    runs: dict[str, list[tuple[Cost, float]]] = {name: [] for name in COPYING}
    with measuring.workplace() as temporary:
        source, out = temporary / "source", temporary / "out"
        write_checkpoint(source, LAYOUTS[layout], holes=False)
        flush(source)
        sizes = [path.stat().st_size for path in source.glob("*.safetensors")]
        for _, name in measuring.turns(list(COPYING), repeats):
            for path in source.iterdir():  # into the page cache
                with path.open("rb", buffering=0) as file:
                    while file.read(8 << 20):
                        pass
            started = time.perf_counter()
            cost = watch(COPYING[name], source=source, out=out)
            flush(out)
            runs[name].append((cost, time.perf_counter() - started))
            shutil.rmtree(out)
            report.say(f"{name}: {cost.seconds:.2f} s, on disk {runs[name][-1][1]:.2f} s")
    rows, base = [], None
    for name, found in runs.items():
        returned = statistics.median(cost.seconds for cost, _ in found)
        stored = statistics.median(each for _, each in found)
        base = base or (returned, stored)
        peaks = [max(cost.resident for cost, _ in found), max(cost.anonymous for cost, _ in found)]
        row = [name, f"{returned:.2f}", report.ratio(returned, base[0])]
        row += [f"{stored:.2f}", report.ratio(stored, base[1])]
        rows.append([*row, *("-" if "cp -r" in name else f"{peak / 1e6:.0f}" for peak in peaks)])
    head = ["command", "s, returned", "ratio", "s, on disk", "ratio", "peak resident MB", "peak anonymous MB"]
    sections = [
        f"{sum(sizes) / 1e9:.2f} GB in {len(sizes)} files; medians of {repeats} runs in turn, ratios to the "
        "first line, the largest peaks:",
        report.table(head, rows),
    ]
    report.finish("conversion", "Conversion: time and memory", sections, before, write=write)


@main.command()
@click.option("--layouts", default="3GB,30GB,350GB", show_default=True, help="Layouts to measure.")
@report.numbers(repeats=2)
@report.common(layouts="tiny", repeats=1)
def size(layouts: str, repeats: int, write: bool) -> None:
    """Runs the same commands on checkpoints of very different sizes, whose files have holes."""
    before, said = report.load(), []
    found: dict[str, dict[str, Cost]] = {}
    with measuring.workplace() as temporary:
        for name in layouts.split(","):
            place = temporary / name
            place.mkdir()
            words, found[name] = measure_size(name, place, repeats)
            said.append(f"* {words}")
    rows = []
    for title in SIZES:
        row = [title]
        for key, scale, digits in (("seconds", 1.0, 1), ("resident", 1e-6, 0), ("anonymous", 1e-6, 0)):
            for costs in found.values():
                value = getattr(costs[title], key) * scale if title in costs else None
                row.append("-" if value is None else f"{value:.{digits}f}")
        rows.append(row)
    head = ["command"]
    for unit in ("seconds", "peak resident MB", "peak anonymous MB"):
        head += [f"{unit}, {name}" for name in found]
    text = f"Fastest of {repeats} runs of each command, the largest peaks of all:"
    sections = ["\n".join(said), text, report.table(head, rows)]
    report.finish("size", "Conversion of 350 GB beside 3 GB", sections, before, write=write)


def measure_size(name: str, folder: Path, repeats: int) -> tuple[str, dict[str, Cost]]:
    """A description of the layout; and for every command, the fastest time and the largest peaks."""
    source, out, layout = folder / "source", folder / "out", LAYOUTS[name]
    write_checkpoint(source, layout, holes=True)
    sizes = {path.name: path.stat().st_size for path in sorted(source.glob("*.safetensors"))}
    total = sum(sizes.values())
    costs = {}
    for title, command in SIZES.items():
        if title in COPIES and shutil.disk_usage(folder).free < 1.1 * total:
            continue
        runs = []
        for _ in range(repeats):
            runs.append(watch(command, source=source, out=out))
            shutil.rmtree(out, ignore_errors=True)
        seconds, resident, anonymous, _ = zip(*runs, strict=True)
        costs[title] = Cost(min(seconds), max(resident), max(anonymous), "")
        report.say(f"{name}: {title}: {costs[title]}")
    shutil.rmtree(source)
    words = (
        f"**{name}**: {total / 1e9:.1f} GB in {len(sizes)} files, the largest "
        f"{max(sizes.values()) / 1e9:.2f} GB; {total / 2e9:.1f} billion parameters, {layout['n_layer']} "
        f"layers of {layout['hidden_size']} channels and {layout['n_head']} heads"
    )
    return words, costs


@main.command()
@click.option("--layout", type=click.Choice(list(LAYOUTS)), default="1b7", show_default=True)
@report.numbers(length=8192, steps=2)
@report.common(layout="tiny", length=256, steps=1)
def fit(layout: str, length: int, steps: int, write: bool) -> None:
    """Measures what a fit allocates beside what it states; its slopes mean nothing here."""
    sys.path.append(str(report.ROOT / "examples"))
    from text_task import build_tokenizer, read_corpus

    before, sizes = report.load(), LAYOUTS[layout]
    with measuring.workplace() as temporary:
        model = temporary / "model"
        write_checkpoint(model, sizes, holes=False)
        build_tokenizer().save(str(model / "tokenizer.json"))
        (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        text = read_corpus().training[: WINDOWS * length]
        (temporary / "text.txt").write_text(text, encoding="utf-8", newline="\n")
        command = [*CLI, "fit", "model", "--target-length", str(length), "--text", "text.txt"]
        command += ["--train-length", str(min(2048, length // 2)), "--steps", str(steps), "--minutes", "600"]
        command += ["--dtype", "bf16", "--device", "cpu", "--out", "out"]
        cost = watch(command, temporary, right="no fitted slopes are better")
    found = STATED.search(cost.printed)
    if found is None:
        raise click.ClickException(f"fit did not state its memory:\n{cost.printed}")
    rows = [
        ["weights, stated", found[1]],
        ["a step, stated", found[2]],
        ["peak measured, without the mapped weights", f"{cost.anonymous / 1e9:.1f} GB"],
    ]
    sections = [
        f"BLOOM's layout with {sizes['n_layer']} layers of {sizes['hidden_size']} channels, "
        f"{sizes['n_head']} heads and a vocabulary of {sizes['vocab_size']}, bf16, on the CPU: `fit "
        f"--target-length {length}` with {steps} steps and {WINDOWS} windows took {cost.seconds:.0f} s.",
        report.table(["", "memory"], rows),
    ]
    report.finish("fit_size", "Memory of a fit", sections, before, write=write)


if __name__ == "__main__":
    main()
