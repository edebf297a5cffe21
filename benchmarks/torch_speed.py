"""Time and memory of converted models in torch, beside stock transformers.

    python benchmarks/torch_speed.py
    python benchmarks/torch_speed.py --family falcon --dtype bfloat16

Both sides have the same random weights, and are loaded as users load them: by the class in transformers, and
converted with ``--method none``. Each run is a process of its own, and the sides take turns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import click
import measuring
import report
import torch
from measuring import STOCK, WARM_UP, Cell, Setup, fresh

PATCHED = "patched"
SIDES = (STOCK, PATCHED)
ROUNDED = " Stock Falcon rounds its bias to bfloat16."


def measure(setup: Setup, side: str, length: int) -> Cell:
    """Measures one side at one length; call it in a fresh process."""
    torch.set_num_threads(setup.threads)
    measuring.limit_memory()
    model, cell = measuring.load(setup, side), Cell()
    with torch.inference_mode():
        for parameter in model.parameters():  # load mapped weights now, or they would count as extra
            parameter.sum()
        measuring.prefill(model, measuring.tokens(setup, WARM_UP))
    measuring.measure_model(setup, model, length, cell)
    return cell


@click.command(help=__doc__)
@click.option("--family", type=click.Choice(["bloom", "mpt", "falcon"]), default="bloom", show_default=True)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True
)
@report.numbers(layers=6, heads=16, head_dim=64, threads=1, repeats=9, seconds=120.0)
@report.lengths("512,2048,4096,8192")
@report.common(layers=1, heads=2, head_dim=8, lengths="16,32", repeats=1)
def main(lengths: list[int], repeats: int, seconds: float, write: bool, **options: Any) -> None:
    """Compares converted with stock models: prefill, memory and decoding."""
    before = report.load()
    with measuring.workplace(options["threads"]) as temporary:
        setup = Setup(temporary, longest=max(lengths) + 4096, **options)
        conversion = {"method": "none", "train_length": setup.longest}
        fresh(measuring.make_repositories, setup, {PATCHED: conversion})
        results = measuring.in_turns(partial(measure, setup), SIDES, lengths, repeats, seconds)
    gap = measuring.difference(*(results[lengths[0]][side].logits[0] for side in SIDES))
    rows = []
    for length, cells in results.items():
        for side, cell in cells.items():
            base = cells[PATCHED] if side == STOCK else None
            rows.append([str(length), side, *cell.columns(base), str(len(cell.prompt.seconds))])
    sections = [
        f"{setup.family}, {setup.said()}; the same random weights on both sides, scaling none. Ratios are "
        f"stock's number divided by ours. The last logits of {lengths[0]} tokens differ by {gap:.1e} of the "
        f"largest. {measuring.SAID}" + (ROUNDED if setup.family == "falcon" else ""),
        report.table(["tokens", "side", *measuring.COLUMNS, "runs"], rows, texts=2),
    ]
    name = f"torch_speed-{setup.family}-cpu-{setup.dtype}"
    title = f"Patched against stock torch: {setup.family}"
    report.finish(name, title, sections, before, write=write)


if __name__ == "__main__":
    main()
