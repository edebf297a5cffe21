"""Time and memory of converted models in torch, beside stock transformers; and what attention in tiles saves.

    python benchmarks/torch_speed.py stock
    python benchmarks/torch_speed.py stock --family falcon --dtype bfloat16
    python benchmarks/torch_speed.py tiles --models .evidence --text .evidence/held-out.txt

``stock``: the same random weights, loaded as users load them: by the class in transformers, and converted
with ``--method none``. ``tiles``: trained models read a text with attention in tiles and without it, since
which keys can be left out depends on the queries and keys at hand.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import measuring
import report
import torch
from measuring import STEPS, STOCK, WARM_UP, Measured, Setup, fresh
from report import ratio, say

PATCHED = "patched"
SIDES = (STOCK, PATCHED)
Results = dict[int, dict[str, Measured]]
"""Length -> side -> measurements."""
TILES = """\
*Keys looked at* is their share of all pairs of a query and a key that it may see, over all heads. *Whole*
computes them all. Times are of the whole model without a head, the fastest of {repeats} runs, float32, one
row, one CPU thread. *Difference* is the largest of a hidden state, relative to the largest hidden state."""


@click.group(help=__doc__)
def main() -> None:
    pass


# --- beside stock


@torch.inference_mode()
def prefill_memory(setup: Setup, side: str, length: int) -> Measured:
    """Bytes that one prompt takes on the CPU beyond the loaded model; call it in a fresh process."""
    measuring.prepare_process(setup)
    model = measuring.load(setup, side)
    for parameter in model.parameters():  # load mapped weights now, or they would count as extra
        parameter.sum()
    measuring.prefill(model, measuring.tokens(setup, WARM_UP))
    ids = measuring.tokens(setup, length)
    measured = Measured()
    before = measuring.start_peak()
    with measuring.noting_failure(measured):
        measuring.prefill(model, ids)
        measured.extra = measuring.peak() - before
    return measured


@torch.inference_mode()
def prefill_times(setup: Setup, results: Results, repeats: int, seconds: float) -> Results:
    """Adds the seconds of a prompt at each length; on a GPU, also its memory."""
    measuring.prepare_process(setup)
    models = {side: measuring.load(setup, side) for side in SIDES}
    failures: dict[str, str] = {}
    for length, cells in results.items():
        ids = measuring.tokens(setup, length)
        for side, cell in cells.items():
            cell.failure = failures.get(side) or cell.failure  # longer prompts would fail too
        # The first runs of a process set up libraries; on a GPU, each length's first run fills a memory pool.
        warm_ups = 1 if setup.device != "cpu" or length == min(results) else 0
        for turn, side in measuring.turns(SIDES, warm_ups + repeats, seconds):
            if cells[side].failure is None:
                with measuring.noting_failure(cells[side]):
                    measure_prefill(setup, models[side], ids, cells[side], keep=turn >= warm_ups)
                if failure := cells[side].failure:
                    failures[side] = failure
                    measuring.release()
        say(f"prefill {length}: " + ", ".join(f"{side} {cells[side].milliseconds} ms" for side in SIDES))
    return results


def measure_prefill(setup: Setup, model: Any, ids: torch.Tensor, measured: Measured, *, keep: bool) -> None:
    """Times one run, and adds it to ``measured`` if ``keep``."""
    before = 0
    if setup.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    taken, _ = measuring.timed(setup.device, partial(measuring.prefill, model, ids))
    if keep:
        measured.seconds.append(taken)
        if setup.device != "cpu":
            measured.extra = torch.cuda.max_memory_allocated() - before


@torch.inference_mode()
def decode_times(setup: Setup, results: Results, repeats: int) -> Results:
    """Adds the seconds per token at each cache length; the sides take turns, token by token."""
    measuring.prepare_process(setup)
    models = {side: measuring.load(setup, side) for side in SIDES}
    for length, cells in results.items():
        caches = {side: measuring.random_cache(setup, models[side], length) for side in SIDES}
        ids = measuring.tokens(setup, WARM_UP + repeats * STEPS)
        for step, side in measuring.turns(SIDES, ids.shape[1]):
            if cells[side].failure is None:
                with measuring.noting_failure(cells[side]):
                    token = ids[:, step, None]
                    call = partial(measuring.decode, models[side], token, length + step, caches[side])
                    taken, _ = measuring.timed(setup.device, call)
                    cells[side].seconds += [taken] if step >= WARM_UP else []
        del caches
        measuring.release()
        say(f"decode {length}: " + ", ".join(f"{side} {cells[side].milliseconds} ms" for side in SIDES))
    return results


@torch.inference_mode()
def float32_difference(setup: Setup, length: int) -> float:
    """Largest difference of the last logits in float32, relative to the largest logit."""
    measuring.prepare_process(setup)
    ids, logits = measuring.tokens(setup, length), []
    for side in SIDES:
        logits.append(measuring.prefill(measuring.load(setup, side, "float32"), ids).cpu())
        measuring.release()
    return measuring.difference(*logits)


def rows_of(results: Results, *, memory: bool) -> Iterator[list[str]]:
    for length, cells in results.items():
        stock, patched = (cells[side] for side in SIDES)
        row = [str(length), stock.milliseconds, patched.milliseconds, ratio(stock.median, patched.median)]
        if memory:
            row += [stock.megabytes, patched.megabytes, ratio(stock.extra, patched.extra)]
        yield [*row, str(len(patched.seconds))]


@main.command()
@click.option("--family", type=click.Choice(["bloom", "mpt", "falcon"]), default="bloom", show_default=True)
@click.option("--layers", default=6, show_default=True)
@click.option("--heads", default=16, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@report.lengths("512,2048,4096,8192", help="Tokens of the prompts.")
@report.lengths("512,4096,8192", "--cached", help="Cached tokens when decoding.")
@click.option("--threads", default=1, show_default=True, help="Threads of torch on the CPU.")
@click.option("--repeats", default=9, show_default=True, help="Turns of each side.")
@click.option("--seconds", default=120.0, show_default=True, help="Start no new turn of a length after this.")
@report.common(layers=1, heads=2, head_dim=8, lengths="16,32", cached="16", repeats=1)
def stock(
    lengths: list[int],
    cached: list[int],
    repeats: int,
    seconds: float,
    folder: Path | None,
    write: bool,
    **options: Any,
) -> None:
    """Compares converted with stock models: prefill and decoding time, and the memory of a prompt."""
    before = report.load()
    with measuring.workplace(folder, options["threads"]) as temporary:
        setup = Setup(temporary, longest=max([*lengths, *cached]) + 4096, **options)
        conversion = {"method": "none", "train_length": setup.longest}
        fresh(measuring.make_repositories, setup, {PATCHED: conversion})
        same = fresh(float32_difference, setup, lengths[0])
        prompts: Results = {length: {side: Measured() for side in SIDES} for length in lengths}
        for length, side in [(length, side) for length in lengths for side in SIDES]:
            if setup.device == "cpu":
                prompts[length][side] = measuring.measured_fresh(prefill_memory, setup, side, length)
                say(f"memory {length}: {side} {prompts[length][side].megabytes} MB")
        prompts = fresh(prefill_times, setup, prompts, repeats, seconds)
        decoding = {length: {side: Measured() for side in SIDES} for length in cached}
        decoding = fresh(decode_times, setup, decoding, repeats)
    head = ["tokens", "stock ms", "patched ms", "stock / patched"]
    memory = ["stock extra MB", "patched extra MB", "stock / patched"]
    sections = [
        f"{setup.family}, {setup.said()}; the same random weights on both sides, scaling none. In float32, "
        f"the last logits of {lengths[0]} tokens differ by {same:.1e} of the largest."
        + (" Stock Falcon rounds its bias to bfloat16." if setup.family == "falcon" else ""),
        "Prefill, one row, logits of the last token, cache kept:\n\n"
        + report.table([*head, *memory, "runs"], rows_of(prompts, memory=True)),
        "Decoding one token over a cache of this many tokens:\n\n"
        + report.table([*head, "runs"], rows_of(decoding, memory=False)),
    ]
    name = f"torch_speed-{setup.family}-{setup.device}-{setup.dtype}"
    title = f"Patched against stock torch: {setup.family}"
    report.finish(name, title, sections, before, write=write)


# --- attention in tiles


@contextlib.contextmanager
def tiles_of(model: Any, shares: list[float] | None) -> Iterator[None]:
    """Adds the share of keys of each layer to ``shares``; with None, the layers look at all keys."""
    package = type(model).__module__.rpartition(".")[0]
    code = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    users = [module for module in code if hasattr(module, "needed_tiles")]
    find = users[0].needed_tiles

    def found(query: torch.Tensor, *args: Any, causal: bool) -> Any:
        if shares is None:
            return None
        result = find(query, *args, causal=causal)
        shares.append(1.0 if result is None else looked_at(result, *query.shape[1:3], causal))
        return result

    with contextlib.ExitStack() as stack:
        for module in users:
            stack.enter_context(mock.patch.object(module, "needed_tiles", found))
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
def measure_tiles(name: str, model: Any, ids: torch.Tensor, repeats: int) -> list[str]:
    """A row of the table."""
    shares: list[float] = []
    states: dict[bool, torch.Tensor] = {}
    times: dict[bool, list[float]] = {False: [], True: []}
    for _, tiled in measuring.turns((False, True), repeats):
        shares = [] if tiled else shares
        with tiles_of(model, shares if tiled else None):
            started = time.perf_counter()
            states[tiled] = model(ids).last_hidden_state
            times[tiled].append(time.perf_counter() - started)
    whole, fewer = (min(times[tiled]) for tiled in (False, True))
    return [
        f"{name}, {ids.shape[1]}",
        " ".join(f"{100 * share:.0f}%" for share in shares),
        *(f"{1000 * each:.0f}" for each in (whole, fewer)),
        f"{whole / fewer:.2f}x",
        f"{measuring.difference(states[False], states[True]):.0e}",
    ]


@main.command()
@click.option("--models", type=Path, required=True, help="A folder of checkpoints of ALiBi models.")
@click.option("--text", type=Path, required=True, help="UTF-8 text.")
@click.option("--repeats", default=3, show_default=True, help="Turns of each model.")
@report.lengths("2048,4096,8192")
@report.common(lengths="2048", repeats=1)
def tiles(
    models: Path, text: Path, repeats: int, lengths: list[int], folder: Path | None, write: bool
) -> None:
    """Shows how many keys trained models look at, and what that saves."""
    from transformers import AutoModel, AutoTokenizer

    from converter import convert
    from converter.errors import ConverterError

    before, rows = report.load(), []
    torch.set_num_threads(1)
    words = text.read_text(encoding="utf-8")[: 100 * max(lengths)]
    with measuring.workplace(folder) as temporary:
        for source in sorted(file.parent for file in models.glob("*/config.json")):
            try:
                convert(source, temporary / source.name, method="none", verify=False)
            except ConverterError as error:
                say(f"{source.name} left out: {error}")
                continue
            options = {"trust_remote_code": True}
            model = AutoModel.from_pretrained(temporary / source.name, dtype=torch.float32, **options).eval()
            tokenizer = AutoTokenizer.from_pretrained(temporary / source.name, **options)
            ids = tokenizer(words, return_tensors="pt", verbose=False)["input_ids"]
            if (ids == tokenizer.unk_token_id).any():
                say(f"{source.name} left out: its tokenizer does not know the text")
                continue
            for length in lengths:
                rows.append(measure_tiles(source.name, model, ids[:, :length], repeats))
                say(" | ".join(rows[-1]))
    head = [
        "model, tokens",
        "keys looked at, by layer",
        "whole ms",
        "tiles ms",
        "whole / tiles",
        "difference",
    ]
    sections = [TILES.format(repeats=repeats), report.table(head, rows, texts=2)]
    report.finish("tiles-cpu", "Attention in tiles in trained models", sections, before, write=write)


if __name__ == "__main__":
    main()
