"""Compares time and memory of patched models with stock transformers, on the same random weights.

    python benchmarks/torch_speed.py
    python benchmarks/torch_speed.py --family falcon --layers 2 --lengths 512,2048
    python benchmarks/torch_speed.py --device cuda --dtype bfloat16 --head-dim 128 --layers 24
    python benchmarks/torch_speed.py --earlier PATH

All sides are loaded as a user loads them: the stock class from a checkpoint, the patched one from its
conversion with ``ntk-convert --method none``. ``--earlier`` names another checkout of ntk-convert, and a
third side is what that one converts. The sides take turns; the tables show medians. On the CPU, memory is
measured one run at a time, each in a fresh process.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import report
import torch
from peak import limit_memory, proc

T = TypeVar("T")

STOCK, EARLIER, PATCHED = "stock", "earlier", "patched"
VOCABULARY = 1024
WARM_UP = 8
"""Tokens of the run before a memory measurement, which loads the weights and creates handles."""
DECODE_STEPS = 16
"""Tokens that each side decodes per repeat."""


@dataclass(frozen=True)
class Setup:
    """The settings that a measuring process needs."""

    folder: Path
    """Holds a repository for each side, under its name."""
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
    earlier: Path | None = None
    """Another checkout of ntk-convert."""
    vocabulary: int = VOCABULARY

    @property
    def sides(self) -> list[str]:
        return [STOCK, *([EARLIER] if self.earlier else []), PATCHED]


@dataclass
class Measured:
    """One side at one length."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of each run, or of each decoded token."""
    extra: int | None = None
    """Bytes at the peak beyond those in use before the run."""
    failure: str | None = None
    """Why a measurement is missing, "out of memory" or "fails"; shown in the table."""
    reason: str = ""
    """The first line of the error."""


Results = dict[int, dict[str, Measured]]
"""Length -> side -> measurements."""


def make_repositories(setup: Setup) -> None:
    """Writes ``stock``, a checkpoint with random weights, and converts it for each other side."""
    make_checkpoint(setup)
    options = ["--method", "none", "--train-length", str(setup.longest), "--no-verify", "--quiet"]
    for side, checkout in ((EARLIER, setup.earlier), (PATCHED, report.ROOT)):
        if checkout:
            folder = setup.folder.resolve()
            words = [str(folder / STOCK), "--out", str(folder / side), *options]
            # -m takes the package from the current folder, before PYTHONPATH.
            environment = os.environ | {"PYTHONPATH": str(checkout)}
            command = [sys.executable, "-m", "converter", *words]
            subprocess.run(command, env=environment, cwd=checkout, check=True)
            used, meant = folder / side / "ntk_alibi.py", checkout / "templates" / "ntk_alibi.py"
            if used.read_bytes() != meant.read_bytes():
                raise click.ClickException(f"{side} does not have the templates of {checkout}")


def make_checkpoint(setup: Setup) -> None:
    """Writes ``stock``, a checkpoint with random weights."""
    import transformers

    falcon_rw = {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
    sizes: dict[str, dict[str, Any]] = {
        "bloom": {"n_head": setup.heads, "n_layer": setup.layers},
        "mpt": {"n_heads": setup.heads, "n_layers": setup.layers, "max_seq_len": setup.longest},
        "falcon": {"num_attention_heads": setup.heads, "num_hidden_layers": setup.layers, **falcon_rw},
    }
    width = {"d_model" if setup.family == "mpt" else "hidden_size": setup.heads * setup.head_dim}
    name = setup.family.capitalize()
    config = getattr(transformers, f"{name}Config")(
        vocab_size=setup.vocabulary,
        **width,
        **sizes[setup.family],
        **{f"{token}_token_id": 0 for token in ("bos", "eos", "pad")},
    )
    torch.manual_seed(0)
    with torch.device(setup.device):
        model = getattr(transformers, f"{name}ForCausalLM")(config).to(getattr(torch, setup.dtype))
    for parameter in model.parameters():
        if parameter.dim() == 2:  # large, so attention is peaked and a wrong bias shows
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    model.save_pretrained(setup.folder / STOCK)


def load(setup: Setup, side: str, dtype: str | None = None, **options: Any) -> Any:
    """The model in the folder ``side``, for inference; options are those of ``from_pretrained``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        setup.folder / side,
        dtype=getattr(torch, dtype or setup.dtype),
        trust_remote_code=side != STOCK,
        **options,
    )
    return model.to(setup.device).eval()


def tokens(setup: Setup, count: int) -> torch.Tensor:
    """Token ids on the device, int64 [1, count]; the same for both sides."""
    ids = torch.randint(setup.vocabulary, (1, count), generator=torch.Generator().manual_seed(count))
    return ids.to(setup.device)


def prefill(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Runs a prompt as ``generate`` does: with a cache, a mask of ones, and only the last token's logits."""
    output = model(ids, attention_mask=torch.ones_like(ids), use_cache=True, logits_to_keep=1)
    return output.logits[0, -1].float()


def random_cache(setup: Setup, model: Any, length: int) -> Any:
    """A random cache of ``length`` tokens. Its values do not change the time, so no prompt is run."""
    from transformers import DynamicCache

    cache = DynamicCache()
    generator = torch.Generator(setup.device).manual_seed(length)
    for layer in range(setup.layers):
        shape = (1, setup.heads, length, getattr(model.config, "head_dim", setup.head_dim))
        pair = [torch.randn(shape, generator=generator, device=setup.device) for _ in range(2)]
        cache.update(*(part.to(model.dtype) for part in pair), layer)
    return cache


def seconds(setup: Setup, call: Callable[[], T]) -> tuple[float, T]:
    """The seconds that a call takes until the device is done, and the call's result."""
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
def noting_failure(measured: Measured) -> Iterator[None]:
    """Records an error of a run instead of raising it, so that the other runs continue."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On the CPU, torch has no exception class for lack of memory.
        words = ("can't allocate memory", "not enough memory")
        out = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(w in str(error) for w in words)
        measured.failure = "out of memory" if out else "fails"
        measured.reason = str(error).partition("\n")[0][:200]
        say(f"{measured.failure}: {measured.reason}")


def release() -> None:
    """Frees the memory that a failed run left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prepare_process(setup: Setup) -> None:
    """Sets the number of threads and, for the CPU, a limit on memory."""
    torch.set_num_threads(setup.threads)
    if setup.device == "cpu":
        limit_memory()


@torch.inference_mode()
def prefill_memory(setup: Setup, side: str, length: int) -> Measured:
    """Bytes that one prompt takes on the CPU beyond the loaded model; call it in a fresh process.

    Raises:
        RuntimeError: there is no /proc, which is needed to measure memory.
    """
    prepare_process(setup)
    model = load(setup, side)
    for parameter in model.parameters():  # load mapped weights now, or they would count as extra
        parameter.sum()
    prefill(model, tokens(setup, WARM_UP))
    ids = tokens(setup, length)
    measured = Measured()
    before = proc("/proc/self/status", "VmRSS")
    if not before:
        raise RuntimeError("memory is measured with Linux's /proc; elsewhere give --no-memory")
    Path("/proc/self/clear_refs").write_text("5")
    with noting_failure(measured):
        prefill(model, ids)
        measured.extra = proc("/proc/self/status", "VmHWM") - before
    return measured


@torch.inference_mode()
def prefill_times(setup: Setup, results: Results) -> Results:
    """Adds the seconds of a prompt at each length, the sides in turn; on a GPU, also its memory."""
    prepare_process(setup)
    models = {side: load(setup, side) for side in setup.sides}
    failures: dict[str, str] = {}
    for length, cells in results.items():
        ids = tokens(setup, length)
        for side in cells:
            cells[side].failure = failures.get(side) or cells[side].failure
        # The first runs of a process set up libraries; on a GPU, each length's first run fills a memory pool.
        warm_ups = 1 if setup.device != "cpu" or length == min(results) else 0
        started = time.monotonic()
        for turn in range(-warm_ups, setup.repeats):
            if turn > 0 and time.monotonic() - started > setup.seconds:
                break
            for side, cell in cells.items():
                if cell.failure is None:
                    with noting_failure(cell):
                        measure_prefill(setup, models[side], ids, cell, keep=turn >= 0)
                    if cell.failure:
                        failures[side] = cell.failure  # longer prompts would fail too
                        release()
        say(f"prefill {length}: " + described(cells, milliseconds, "ms"))
    return results


def measure_prefill(setup: Setup, model: Any, ids: torch.Tensor, measured: Measured, *, keep: bool) -> None:
    """Times one run, and adds it to ``measured`` if ``keep``."""
    before = 0
    if setup.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    taken, _ = seconds(setup, partial(prefill, model, ids))
    if keep:
        measured.seconds.append(taken)
        if setup.device != "cpu":
            measured.extra = torch.cuda.max_memory_allocated() - before


@torch.inference_mode()
def decode_times(setup: Setup, results: Results) -> Results:
    """Adds the seconds per token at each cache length; the sides take turns, token by token."""
    prepare_process(setup)
    models = {side: load(setup, side) for side in setup.sides}
    for length, cells in results.items():
        caches = {side: random_cache(setup, models[side], length) for side in cells}
        steps = setup.repeats * DECODE_STEPS
        ids = tokens(setup, WARM_UP + steps)
        for step in range(-WARM_UP, steps):
            token = ids[:, WARM_UP + step, None]
            mask = torch.ones(1, length + WARM_UP + step + 1, dtype=torch.int64, device=setup.device)
            for side, cell in cells.items():
                if cell.failure is None:
                    with noting_failure(cell):
                        call = partial(decode, models[side], token, mask, caches[side])
                        taken, _ = seconds(setup, call)
                        cell.seconds += [taken] if step >= 0 else []
        del caches
        release()
        say(f"decode {length}: " + described(cells, milliseconds, "ms"))
    return results


def decode(model: Any, token: torch.Tensor, mask: torch.Tensor, cache: Any) -> torch.Tensor:
    """Adds one token [1, 1] to the cache; returns the logits after it."""
    output = model(token, attention_mask=mask, past_key_values=cache, use_cache=True)
    return output.logits[0, -1].float()


@torch.inference_mode()
def float32_difference(setup: Setup, length: int) -> float:
    """Largest logit difference in float32, relative to the largest logit.

    Stock Falcon rounds its bias to bfloat16 even in float32; here it does not.
    """
    from converter.verification.stock import unround_bias

    prepare_process(setup)
    logits = []
    for side in (STOCK, PATCHED):
        model = load(setup, side, "float32")
        if type(model).__name__ == "FalconForCausalLM":
            unround_bias(model.transformer)
        logits.append(prefill(model, tokens(setup, length)).cpu())
        del model
        release()
    return difference(*logits)


def difference(stock: torch.Tensor, patched: torch.Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return float((stock - patched).abs().max() / stock.abs().max())


def fresh(function: Callable[..., T], *args: Any) -> T:
    """Calls a function in a new process and returns its result."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def memory_on_cpu(setup: Setup, results: Results) -> None:
    """Fills in the extra memory; a length that fails here is not timed."""
    for length, cells in results.items():
        for side in cells:
            try:
                cells[side] = fresh(prefill_memory, setup, side, length)
            except BrokenProcessPool:  # the process was killed in spite of the limit
                cells[side].failure = "out of memory"
        say(f"memory {length}: " + described(cells, megabytes, "MB"))


def described(cells: dict[str, Measured], text: Callable[[Measured], str], unit: str) -> str:
    return ", ".join(f"{side} {text(cells[side])} {unit}" for side in cells)


def milliseconds(measured: Measured) -> str:
    if measured.failure:
        return measured.failure
    return number(1000 * statistics.median(measured.seconds)) if measured.seconds else "-"


def number(value: float) -> str:
    """At least three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def megabytes(measured: Measured) -> str:
    if measured.failure:
        return measured.failure
    return "-" if measured.extra is None else f"{measured.extra / 1e6:.0f}"


def factor(first: float | None, second: float | None) -> str:
    return f"{first / second:.2f}x" if first and second else "-"


def median(measured: Measured) -> float | None:
    """Seconds; None if there are none, or not of every run."""
    return statistics.median(measured.seconds) if measured.seconds and not measured.failure else None


def head_of(sides: Sequence[str], *, memory: bool) -> list[str]:
    """The head of a table whose lines are those of ``rows_of``."""
    ratios = [f"{side} / patched" for side in sides if side != PATCHED]
    head = ["tokens", *(f"{side} ms" for side in sides), *ratios]
    return [*head, *(f"{side} extra MB" for side in sides), *ratios] if memory else head


def rows_of(results: Results, *, memory: bool) -> Iterator[list[str]]:
    """The lines of a table, one per length."""
    for length, cells in results.items():
        patched, others = cells[PATCHED], [cell for side, cell in cells.items() if side != PATCHED]
        row = [str(length), *map(milliseconds, cells.values())]
        row += [factor(median(cell), median(patched)) for cell in others]
        if memory:
            row += map(megabytes, cells.values())
            row += [factor(cell.extra, patched.extra) for cell in others]
        yield row


def runs_of(results: Results) -> str:
    """How many runs each median is of."""
    most = {length: max(len(cell.seconds) for cell in cells.values()) for length, cells in results.items()}
    return (
        "Runs of each side: " + ", ".join(f"{runs} at {length} tokens" for length, runs in most.items()) + "."
    )


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
    "--cached", callback=integers, help="Cached tokens when decoding.  [512,4096,8192; cuda: 32768]"
)
@click.option("--threads", default=1, show_default=True, help="Threads of torch on the CPU.")
@click.option("--repeats", default=9, show_default=True, help="Turns of each side.")
@click.option("--seconds", default=120.0, show_default=True, help="Start no new turn of a length after this.")
@click.option("--memory/--no-memory", default=True, help="Measure the memory of prompts.")
@click.option(
    "--earlier",
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    help="Another checkout of ntk-convert, to compare its templates too.",
)
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="Folder for temporary files.")
@click.option("--write", is_flag=True, help="Write the tables to benchmarks/results/.")
def main(
    lengths: list[int] | None,
    cached: list[int] | None,
    memory: bool,
    folder: Path | None,
    write: bool,
    **options: Any,
) -> None:
    """Compares patched with stock models: prefill and decoding time, and the memory of a prompt."""
    cuda = options["device"] == "cuda"
    if lengths is None:
        lengths = [512, 2048, 4096, 8192, *([16384, 32768] if cuda else [])]
    if cached is None:
        cached = [512, 4096, 8192, *([32768] if cuda else [])]
    report.clean_up_when_terminated()
    load_before = report.load()
    with tempfile.TemporaryDirectory(prefix="ntk-benchmark-", dir=folder) as temporary:
        # transformers caches a repository's code by name; a new cache is never stale.
        os.environ["HF_MODULES_CACHE"] = str(Path(temporary, "modules"))
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        os.environ["OMP_NUM_THREADS"] = str(options["threads"])
        setup = Setup(Path(temporary), longest=max([*lengths, *cached]) + 4096, **options)
        fresh(make_repositories, setup)
        same = fresh(float32_difference, setup, min(lengths, default=512))
        prompts: Results = {length: {side: Measured() for side in setup.sides} for length in lengths}
        if memory and not cuda:
            memory_on_cpu(setup, prompts)
        prompts = fresh(prefill_times, setup, prompts)
        decoding = {length: {side: Measured() for side in setup.sides} for length in cached}
        decoding = fresh(decode_times, setup, decoding)

    shown = memory or cuda
    shape = (
        f"{setup.heads} heads x {setup.head_dim}, hidden {setup.heads * setup.head_dim}, "
        f"{setup.layers} layers, {setup.dtype}, {'GPU' if cuda else f'CPU with {setup.threads} thread(s)'}"
    )
    sections = [
        f"{shape}; the same random weights on all sides, scaling none. In float32 (without the rounding of "
        f"stock Falcon's bias), the last logits of {min(lengths, default=512)} tokens differ by {same:.1e} "
        "of the largest.",
        "Prefill, one row, logits of the last token, cache kept:\n\n"
        + report.table(head_of(setup.sides, memory=shown), rows_of(prompts, memory=shown))
        + f"\n\n{runs_of(prompts)}",
        "Decoding one token over a cache of this many tokens:\n\n"
        + report.table(head_of(setup.sides, memory=False), rows_of(decoding, memory=False))
        + f"\n\n{runs_of(decoding)}",
    ]
    click.echo("\n" + "\n\n".join(sections))
    if write:
        name = f"torch_speed-{setup.family}-{setup.device}-{setup.dtype}"
        title = f"Patched against stock torch: {setup.family}"
        say(f"wrote results/{report.write(name, title, sections, load_before).name}")


if __name__ == "__main__":
    sys.exit(main())
