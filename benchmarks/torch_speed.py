"""Time and memory of the patched models beside stock transformers, on the same random weights.

    python benchmarks/torch_speed.py
    python benchmarks/torch_speed.py --family falcon --layers 2 --lengths 512,2048
    python benchmarks/torch_speed.py --device cuda --dtype bfloat16 --head-dim 128 --layers 24

Both sides are loaded as a user loads them: the stock class from a checkpoint, the patched one from
what ``converter.convert(method="none")`` makes of it. Stock and patched runs alternate; a cell is the
median. On the CPU, memory is measured one run at a time, each in a fresh process.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import report
import torch

T = TypeVar("T")

SIDES = ("stock", "patched")
VOCABULARY = 1024
WARM_UP = 8
"""Tokens of the run that precedes a measurement of memory: it maps the weights and creates handles."""
DECODE_STEPS = 16
"""Tokens that each side decodes for one of the repeats."""
HEADROOM = 1 << 30
"""Bytes of free memory that a run on the CPU leaves to everybody else."""


@dataclass(frozen=True)
class Setup:
    """What a measuring process has to know."""

    folder: Path
    """Holds the two repositories, ``stock`` and ``patched``."""
    family: str
    heads: int
    head_dim: int
    layers: int
    dtype: str
    device: str
    threads: int
    repeats: int
    seconds: float
    longest: int


@dataclass
class Measured:
    """One side at one length. Nothing but ``out_of_memory`` is set where the memory did not suffice."""

    seconds: list[float] = field(default_factory=list)
    """Of each run, or of each decoded token."""
    extra: int | None = None
    """Bytes at the peak beyond those before the run."""
    logits: torch.Tensor | None = None
    """float32 [vocabulary], of the last token."""
    out_of_memory: bool = False


def make_repositories(setup: Setup) -> None:
    """Writes ``stock``, a checkpoint of random weights, and converts it to ``patched``."""
    import transformers

    from converter import convert

    falcon_rw = {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
    sizes: dict[str, dict[str, Any]] = {
        "bloom": {"n_head": setup.heads, "n_layer": setup.layers},
        "mpt": {"n_heads": setup.heads, "n_layers": setup.layers, "max_seq_len": setup.longest},
        "falcon": {"num_attention_heads": setup.heads, "num_hidden_layers": setup.layers, **falcon_rw},
    }
    width = {"d_model" if setup.family == "mpt" else "hidden_size": setup.heads * setup.head_dim}
    name = setup.family.capitalize()
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY,
        **width,
        **sizes[setup.family],
        **{f"{token}_token_id": 0 for token in ("bos", "eos", "pad")},
    )
    torch.manual_seed(0)
    with torch.device(setup.device):
        model = getattr(transformers, f"{name}ForCausalLM")(config).to(getattr(torch, setup.dtype))
    for parameter in model.parameters():
        if parameter.dim() == 2:  # large enough for attention to be peaked, so that a wrong bias shows
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    model.save_pretrained(setup.folder / "stock")
    convert(setup.folder / "stock", setup.folder / "patched", method="none", verify=False)


def load(setup: Setup, side: str, dtype: str | None = None) -> Any:
    """One of the two models, for inference."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        setup.folder / side, dtype=getattr(torch, dtype or setup.dtype), trust_remote_code=side == "patched"
    )
    return model.to(setup.device).eval()


def tokens(setup: Setup, count: int) -> torch.Tensor:
    """int64 [1, count] on the device, the same for both sides."""
    ids = torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(count))
    return ids.to(setup.device)


def prefill(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Runs a prompt as ``generate`` does: cache, mask of ones, logits of the last token only."""
    output = model(ids, attention_mask=torch.ones_like(ids), use_cache=True, logits_to_keep=1)
    return output.logits[0, -1].float()


def random_cache(setup: Setup, length: int) -> Any:
    """A cache of ``length`` tokens. What it holds does not change the time, so no prompt is run."""
    from transformers import DynamicCache

    cache = DynamicCache()
    generator = torch.Generator(setup.device).manual_seed(length)
    for layer in range(setup.layers):
        shape = (1, setup.heads, length, setup.head_dim)
        pair = [torch.randn(shape, generator=generator, device=setup.device) for _ in range(2)]
        cache.update(*(part.to(getattr(torch, setup.dtype)) for part in pair), layer)
    return cache


def seconds(setup: Setup, call: Callable[[], T]) -> tuple[float, T]:
    """The time that a call takes, until the device is done."""
    if setup.device == "cpu":
        start = time.perf_counter()
        result = call()
        return time.perf_counter() - start, result
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    events[0].record()
    result = call()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1000, result


@contextlib.contextmanager
def noting_lack_of_memory(measured: Measured) -> Iterator[None]:
    """Turns an allocation that fails into ``out_of_memory``; torch's CPU allocator has no class for it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = ("can't allocate memory", "not enough memory")
        out = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not out and not any(word in str(error) for word in words):
            raise
        measured.__dict__.update(Measured(out_of_memory=True).__dict__)
    finally:
        release(measured.out_of_memory)


def release(everything: bool = True) -> None:
    """Frees what earlier runs left, so that it is neither reused nor missing."""
    if everything:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def prepare_process(setup: Setup) -> None:
    """Threads, and for the CPU a limit, so that lack of memory is an error and no kill."""
    torch.set_num_threads(setup.threads)
    available = proc("/proc/meminfo", "MemAvailable")
    if setup.device == "cpu" and available:
        limit = proc("/proc/self/status", "VmData") + max(0, available - HEADROOM)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def proc(file: str, key: str) -> int:
    """A value of a /proc file in bytes; 0 where there is no such file."""
    path = Path(file)
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:")), 0)


@torch.inference_mode()
def prefill_memory(setup: Setup, side: str, length: int) -> Measured:
    """Bytes that one prompt takes on the CPU beyond the loaded model; meant for a fresh process.

    Raises:
        RuntimeError: no /proc/self/clear_refs, with which Linux forgets an earlier peak.
    """
    prepare_process(setup)
    model = load(setup, side)
    for parameter in model.parameters():  # weights may still lie in the file, and would count as extra
        parameter.sum()
    prefill(model, tokens(setup, WARM_UP))
    ids = tokens(setup, length)
    measured = Measured()
    before = proc("/proc/self/status", "VmRSS")
    if not before:
        raise RuntimeError("memory is measured with Linux's /proc; elsewhere give --no-memory")
    Path("/proc/self/clear_refs").write_text("5")
    with noting_lack_of_memory(measured):
        prefill(model, ids)
        measured.extra = proc("/proc/self/status", "VmHWM") - before
    return measured


@torch.inference_mode()
def prefill_times(setup: Setup, lengths: list[int]) -> dict[int, dict[str, Measured]]:
    """Seconds of a prompt at each length, stock and patched in turn; on a GPU its memory too."""
    prepare_process(setup)
    models = {side: load(setup, side) for side in SIDES}
    results: dict[int, dict[str, Measured]] = {}
    exhausted: set[str] = set()
    for length in lengths:
        ids = tokens(setup, length)
        cells = results[length] = {side: Measured(out_of_memory=side in exhausted) for side in SIDES}
        # The first runs of a process set up libraries, and on a GPU those of a length fill a memory pool.
        if setup.device != "cpu" or length == lengths[0]:
            for side in SIDES:
                with noting_lack_of_memory(cells[side]):
                    if not cells[side].out_of_memory:
                        prefill(models[side], ids)
        started = time.monotonic()
        for turn in range(setup.repeats):
            if turn and time.monotonic() - started > setup.seconds:
                break
            for side in SIDES:
                if not cells[side].out_of_memory:
                    measure_prefill(setup, models[side], ids, cells[side])
        exhausted = {side for side in SIDES if cells[side].out_of_memory}
        say(f"prefill {length}: " + times(cells))
    return results


def measure_prefill(setup: Setup, model: Any, ids: torch.Tensor, measured: Measured) -> None:
    """One timed run, added to ``measured``."""
    before = 0
    with noting_lack_of_memory(measured):
        if setup.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        taken, logits = seconds(setup, partial(prefill, model, ids))
        measured.seconds.append(taken)
        measured.logits = logits.cpu()
        if setup.device != "cpu":
            measured.extra = torch.cuda.max_memory_allocated() - before


@torch.inference_mode()
def decode_times(setup: Setup, lengths: list[int]) -> dict[int, dict[str, Measured]]:
    """Seconds a token at each length of the cache, stock and patched in turn, token by token."""
    prepare_process(setup)
    models = {side: load(setup, side) for side in SIDES}
    results = {}
    for length in lengths:
        cells = results[length] = {side: Measured() for side in SIDES}
        caches = {side: random_cache(setup, length) for side in SIDES}
        steps = setup.repeats * DECODE_STEPS
        ids = tokens(setup, WARM_UP + steps)
        for step in range(-WARM_UP, steps):
            token = ids[:, WARM_UP + step, None]
            mask = torch.ones(1, length + WARM_UP + step + 1, dtype=torch.int64, device=setup.device)
            for side in SIDES:
                if not cells[side].out_of_memory:
                    with noting_lack_of_memory(cells[side]):
                        call = partial(decode, models[side], token, mask, caches[side])
                        taken, logits = seconds(setup, call)
                        cells[side].seconds += [taken] if step >= 0 else []
                        cells[side].logits = logits.cpu()
        del caches
        release()
        say(f"decode {length}: " + times(cells))
    return results


def decode(model: Any, token: torch.Tensor, mask: torch.Tensor, cache: Any) -> torch.Tensor:
    """Adds one token [1, 1] to the cache; the logits that follow it."""
    output = model(token, attention_mask=mask, past_key_values=cache, use_cache=True)
    return output.logits[0, -1].float()


@torch.inference_mode()
def float32_difference(setup: Setup, length: int) -> float:
    """Largest logit difference in float32, relative to the largest logit.

    Stock Falcon rounds its bias to bfloat16 even then; here it gets BLOOM's function, which does not.
    """
    from converter.verification.stock import exact_stock_bias

    prepare_process(setup)
    logits = []
    with exact_stock_bias():
        for side in SIDES:
            logits.append(prefill(load(setup, side, "float32"), tokens(setup, length)).cpu())
            release()
    return difference(*logits)


def difference(stock: torch.Tensor, patched: torch.Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return float((stock - patched).abs().max() / stock.abs().max())


def fresh(function: Callable[..., T], *args: Any) -> T:
    """The result of a call in a new process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def memory_on_cpu(setup: Setup, lengths: list[int], results: dict[int, dict[str, Measured]]) -> None:
    """Fills in the extra memory, and marks the sides that will not have enough for a timed run."""
    for length in lengths:
        cells = results[length] = {}
        for side in SIDES:
            try:
                cells[side] = fresh(prefill_memory, setup, side, length)
            except BrokenProcessPool:  # killed for its memory all the same
                cells[side] = Measured(out_of_memory=True)
        words = (f"{side} {megabytes(cells[side])}" for side in SIDES)
        say(f"memory {length}: {', '.join(words)}")


def times(cells: dict[str, Measured]) -> str:
    return ", ".join(f"{side} {milliseconds(cells[side])} ms" for side in SIDES)


def milliseconds(measured: Measured) -> str:
    if measured.out_of_memory:
        return "out of memory"
    return f"{1000 * statistics.median(measured.seconds):.4g}" if measured.seconds else "-"


def megabytes(measured: Measured) -> str:
    if measured.out_of_memory:
        return "out of memory"
    return "-" if measured.extra is None else f"{measured.extra / 1e6:.0f}"


def factor(first: float | None, second: float | None) -> str:
    return f"{first / second:.2f}x" if first and second else "-"


def rows_of(results: dict[int, dict[str, Measured]], *, memory: bool) -> Iterator[list[str]]:
    """The lines of a table, one a length."""
    for length, cells in results.items():
        stock, patched = (cells[side] for side in SIDES)
        medians = [statistics.median(cell.seconds) if cell.seconds else None for cell in (stock, patched)]
        row = [str(length), milliseconds(stock), milliseconds(patched), factor(*medians)]
        if memory:
            row += [megabytes(stock), megabytes(patched), factor(stock.extra, patched.extra)]
        both = stock.logits is not None and patched.logits is not None
        row.append(f"{difference(stock.logits, patched.logits):.1e}" if both else "-")
        yield [*row, str(max(len(stock.seconds), len(patched.seconds)))]


def say(line: str) -> None:
    click.echo(line, err=True)


def integers(_: click.Context, __: click.Parameter, value: str | None) -> list[int] | None:
    return None if value is None else sorted(int(word) for word in value.split(",") if word)


@click.command()
@click.option("--family", type=click.Choice(["bloom", "mpt", "falcon"]), default="bloom", show_default=True)
@click.option("--layers", default=6, show_default=True)
@click.option("--heads", default=16, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--lengths", callback=integers, help="Tokens of the prompts.  [512 to 8192; on cuda to 32768]")
@click.option(
    "--cached", callback=integers, help="Cached tokens when decoding.  [512,2048,8192; cuda: 32768]"
)
@click.option("--threads", default=1, show_default=True, help="Of torch on the CPU.")
@click.option("--repeats", default=3, show_default=True, help="Turns of each side.")
@click.option("--seconds", default=120.0, show_default=True, help="No further turns of a length after these.")
@click.option("--memory/--no-memory", default=True, help="Measure the memory of prompts.")
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="For temporary files.")
@click.option("--write", is_flag=True, help="Write the tables to benchmarks/results/.")
def main(
    lengths: list[int] | None,
    cached: list[int] | None,
    memory: bool,
    folder: Path | None,
    write: bool,
    **options: Any,
) -> None:
    """Patched against stock: prefill and decoding time, and the memory of a prompt."""
    cuda = options["device"] == "cuda"
    if lengths is None:
        lengths = [512, 2048, 4096, 8192, *([16384, 32768] if cuda else [])]
    if cached is None:
        cached = [512, 2048, 8192, *([32768] if cuda else [])]
    load_before = report.load()
    with tempfile.TemporaryDirectory(prefix="ntk-benchmark-", dir=folder) as temporary:
        # The converted repository's code is cached under a name; a cache of our own is never stale.
        os.environ["HF_MODULES_CACHE"] = str(Path(temporary, "modules"))
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        os.environ["OMP_NUM_THREADS"] = str(options["threads"])
        setup = Setup(Path(temporary), longest=max([*lengths, *cached]) + 4096, **options)
        fresh(make_repositories, setup)
        same = fresh(float32_difference, setup, min(lengths, default=512))
        extra: dict[int, dict[str, Measured]] = {}
        if memory and not cuda:
            memory_on_cpu(setup, lengths, extra)
        fitting = [n for n in lengths if not any(cell.out_of_memory for cell in extra.get(n, {}).values())]
        prompts = fresh(prefill_times, setup, fitting)
        for length, cells in extra.items():
            for side, cell in cells.items():
                prompts.setdefault(length, extra[length])[side].extra = cell.extra
        decoding = fresh(decode_times, setup, cached)

    head = ["tokens", "stock ms", "patched ms", "stock / patched"]
    shown = memory or cuda
    columns = ["stock extra MB", "patched extra MB", "stock / patched"] if shown else []
    tail = ["largest logit difference", "runs"]
    shape = (
        f"{setup.heads} heads x {setup.head_dim}, hidden {setup.heads * setup.head_dim}, "
        f"{setup.layers} layers, {setup.dtype}, {'GPU' if cuda else f'CPU with {setup.threads} thread(s)'}"
    )
    sections = [
        f"{shape}; random weights, the same on both sides, scaling none. In float32 (stock Falcon's bias "
        f"left unrounded), the last logits of {min(lengths, default=512)} tokens differ by {same:.1e} of the "
        "largest.",
        "Prefill, one row, logits of the last token, cache kept:\n\n"
        + report.table(head + columns + tail, rows_of(prompts, memory=shown)),
        "Decoding one token over a cache of so many:\n\n"
        + report.table(head + tail, rows_of(decoding, memory=False)),
    ]
    click.echo("\n" + "\n\n".join(sections))
    if write:
        name = f"torch_speed-{setup.family}-{setup.device}-{setup.dtype}"
        title = f"Patched against stock torch: {setup.family}"
        say(f"wrote results/{report.write(name, title, sections, load_before).name}")


if __name__ == "__main__":
    sys.exit(main())
