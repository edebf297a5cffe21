"""Compares time and memory of conversions of 3 GB, 30 GB and 350 GB.

    python benchmarks/size.py
    python benchmarks/size.py --layouts 3GB --repeats 1      # a minute or two

All checkpoints have BLOOM's layout; the largest has the sizes of BLOOM-176B in its 72 files. The files have
their full size and realistic headers, but data is written only for the tensors that verification runs (the
first layer, the norms, some rows of the embeddings), with random values. The rest are holes, which take no
space on the disk. The file system must support files with holes.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import report
import torch
from conversion import watch

ROW_STEP = 48
"""Verification runs this many tokens, spread over the vocabulary."""
CLI = [sys.executable, "-m", "converter"]
CONVERT = [*CLI, "{source}", "--scale", "2", "--out", "{out}", "-q"]
COMMANDS = {
    "`inspect`": [*CLI, "inspect", "{source}"],
    "`--dry-run`": [*CONVERT, "--dry-run"],
    "`--hard-link --no-verify`": [*CONVERT, "--hard-link", "--no-verify"],
    "`--hard-link`": [*CONVERT, "--hard-link"],
    "copy, `--no-verify`": [*CONVERT, "--no-verify"],
    "copy": CONVERT,
    "`--dtype fp16 --no-verify`": [*CONVERT, "--dtype", "fp16", "--no-verify"],
}


COPIES = ("copy, `--no-verify`", "copy", "`--dtype fp16 --no-verify`")
"""Commands left out if the disk has too little space. A conversion checks for it even if files have holes."""


@dataclass(frozen=True)
class Layout:
    """The sizes of a BLOOM in bfloat16. The embeddings, each layer and the last norm have a file each."""

    hidden: int
    heads: int
    layers: int
    vocabulary: int

    def norm(self, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (self.hidden,)
        yield f"{name}.bias", (self.hidden,)

    def layer(self, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        at, wide = f"transformer.h.{number}", 4 * self.hidden
        yield from self.norm(f"{at}.input_layernorm")
        yield from self.norm(f"{at}.post_attention_layernorm")
        matrices = {
            "self_attention.query_key_value": (3 * self.hidden, self.hidden),
            "self_attention.dense": (self.hidden, self.hidden),
            "mlp.dense_h_to_4h": (wide, self.hidden),
            "mlp.dense_4h_to_h": (self.hidden, wide),
        }
        for name, shape in matrices.items():
            yield f"{at}.{name}.weight", shape
            yield f"{at}.{name}.bias", shape[:1]

    @property
    def files(self) -> list[dict[str, tuple[int, ...]]]:
        """For each file: name of a tensor -> shape."""
        embeddings = {"transformer.word_embeddings.weight": (self.vocabulary, self.hidden)}
        return [
            {**embeddings, **dict(self.norm("transformer.word_embeddings_layernorm"))},
            *(dict(self.layer(number)) for number in range(self.layers)),
            dict(self.norm("transformer.ln_f")),
        ]

    @property
    def config(self) -> dict[str, object]:
        return {
            "architectures": ["BloomForCausalLM"],
            "model_type": "bloom",
            "hidden_size": self.hidden,
            "n_head": self.heads,
            "n_layer": self.layers,
            "vocab_size": self.vocabulary,
            "seq_length": 2048,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 3,
        }


LAYOUTS = {
    "3GB": Layout(2048, 16, 28, 32768),
    "30GB": Layout(4096, 32, 70, 250880),
    "350GB": Layout(14336, 112, 70, 250880),
}


def write_layout(folder: Path, layout: Layout) -> None:
    """Writes the checkpoint: headers, the tensors that verification runs, and holes."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    # The values repeat after a prime number of them, so no two rows of a matrix are the same.
    values = torch.empty(7_999_993, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
    files = layout.files
    weight_map = {}
    for number, shapes in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= dict.fromkeys(shapes, name)
        offsets, end = {}, 0
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for tensor, shape in shapes.items():
            offsets[tensor], start = end, end
            end += 2 * torch.Size(shape).numel()
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            data = file.tell()
            file.truncate(data + end)
            for tensor, shape in shapes.items():
                if number not in (1, 2, len(files)):
                    continue
                file.seek(data + offsets[tensor])
                if shape == (layout.vocabulary, layout.hidden):
                    for row in range(0, layout.vocabulary, layout.vocabulary // ROW_STEP):
                        file.seek(data + offsets[tensor] + 2 * row * layout.hidden)
                        file.write(as_bytes(values[row : row + layout.hidden]))
                    continue
                centre = 1.0 if len(shape) == 1 and tensor.endswith("weight") else 0.0
                left = torch.Size(shape).numel()
                while left:
                    block = values[:left] + centre
                    file.write(as_bytes(block))
                    left -= len(block)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(layout.config, indent=2))


def as_bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class Cost:
    """Cost of one run and its child processes: seconds, and peaks of memory in bytes."""

    seconds: float
    resident: int
    anonymous: int


def measure(name: str, layout: Layout, folder: Path, repeats: int) -> tuple[str, dict[str, Cost]]:
    """A description of the layout; and for every command, the fastest time and the largest peaks."""
    source, out = folder / "source", folder / "out"
    write_layout(source, layout)
    weights = sorted(source.glob("*.safetensors"))
    total = sum(path.stat().st_size for path in weights)
    largest = max(path.stat().st_size for path in weights)
    parameters = total / 2e9
    words = (
        f"**{name}**: {total / 1e9:.1f} GB in {len(weights)} files, the largest {largest / 1e9:.2f} GB; "
        f"{parameters:.1f} billion parameters, {layout.layers} layers of {layout.hidden} channels and "
        f"{layout.heads} heads"
    )
    costs = {}
    for title, command in COMMANDS.items():
        if title in COPIES and shutil.disk_usage(folder).free < 1.1 * total:
            continue
        runs = []
        for _ in range(repeats):
            runs.append(Cost(*watch(command, source, out)))
            if out.exists():
                if "--dtype" not in command:
                    check_result(source, out)
                shutil.rmtree(out)
        costs[title] = Cost(
            min(one.seconds for one in runs),
            max(one.resident for one in runs),
            max(one.anonymous for one in runs),
        )
        click.echo(f"{name}: {title}: {costs[title]}", err=True)
    shutil.rmtree(source)
    return words, costs


def check_result(source: Path, out: Path) -> None:
    """Checks that every file exists with its size, and that the last one has the same bytes."""
    names = sorted(path.name for path in source.glob("*.safetensors"))
    for name in names:
        if (out / name).stat().st_size != (source / name).stat().st_size:
            raise click.ClickException(f"{name} differs from the source in size")
    if (out / names[-1]).read_bytes() != (source / names[-1]).read_bytes():
        raise click.ClickException(f"{names[-1]} differs from the source")


@click.command()
@click.option("--layouts", default=",".join(LAYOUTS), show_default=True, help="Layouts to measure.")
@click.option("--repeats", default=2, show_default=True, help="Runs of each command.")
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="Folder for temporary files.")
@click.option("--write", is_flag=True, help="Write the tables to benchmarks/results/.")
def main(layouts: str, repeats: int, folder: Path | None, write: bool) -> None:
    """Runs the same commands on checkpoints of very different sizes."""
    report.clean_up_when_terminated()
    load_before = report.load()
    found = {}
    with tempfile.TemporaryDirectory(prefix="ntk-benchmark-", dir=folder) as temporary:
        for name in layouts.split(","):
            place = Path(temporary, name)
            place.mkdir()
            found[name] = measure(name, LAYOUTS[name], place, repeats)
    sections = [f"* {words}" for words, _ in found.values()]
    rows = []
    for title in COMMANDS:
        row = [title]
        for key, unit in (("seconds", 1.0), ("resident", 1e6), ("anonymous", 1e6)):
            for _, costs in found.values():
                value = getattr(costs[title], key) / unit if title in costs else None
                row.append("-" if value is None else f"{value:.1f}" if key == "seconds" else f"{value:.0f}")
        rows.append(row)
    head = ["command"]
    for unit in ("seconds", "peak resident MB", "peak anonymous MB"):
        head += [f"{unit}, {name}" for name in found]
    text = [
        "\n".join(sections),
        f"Fastest of {repeats} runs of each command, the largest peaks of all:",
        report.table(head, rows),
    ]
    click.echo("\n" + "\n\n".join(text))
    if write:
        path = report.write("size", "Conversion of 350 GB beside 3 GB", text, load_before)
        click.echo(f"wrote results/{path.name}", err=True)


if __name__ == "__main__":
    main()
