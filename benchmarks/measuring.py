"""How the benchmarks measure: models of a shape with random weights, turns in random order, and memory.

It imports little, so that it also runs in the environments of other programs.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import re
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import report  # it makes this checkout's converter the one that is imported
import torch

T = TypeVar("T")
STOCK = "stock"
WARM_UP, STEPS = 8, 20
"""Decoded tokens that are not timed, and that are; a prompt to warm up has as many tokens as the first."""
DENORMAL_AS_ZERO = "session.set_denormal_as_zero"
NO_MEMORY, KILLED = "out of memory", "killed"
HEADROOM = 2 << 30
"""Bytes of free memory that a run on the CPU leaves for other processes."""


@dataclass(frozen=True)
class Setup:
    """Sizes of a model, and where it runs."""

    folder: Path
    """Holds the checkpoint and its conversions, under their names."""
    heads: int
    head_dim: int
    layers: int
    vocabulary: int = 1024
    family: str = "bloom"
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    longest: int = 2048
    """Most tokens that the model gets."""

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    def said(self) -> str:
        """The sizes in words."""
        where = "GPU" if self.device == "cuda" else f"CPU with {self.threads} thread(s)"
        return (
            f"{self.heads} heads x {self.head_dim}, hidden {self.hidden}, {self.layers} layers, vocabulary "
            f"{self.vocabulary}, {self.dtype}, {where}"
        )


@dataclass
class Measured:
    """What one side took at one length."""

    seconds: list[float] = field(default_factory=list)
    """Of each run, or of each decoded token."""
    extra: int | None = None
    """Bytes at the peak beyond those in use before the run."""
    failure: str | None = None
    """Why a measurement is missing, as the tables show it."""
    reason: str = ""
    """The first line of the error."""

    @property
    def median(self) -> float | None:
        """Seconds; None if there are none, or not of every run."""
        return statistics.median(self.seconds) if self.seconds and not self.failure else None

    @property
    def milliseconds(self) -> str:
        return self.failure or report.number(self.median, 1000)

    @property
    def megabytes(self) -> str:
        return self.failure or ("-" if self.extra is None else f"{self.extra / 1e6:.0f}")


@dataclass
class Cell:
    """One side at one length: a prompt, and tokens after it."""

    prompt: Measured = field(default_factory=Measured)
    token: Measured = field(default_factory=Measured)
    logits: list[np.ndarray] = field(default_factory=list)
    """float32 [vocabulary], after the prompt and, of graphs, after the last decoded token."""
    resident: int = 0
    """Bytes of the process at its peak, weights included."""

    @property
    def failure(self) -> str | None:
        return self.prompt.failure or self.token.failure

    def add(self, turn: Cell) -> None:
        """Adds what another turn took."""
        for mine, its in ((self.prompt, turn.prompt), (self.token, turn.token)):
            mine.seconds += its.seconds
        self.prompt.extra = max(self.prompt.extra or 0, turn.prompt.extra or 0)
        self.logits, self.resident = turn.logits, max(self.resident, turn.resident)

    def columns(self, base: Cell | None = None) -> list[str]:
        """The texts for ``COLUMNS``; ratios are this divided by ``base``."""
        base = base or Cell()
        return [
            *(self.prompt.milliseconds, report.ratio(self.prompt.median, base.prompt.median)),
            *(self.prompt.megabytes, report.ratio(self.prompt.extra, base.prompt.extra)),
            *(self.token.milliseconds, report.ratio(self.token.median, base.token.median)),
        ]


COLUMNS = ["prefill ms", "ratio", "extra MB", "ratio", "decoding ms", "ratio"]
SAID = f"""\
*Prefill*: one row, a mask of ones, logits of the last token, the cache kept. *Extra*: memory at its peak
beyond what was in use before; it includes the cache. *Decoding*: one token over a cache of that length; the
median of {STEPS} in each run."""


# --- the models


def make_checkpoint(setup: Setup) -> None:
    """Writes the folder ``stock``: a checkpoint with random weights, by the class in transformers."""
    import transformers

    falcon_rw = {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
    sizes: dict[str, dict[str, Any]] = {
        "bloom": {"n_head": setup.heads, "n_layer": setup.layers},
        "mpt": {"n_heads": setup.heads, "n_layers": setup.layers, "max_seq_len": setup.longest},
        "falcon": {"num_attention_heads": setup.heads, "num_hidden_layers": setup.layers, **falcon_rw},
    }
    name = setup.family.capitalize()
    config = getattr(transformers, f"{name}Config")(
        vocab_size=setup.vocabulary,
        **{"d_model" if setup.family == "mpt" else "hidden_size": setup.hidden},
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


def make_repositories(setup: Setup, conversions: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes ``stock`` and, for each name, a folder with what ``convert`` makes of it with these options."""
    from converter import convert

    make_checkpoint(setup)
    for name, options in conversions.items():
        convert(setup.folder / STOCK, setup.folder / name, link="hard", verify=False, **options)
    release()


def load(setup: Setup, name: str, dtype: str | None = None, **options: Any) -> Any:
    """The model in a folder, for inference; options are those of ``from_pretrained``."""
    from transformers import AutoModelForCausalLM

    dtype_ = getattr(torch, dtype or setup.dtype)
    folder, trusted = setup.folder / name, name != STOCK
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype_, trust_remote_code=trusted, **options)
    return model.to(setup.device).eval()


def tokens(setup: Setup, count: int) -> torch.Tensor:
    """Token ids on the device, int64 [1, count]; the same for all sides."""
    ids = torch.randint(setup.vocabulary, (1, count), generator=torch.Generator().manual_seed(count))
    return ids.to(setup.device)


def prefill(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Runs a prompt as ``generate`` does: with a cache, a mask of ones, and only the last token's logits."""
    output = model(ids, attention_mask=torch.ones_like(ids), use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1].float()
    return logits


def decode(model: Any, token: torch.Tensor, cached: int, cache: Any) -> torch.Tensor:
    """Adds one token [1, 1] to a cache that holds ``cached``; returns the logits after it."""
    mask = torch.ones(1, cached + 1, dtype=torch.int64, device=token.device)
    output = model(token, attention_mask=mask, past_key_values=cache, use_cache=True)
    logits: torch.Tensor = output.logits[0, -1].float()
    return logits


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


@torch.inference_mode()
def measure_model(setup: Setup, model: Any, length: int, cell: Cell, runs: int = 1) -> None:
    """Times prompts, after one for the memory and the logits, and tokens over a random cache."""
    ids = tokens(setup, length)
    with noting_failure(cell.prompt):
        with noting_extra(cell.prompt, setup.device):
            logits = prefill(model, ids)
        cell.logits.append(logits.cpu().numpy())
        for _ in turns([model], runs, seconds=2.0):
            cell.prompt.seconds.append(timed(setup.device, partial(prefill, model, ids))[0])
    if cell.failure:
        return
    with noting_failure(cell.token):
        cache, ids = random_cache(setup, model, length), tokens(setup, WARM_UP + STEPS)
        for step in range(WARM_UP + STEPS):
            call = partial(decode, model, ids[:, step, None], length + step, cache)
            taken, _ = timed(setup.device, call)
            cell.token.seconds += [taken] if step >= WARM_UP else []


def session(
    path: Path,
    threads: int = 1,
    *,
    zero: bool = True,
    profile: Path | None = None,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
) -> Any:
    """A graph in onnxruntime.

    Args:
        zero: take denormal numbers for zero; it has no effect unless this is the process's first session.
        profile: write onnxruntime's profile to a file whose name starts like this.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if zero:
        options.add_session_config_entry(DENORMAL_AS_ZERO, "1")
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # failures are shown in the table
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    return onnxruntime.InferenceSession(str(path), options, providers=list(providers))


def difference(right: np.ndarray, found: np.ndarray) -> float:
    """Largest difference, relative to the largest number in ``right``."""
    return float(np.abs(right - found).max() / np.abs(right).max())


# --- processes and turns


@contextlib.contextmanager
def workplace(threads: int = 1) -> Iterator[Path]:
    """A folder for temporary files, and what processes read when they start; SIGTERM removes the folder."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="ntk-benchmark-") as temporary:
        # transformers caches a repository's code by name; a new cache is never stale.
        os.environ["HF_MODULES_CACHE"] = str(Path(temporary, "modules"))
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        os.environ |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        yield Path(temporary)


def fresh(function: Callable[..., T], *args: Any) -> T:
    """Calls a function in a new process and returns its result."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def turns(sides: Sequence[T], repeats: int, seconds: float = float("inf")) -> Iterator[tuple[int, T]]:
    """Each side once a turn, in an order drawn anew; no turn but the first starts after ``seconds``."""
    started, order = time.monotonic(), random.Random(0)
    for turn in range(repeats):
        if turn and time.monotonic() - started > seconds:
            return
        for side in order.sample(sides, len(sides)):
            yield turn, side


def in_turns(
    measure: Callable[..., Cell],
    sides: Sequence[str],
    lengths: Sequence[int],
    repeats: int,
    seconds: float,
) -> dict[int, dict[str, Cell]]:
    """Calls ``measure(side, length)`` in a fresh process for each side and turn.

    Lengths rise: a side that lacks memory at one of them is not tried with longer ones.

    Returns:
        Length -> side -> all measurements of its turns.

    Raises:
        RuntimeError: a measurement failed, and not for lack of memory.
    """
    results = {length: {side: Cell() for side in sides} for length in lengths}
    failures: dict[str, str] = {}
    for length, cells in results.items():
        for turn, side in turns(sides, repeats, seconds):
            cell = cells[side]
            if side in failures:
                cell.prompt.failure = failures[side]
                continue
            try:
                found = fresh(measure, side, length)
            except BrokenProcessPool:  # perhaps for lack of memory, in spite of its limit
                found = Cell(Measured(failure=KILLED))
            if found.failure not in (None, NO_MEMORY, KILLED):
                raise RuntimeError(f"{side}, {length} tokens: {found.prompt.reason or found.token.reason}")
            if found.failure:
                failures[side] = cell.prompt.failure = found.failure
            else:
                cell.add(found)
            report.say(f"{length} tokens, turn {turn + 1}, {side}: {' | '.join(found.columns())}")
    return results


def release() -> None:
    """Frees the memory that a run left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- time and memory


def timed(device: str, call: Callable[[], T]) -> tuple[float, T]:
    """The seconds that a call takes until the device is done, and the call's result."""
    if device == "cpu":
        started = time.perf_counter()
        result = call()
        return time.perf_counter() - started, result
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    events[0].record()
    result = call()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1000, result


@contextlib.contextmanager
def noting_failure(measured: Measured) -> Iterator[None]:
    """Records an error instead of raising it, so that other measurements continue."""
    try:
        yield
    except Exception as error:  # torch's and onnxruntime's exceptions have no common base class
        measured.reason = str(error).partition("\n")[0][:200]
        words = f"{type(error).__name__} {error}"
        lacking = re.search(r"allocat|not enough memory|out ?of ?memory|MemoryError", words, re.IGNORECASE)
        measured.failure = NO_MEMORY if lacking else "fails"
        report.say(f"{measured.failure}: {measured.reason}")


@contextlib.contextmanager
def noting_extra(measured: Measured, device: str = "cpu") -> Iterator[None]:
    """Notes how many bytes the peak of memory has beyond those in use before."""
    if device == "cpu":
        before = start_peak()
        yield
        measured.extra = peak() - before
        return
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    measured.extra = torch.cuda.max_memory_allocated() - before


def limit_memory() -> None:
    """Makes lack of memory an error in this process, so that no other process is killed."""
    available = proc("/proc/meminfo", "MemAvailable")
    if available:
        limit = proc("/proc/self/status", "VmData") + max(0, available - HEADROOM)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        Path("/proc/self/oom_score_adj").write_text("1000")  # if the kernel kills a process, then this one


def proc(file: str, key: str) -> int:
    """A value of a /proc file in bytes; 0 if there is no such file."""
    path = Path(file)
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:")), 0)


def start_peak() -> int:
    """Forgets this process's peak of memory; the bytes that it has now.

    Raises:
        RuntimeError: there is no /proc, which is needed to measure memory.
    """
    before = proc("/proc/self/status", "VmRSS")
    if not before:
        raise RuntimeError("memory is measured with Linux's /proc")
    Path("/proc/self/clear_refs").write_text("5")
    return before


def peak() -> int:
    """The most bytes that this process had since ``start_peak``."""
    return proc("/proc/self/status", "VmHWM")


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of a process and its descendants: the peak (VmHWM), and now without mapped files (RssAnon)."""
    statuses = [f"/proc/{one}/status" for one in descendants(pid)]
    with contextlib.suppress(OSError):
        return sum(proc(each, "VmHWM") for each in statuses), sum(proc(each, "RssAnon") for each in statuses)
    return 0, 0


def descendants(pid: int) -> Iterator[int]:
    """A process and all that it started."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield from descendants(int(child))
