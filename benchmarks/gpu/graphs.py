"""Graphs under onnxruntime's CUDA provider, ours beside other exporters', and which attention ran."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import onnx_speed
import report
import torch
import torch_speed
from onnx_speed import DECODE_STEPS, WARM_UP, Measured
from torch_speed import factor, fresh, number

from gpu import kernels
from gpu.attention import EXACT, ROUNDING, measure_lengths
from gpu.document import Document
from gpu.settings import BLOOM, Geometry, Settings, shared

TITLE = "graphs under onnxruntime"
OURS, TORCH, COPIED = "ours-last", "torch, sdpa", "ours-last, new buffers"
GRAPHS = (OURS, "transformers-last", "optimum")
EXPORTING = 0.4
"""Share of the time that exports may take."""
RUNS = 3
KERNEL_INFO = "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"
"""With this variable set, onnxruntime prints which attention kernel a node uses."""

INTRO = f"""\
{{geometry}}; random weights, the same for all, scaling none. Only the last token's logits are computed,
except by optimum's graph, which has no such form.

*Extra*: by how much onnxruntime's memory on the GPU grew since a prompt of {WARM_UP} tokens; for torch, the
peak of its allocator. Both include the cache. *Decoding*: one token over the prompt's cache (for torch,
over a cache of random tokens); the median of {DECODE_STEPS}. `{OURS}` writes into one buffer for past and
present. `{COPIED}` is the same graph, but returns a new cache for each token, as the graphs of others must.
Ratios are to `{OURS}`. *Difference*: the largest difference of the last logits from stock's in torch in
float32, relative to the largest logit, for the shortest prompt."""
Results = dict[int, dict[str, Measured]]
"""Length -> graph -> measurements."""


def run(settings: Settings, document: Document) -> None:
    lacking = missing(settings.device)
    if lacking:
        document.skip("everything", lacking)
        return
    geometry = settings.geometry(BLOOM, layers=6, vocabulary=32768)
    lengths = settings.size((2048, 8192, 32768, 65536), (24, 48))
    document.intro = INTRO.format(geometry=geometry.said())
    dtypes = settings.size(("float16", "bfloat16"), ("float16",))
    setups = {dtype: make(settings, geometry, dtype) for dtype in dtypes}
    allowed = time.monotonic() + EXPORTING * (settings.until - time.monotonic())
    exported = export_all(settings, document, setups, allowed)
    attention: list[list[str]] = []
    for dtype, until in shared(dtypes, settings.until):
        setup = setups[dtype]
        if OURS in exported[dtype]:
            attention += attention_rows(document, setup, lengths[0])
            table = report.table(ATTENTION_HEAD, attention, texts=len(ATTENTION_HEAD))
            document.put("Attention of our graph", table)
        measure_all(document, setup, exported[dtype], lengths, until)


def missing(device: str) -> str | None:
    """What is not installed, or None."""
    try:
        import onnx  # noqa: F401
        import onnxruntime

        from converter.exports.onnx.session import PROVIDERS
    except ImportError as error:
        return f"{error.name} is not installed"
    available = onnxruntime.get_available_providers()
    if PROVIDERS[device] in available:
        return None
    return (
        f"onnxruntime {onnxruntime.__version__} has no {PROVIDERS[device]} here, only "
        f"{', '.join(available)}; install onnxruntime-gpu in place of onnxruntime"
    )


def make(settings: Settings, geometry: Geometry, dtype: str) -> onnx_speed.Setup:
    """Writes the checkpoint of one dtype, and its conversion."""
    setup = onnx_speed.Setup(
        folder=Path(settings.folder, dtype),
        heads=geometry.heads,
        head_dim=geometry.head_dim,
        layers=geometry.layers,
        vocabulary=geometry.vocabulary,
        threads=torch.get_num_threads(),
        repeats=RUNS,
        seconds=2.0,
        dtype=dtype,
        device=settings.device,
    )
    setup.folder.mkdir()
    onnx_speed.make_checkpoints(setup, [OURS])
    torch_speed.release()
    return setup


def export_all(
    settings: Settings, document: Document, setups: dict[str, onnx_speed.Setup], until: float
) -> dict[str, list[str]]:
    """Runs all exports at the same time; returns the graphs of each dtype that there are."""
    processes = {}
    for dtype, setup in setups.items():
        for graph in GRAPHS:
            if graph == "optimum" and settings.optimum_python is None:
                document.skip(graph, "--optimum-python names no Python that has it")
                continue
            processes[dtype, graph] = start_export(setup, graph, settings.optimum_python)
    exported: dict[str, list[str]] = {dtype: [] for dtype in setups}
    for (dtype, graph), process in processes.items():
        note = document.fail if graph == OURS else document.skip
        try:
            _, errors = process.communicate(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            note(f"{graph}, {dtype}", "the export took too long")
            continue
        if process.returncode:
            note(f"{graph}, {dtype}", f"the export failed: {(errors.strip().splitlines() or [''])[-1]}")
        else:
            exported[dtype].append(graph)
    return exported


def start_export(setup: onnx_speed.Setup, graph: str, optimum_python: str | None) -> subprocess.Popen[str]:
    out = setup.folder / graph
    out.mkdir(exist_ok=True)
    folders = {"source": setup.folder / onnx_speed.STOCK, "out": out}
    words = onnx_speed.export_command(setup, graph, optimum_python)
    command = [word.format(**folders) if "{" in word else word for word in words]
    path = os.pathsep.join([str(report.ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def measure_all(
    document: Document, setup: onnx_speed.Setup, graphs: Sequence[str], lengths: Sequence[int], until: float
) -> None:
    """Measures torch and each graph in turn, and writes a table after each."""
    results: Results = {length: {} for length in lengths}
    reference = onnx_speed.stock_logits(setup, lengths[0])
    torch_speed.release()
    sides: list[tuple[str, Callable[[float], dict[int, Measured]]]] = []
    if OURS in graphs:  # the repository is there too
        sides = [(TORCH, partial(measure_torch, setup, lengths))]
        sides += [(name, partial(fresh, measure, setup, name, lengths)) for name in (OURS, COPIED)]
    sides += [(name, partial(fresh, measure, setup, name, lengths)) for name in graphs if name != OURS]
    differences: dict[str, float] = {}
    for (name, call), side_until in shared(sides, until):
        try:
            for length, measured in call(side_until).items():
                results[length][name] = measured
        except Exception as error:  # the other sides can still be measured; a process may have been killed
            note = document.fail if name.startswith((OURS, TORCH)) else document.skip
            note(f"{name}, {setup.dtype}", error)
            continue
        torch_speed.release()
        found = results[lengths[0]][name].logits
        pairs = zip(reference, found, strict=False)
        differences[name] = max((difference(one, other) for one, other in pairs), default=float("nan"))
        check(document, setup, name, differences)
        rows = rows_of(results, differences)
        document.put(f"BLOOM's graphs, {setup.dtype}", report.table(HEAD, rows, texts=2))


def check(document: Document, setup: onnx_speed.Setup, name: str, differences: dict[str, float]) -> None:
    """Notes logits that are too far from stock's, compared with torch's own in the same dtype."""
    limit = max(EXACT, ROUNDING * differences.get(TORCH, 0.0))
    if name != TORCH and not differences[name] <= limit:
        document.fail(
            f"{name}, {setup.dtype}",
            f"logits differ from stock's in float32 by {differences[name]:.1e} of the largest, torch's by "
            f"{differences.get(TORCH, float('nan')):.1e}",
        )


def difference(reference: np.ndarray, logits: np.ndarray) -> float:
    return float(np.abs(reference - logits).max() / np.abs(reference).max())


def measure(setup: onnx_speed.Setup, name: str, lengths: Sequence[int], until: float) -> dict[int, Measured]:
    """Measures one graph at all lengths; needs a process of its own, whose memory nothing else uses."""
    cached = onnx_speed.Cached(setup, OURS if name == COPIED else name)
    cached.in_place = name == OURS
    cached.clear(WARM_UP)
    cached.step(onnx_speed.tokens(setup, WARM_UP))
    before = free_memory(setup.device)
    results: dict[int, Measured] = {}
    failure, longest = None, 0.0
    for length in lengths:
        measured = results[length] = Measured(failure=failure)
        if not failure and time.monotonic() + 16 * longest > until:
            measured.failure = "no time"
        if measured.failure:
            continue
        try:
            measure_length(setup, cached, length, measured)
            longest = max(measured.prefill)
            measured.extra = before - free_memory(setup.device) if setup.device != "cpu" else None
        except Exception as error:  # onnxruntime's exceptions have no common base class
            if not re.search(r"alloc|memory", f"{type(error).__name__} {error}"):
                raise
            measured.failure = failure = "out of memory"
    return results


def measure_length(
    setup: onnx_speed.Setup, cached: onnx_speed.Cached, length: int, measured: Measured
) -> None:
    """Times a prompt a few times, and then tokens over its cache."""
    steps = WARM_UP + DECODE_STEPS
    ids = onnx_speed.tokens(setup, length + steps)
    started = time.monotonic()
    onnx_speed.prefill(cached, ids, length)
    for turn in range(RUNS):
        if turn and time.monotonic() - started > setup.seconds:
            break
        taken, logits = onnx_speed.prefill(cached, ids, length)
        measured.prefill.append(taken)
    measured.logits.append(onnx_speed.last(logits))
    for step in range(steps):
        started = time.perf_counter()
        logits = cached.step(ids[:, length + step, None])
        measured.steps += [time.perf_counter() - started] if step >= WARM_UP else []
    measured.logits.append(onnx_speed.last(logits))


def free_memory(device: str) -> int:
    """Bytes of the GPU that no process uses; 0 on the CPU."""
    return torch.cuda.mem_get_info()[0] if device != "cpu" else 0


@torch.inference_mode()
def measure_torch(setup: onnx_speed.Setup, lengths: Sequence[int], until: float) -> dict[int, Measured]:
    """The same for the converted model in torch."""
    of_torch = torch_speed.Setup(
        folder=setup.folder,
        family="bloom",
        heads=setup.heads,
        head_dim=setup.head_dim,
        layers=setup.layers,
        dtype=setup.dtype,
        device=setup.device,
        threads=setup.threads,
        repeats=RUNS,
        seconds=setup.seconds,
        longest=lengths[-1],
        vocabulary=setup.vocabulary,
    )
    model = torch_speed.load(of_torch, OURS)
    results = {}
    for length, cell in zip(lengths, measure_lengths(of_torch, model, lengths, until), strict=True):
        prompt, token = cell.prompt, cell.token
        failure = prompt.failure or token.failure
        results[length] = Measured(prompt.seconds, prompt.extra, token.seconds, failure=failure)
    # The reference has the tokens of the graphs, not those of torch_speed.
    ids = torch.from_numpy(onnx_speed.tokens(setup, lengths[0] + WARM_UP + DECODE_STEPS)).to(setup.device)
    logits = model(ids, use_cache=False).logits[0].float().cpu().numpy()
    results[lengths[0]].logits = [logits[lengths[0] - 1], logits[-1]]
    return results


HEAD = [
    "tokens",
    "graph",
    "prefill ms",
    "ratio",
    "extra MB",
    "ratio",
    "decoding ms",
    "ratio",
    "difference",
    "runs",
]


def rows_of(results: Results, differences: dict[str, float]) -> Iterator[list[str]]:
    """The lines of one dtype's table."""
    for number_, (length, cells) in enumerate(results.items()):
        ours = cells.get(OURS, Measured())
        for name, cell in cells.items():
            if cell.failure:
                yield [str(length), name, cell.failure, *["-"] * 7]
                continue
            times = [onnx_speed.median(cell.prefill), onnx_speed.median(cell.steps)]
            our_times = [onnx_speed.median(ours.prefill), onnx_speed.median(ours.steps)]
            prompt, token = (number(1000 * one) if one else "-" for one in times)
            ratios = (
                ["-", "-"] if name == OURS else [factor(*pair) for pair in zip(times, our_times, strict=True)]
            )
            yield [
                str(length),
                name,
                prompt,
                ratios[0],
                "-" if cell.extra is None else f"{cell.extra / 1e6:.0f}",
                "-" if name == OURS else factor(cell.extra, ours.extra),
                token,
                ratios[1],
                f"{differences[name]:.1e}" if number_ == 0 and name in differences else "-",
                str(len(cell.prefill)),
            ]


ATTENTION_HEAD = ["dtype", "run", "provider", "onnxruntime says", "by name", "share", "kernels"]


def attention_rows(document: Document, setup: onnx_speed.Setup, length: int) -> list[list[str]]:
    """Where our graph's attention ran and with what kernel; on a GPU, only flash attention is right."""
    try:
        rows = fresh(attention, setup, length)
    except Exception as error:  # the times can still be measured
        document.fail(f"the attention of our graph, {setup.dtype}", error)
        return []
    for row in rows:
        if setup.device != "cpu" and "flash" not in f"{row[3]} {row[4]}".lower():
            document.fail(f"the attention of our graph, {row[0]}, {row[1]}", "no sign of flash attention")
    return rows


def attention(setup: onnx_speed.Setup, length: int) -> list[list[str]]:
    """A line for a prompt, and one for a token over a shared buffer; needs a process of its own."""
    os.environ[KERNEL_INFO] = "1"
    from converter.exports.onnx.session import Session

    with tempfile.TemporaryDirectory(dir=setup.folder) as temporary:
        session = Session(setup.folder / OURS / "model.onnx", setup.device, profile=Path(temporary))
        cache = session.shared(1, length + WARM_UP)
        ids = onnx_speed.tokens(setup, length + WARM_UP)
        prompt = partial(cache.step, ids[:, :length], np.ones((1, length), np.int64))
        # Each call writes the same place of the buffer again.
        token = partial(cache.step, ids[:, length : length + 1], np.ones((1, length + 1), np.int64))
        found: list[tuple[str, list[str], dict[str, float]]] = []
        for name, call in (("prefill", prompt), ("decoding", token)):
            with printed() as lines:
                times = kernels.profile(call, setup.device)
            found.append((name, kernel_info(lines), times))
        providers = [one for one, ran in session.operators().items() if "GroupQueryAttention" in ran]
    rows = []
    for name, info, times in found:
        said = ", ".join(info) or "-"
        rows.append([setup.dtype, name, ", ".join(providers), said, *kernels.described(times)])
    return rows


@contextmanager
def printed() -> Iterator[list[str]]:
    """The lines that this process, onnxruntime's library included, prints to stdout; they are not shown."""
    lines: list[str] = []
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield lines
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            lines += file.read().splitlines()


def kernel_info(lines: Sequence[str]) -> list[str]:
    """What onnxruntime says about the kernels of GroupQueryAttention, each once."""
    found = []
    for line in lines:
        if "Operator=GroupQueryAttention" in line:
            words = re.sub(r"\x1b\[\d*m", "", line).split()
            found.append(
                " ".join(word for word in words if not word.startswith(("Operator=", "Node=", "DataType=")))
            )
    return list(dict.fromkeys(found))
