"""Shows where our ONNX graph spends its time, beside what the machine could do at best.

    python benchmarks/onnx_profile.py --write
    python benchmarks/onnx_profile.py --layers 2 --lengths 512     # a minute

onnxruntime's own profile of the graph that onnx_speed.py calls ``ours-last`` is summed by kind of node: the
products with weights, attention, and the rest. Beside attention stands torch's fused kernel, which computes
causal attention without ALiBi.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import limits
import onnx_speed
import report
import torch
from onnx_speed import WARM_UP, Cached, Setup, prefill, share, timed, tokens
from torch_speed import factor, fresh, integers, number, say

GRAPH = "ours-last"
PRODUCTS, ATTENTION, REST = "products with weights", "attention", "the rest"
KINDS = {"Gemm": PRODUCTS, "MatMul": PRODUCTS, "FusedMatMul": PRODUCTS, "GroupQueryAttention": ATTENTION}
"""Operator -> kind of node."""

Kinds = Mapping[str, float]
"""Kind of node -> seconds."""


@dataclass(frozen=True)
class Measured:
    """One length; all seconds are medians."""

    prompt: Kinds
    token: Kinds
    """Of one token over the prompt's cache."""
    fused: float
    """Of torch's kernel, for the prompt in all layers."""


def measure(setup: Setup, length: int, runs: int) -> Measured:
    """Profiles prompts and the tokens after them; needs a fresh process."""
    cached = Cached(setup, GRAPH, profile=setup.folder / "profile")
    ids = tokens(setup, length + WARM_UP + runs)
    cached.clear(WARM_UP)
    cached.step(ids[:, :WARM_UP])  # loads the weights into memory
    for _ in range(runs):
        prefill(cached, ids, length)
    for step in range(WARM_UP + runs):
        timed(cached, ids[:, length + step, None])
    found = list(by_run(json.loads(Path(cached.session.end_profiling()).read_text(encoding="utf-8"))))
    return Measured(medians(found[1 : 1 + runs]), medians(found[-runs:]), fused_kernel(setup, length, runs))


def by_run(events: Sequence[Mapping[str, Any]]) -> Iterator[Kinds]:
    """The seconds of each kind of node, for every run in a profile."""
    starts = sorted((each["ts"], each["dur"]) for each in events if each["name"] == "model_run")
    nodes = [each for each in events if each["name"].endswith("_kernel_time")]
    for start, duration in starts:
        found: dict[str, float] = defaultdict(float)
        for node in nodes:
            if start <= node["ts"] < start + duration:
                found[KINDS.get(node["args"]["op_name"], REST)] += node["dur"] / 1e6
        yield found


def medians(runs: Sequence[Kinds]) -> Kinds:
    return {kind: statistics.median(run[kind] for run in runs) for kind in (PRODUCTS, ATTENTION, REST)}


def fused_kernel(setup: Setup, length: int, runs: int) -> float:
    """Seconds of causal attention in torch, in all layers."""
    torch.set_num_threads(setup.threads)
    states = (torch.rand(1, setup.heads, length, setup.head_dim) for _ in range(3))
    query, key, value = states
    taken = []
    for _ in range(1 + runs):
        started = time.perf_counter()
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        taken.append(time.perf_counter() - started)
    return setup.layers * statistics.median(taken[1:])


def rows_of(kinds: Kinds, least: Kinds, length: int, fused: float | None) -> Iterator[list[str]]:
    """The lines of a length: each kind, and all together."""
    whole = sum(kinds.values())
    for kind, seconds in [*kinds.items(), ("all", whole)]:
        best = least.get(kind, 0.0) if kind != "all" else sum(least.values())
        line = [str(length), kind, number(1000 * seconds), f"{seconds / whole:.0%}", number(1000 * best)]
        line.append(share(best, seconds) if best else "-")
        if fused is not None:
            line += [number(1000 * fused), factor(seconds, fused)] if kind == ATTENTION else ["-", "-"]
        yield line


HEAD = ["tokens", "nodes", "ms", "of all", "at best ms", "share"]
FUSED = ["torch's kernel ms", "times"]


@click.command(help=__doc__)
@click.option("--layers", default=6, show_default=True)
@click.option("--heads", default=16, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option("--vocabulary", default=32000, show_default=True)
@click.option("--lengths", default="512,2048,4096,8192", show_default=True, callback=integers)
@click.option("--threads", default=1, show_default=True)
@click.option("--runs", default=3, show_default=True, help="Prompts of each length, and tokens after them.")
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="Folder for temporary files.")
@click.option("--write", is_flag=True, help="Write the tables to benchmarks/results/.")
def main(lengths: list[int], runs: int, folder: Path | None, write: bool, **options: Any) -> None:
    report.clean_up_when_terminated()
    load_before = report.load()
    with tempfile.TemporaryDirectory(prefix="ntk-benchmark-", dir=folder) as temporary:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        os.environ["OMP_NUM_THREADS"] = str(options["threads"])
        setup = Setup(Path(temporary), repeats=1, seconds=0.0, **options)
        fresh(onnx_speed.make_checkpoints, setup, [GRAPH])
        onnx_speed.export(setup, GRAPH, None)
        machine = fresh(limits.measure, setup.threads)
        found = {}
        for length in lengths:
            found[length] = fresh(measure, setup, length, runs)
            say(f"{length}: {sum(found[length].prompt.values()):.3g} s")
        machine = machine.or_better(fresh(limits.measure, setup.threads))
    model = limits.Bloom(setup.heads * setup.head_dim, setup.layers, setup.vocabulary)
    prompts, steps = [], []
    for length, each in found.items():
        least = {
            PRODUCTS: model.product_seconds(machine, length, logits=1),
            ATTENTION: model.attention_seconds(machine, length),
        }
        prompts += rows_of(each.prompt, least, length, each.fused)
        # The timed tokens are those after the warm-up; this is the one in their middle.
        middle = length + WARM_UP + (runs + 1) / 2
        least = {
            PRODUCTS: model.weight_seconds(machine),
            ATTENTION: model.cache_seconds(machine, middle),
        }
        steps += rows_of(each.token, least, length, None)
    sections = [
        f"{setup.heads} heads x {setup.head_dim}, {setup.layers} layers, vocabulary {setup.vocabulary}, "
        f"float32, CPU with {setup.threads} thread(s), onnxruntime {version('onnxruntime')}; the graph of "
        "the profile `ort` with the logits of the last token, denormal numbers taken for zero.",
        f"*At best*: {number(machine.operations / 1e9)} GFLOP/s (the fastest product of matrices) and "
        f"{number(machine.bandwidth / 1e9)} GB/s (the fastest reading). *Share* is that time divided by the "
        "measured one. *Times*: the time of attention divided by that of torch's fused kernel, which "
        "computes causal attention without ALiBi.",
        "A prompt:\n\n" + report.table([*HEAD, *FUSED], prompts, texts=2),
        "A token after it:\n\n" + report.table(HEAD, steps, texts=2),
    ]
    click.echo("\n" + "\n\n".join(sections))
    if write:
        size = f"{setup.layers}x{setup.heads * setup.head_dim}"
        name = f"onnx_profile-bloom-{size}-cpu-float32"
        path = report.write(name, "Where the ONNX graph spends its time", sections, load_before)
        say(f"wrote results/{path.name}")


if __name__ == "__main__":
    main()
