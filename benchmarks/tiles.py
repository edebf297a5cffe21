"""How many keys trained models look at when their attention is computed in tiles, and what that saves.

    python benchmarks/tiles.py --models .evidence --text .evidence/held-out.txt --write

Which keys can be left out depends on the queries and keys at hand (see ``far_keys`` in
templates/ntk_alibi.py), so random weights say little about it. Each folder in ``--models`` that holds a
checkpoint of an ALiBi model is converted with ``--method none`` and reads the beginning of the text on one
thread, with tiles and without them. ``make evidence`` trains such models.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click
import report
import torch

FILES = ("ntk_attention", "ntk_symmetric")
"""Templates that ask for tiles."""
REPEATS = 3
HEAD = ["model, tokens", "keys looked at, by layer", "whole ms", "tiles ms", "whole / tiles", "difference"]
INTRO = """\
*Keys looked at* is their share of all pairs of a query and a key that it may see, over all heads. *Whole*
computes them all. Times are of the whole model without a head, the fastest of {repeats} runs, float32, one
row, one CPU thread. *Difference* is the largest of a hidden state, relative to the largest hidden state."""


def load(source: Path, folder: Path) -> tuple[Any, Any]:
    """The converted model without its head, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    from converter import convert

    convert(source, folder, method="none", verify=False)
    model = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@contextmanager
def tiles(model: Any, shares: list[float] | None) -> Iterator[None]:
    """Adds the share of keys of each layer to ``shares``; with None, the layers look at all keys."""
    package = type(model).__module__.rpartition(".")[0]
    [module] = [sys.modules[name] for file in FILES if (name := f"{package}.{file}") in sys.modules]
    find = module.needed_tiles

    def found(query: torch.Tensor, *args: Any, causal: bool) -> Any:
        result = None if shares is None else find(query, *args, causal=causal)
        if shares is not None:
            shares.append(1.0 if result is None else looked_at(result, *query.shape[1:3], causal))
        return result

    with mock.patch.object(module, "needed_tiles", found):
        yield


def looked_at(tiles: Sequence[Any], heads: int, length: int, causal: bool) -> float:
    """The share of pairs that tiles compute, 0 to 1."""
    seen = 0
    for tile in tiles:
        many, queries, keys = (part.stop - part.start for part in tile)
        later = queries * (queries - 1) // 2 if causal else 0
        seen += many * (queries * keys - later)
    everything = length * (length + 1) // 2 if causal else length**2
    return seen / heads / everything


@torch.inference_mode()
def measure(name: str, model: Any, ids: torch.Tensor) -> list[str]:
    """A row of the table."""
    shares: list[float] = []
    states, times = [], []
    for kept in (None, shares):
        best = float("inf")
        for _ in range(REPEATS):
            shares.clear()
            with tiles(model, kept):
                start = time.perf_counter()
                hidden = model(ids).last_hidden_state
                best = min(best, time.perf_counter() - start)
        states.append(hidden)
        times.append(1000 * best)
    whole, tiled = states
    return [
        f"{name}, {ids.shape[1]}",
        " ".join(f"{100 * share:.0f}%" for share in shares),
        *(f"{each:.0f}" for each in times),
        f"{times[0] / times[1]:.2f}x",
        f"{((tiled - whole).abs().max() / whole.abs().max()).item():.0e}",
    ]


@click.command(help=__doc__)
@click.option("--models", type=Path, multiple=True, required=True, help="A folder of checkpoints.")
@click.option("--text", type=Path, required=True, help="UTF-8 text.")
@click.option("--lengths", default="2048,4096,8192", show_default=True, help="Tokens.")
@click.option("--write", is_flag=True, help="Write results/tiles-cpu.md.")
def main(models: Sequence[Path], text: Path, lengths: str, write: bool) -> None:
    from converter.errors import ConverterError
    from converter.texts.windows import read_windows

    before = report.load()
    torch.set_num_threads(1)
    sizes = [int(length) for length in lengths.split(",")]
    rows = []
    sources = sorted(file.parent for folder in models for file in folder.glob("*/config.json"))
    with tempfile.TemporaryDirectory(prefix="ntk-convert-") as name:
        for source in sources:
            try:
                model, tokenizer = load(source, Path(name) / source.name)
                [window] = read_windows(tokenizer, [text], max(sizes), 1)
            except ConverterError as error:
                click.echo(f"{source.name} left out: {error}", err=True)
                continue
            for length in sizes:
                rows.append(measure(source.name, model, torch.from_numpy(window[None, :length])))
                click.echo(" | ".join(rows[-1]), err=True)
    sections = [INTRO.format(repeats=REPEATS), report.table(HEAD, rows, texts=2)]
    if write:
        click.echo(report.write("tiles-cpu", "Attention in tiles in trained models", sections, before))
    else:
        click.echo("\n\n".join(sections))


if __name__ == "__main__":
    main()
