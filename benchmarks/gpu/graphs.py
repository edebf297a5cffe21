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

import measuring
import onnx_speed
import report
import torch
from measuring import STEPS, WARM_UP, Cell, Setup, fresh
from onnx_speed import GRAPHS, Cached
from report import Document, ratio

from gpu import kernels
from gpu.attention import measure_lengths
from gpu.part import BLOOM_1B7, EXACT, ROUNDING, Settings, shared

TITLE = "graphs under onnxruntime"
OURS, TORCH, COPIED = "ours-last", "torch, sdpa", "ours-last, new buffers"
PEERS = ("transformers-last", "optimum")
EXPORTING = 0.4
"""Share of the time that exports may take."""
RUNS = 3
KERNEL_INFO = "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"
"""With this variable set, onnxruntime prints which attention kernel a node uses."""
INTRO = f"""\
{{sizes}}; random weights, the same for all, scaling none. Only the last token's logits are computed, except
by optimum's graph, which has no such form.

*Extra*: by how much onnxruntime's memory on the GPU grew since a prompt of {WARM_UP} tokens; for torch, the
peak of its allocator. Both include the cache. *Decoding*: one token over the prompt's cache (for torch,
over a cache of random tokens); the median of {STEPS}. `{OURS}` writes into one buffer for past and
present. `{COPIED}` is the same graph, but returns a new cache for each token, as the graphs of others must.
Ratios are to `{OURS}`. *Difference*: the largest difference of the last logits from stock's in torch in
float32, relative to the largest logit, for the shortest prompt. {kernels.SAID}"""
HEAD = ["tokens", "graph", "prefill ms", "ratio", "extra MB", "ratio", "decoding ms", "ratio", "difference"]
ATTENTION_HEAD = ["dtype", "run", "provider", "onnxruntime says", *kernels.HEAD]
Results = dict[int, dict[str, Cell]]
"""Length -> graph -> measurements."""


def run(settings: Settings, document: Document) -> None:
    lacking = missing(settings.device)
    if lacking:
        document.skip("everything", lacking)
        return
    lengths = settings.size((2048, 8192, 32768, 65536), (24, 48))
    setups = {}
    for dtype in settings.size(("float16", "bfloat16"), ("float16",)):
        setup = settings.setup(dtype, BLOOM_1B7, lengths[-1], layers=6, vocabulary=32768, dtype=dtype)
        setup.folder.mkdir()
        onnx_speed.make_checkpoints(setup, [OURS, *PEERS])
        setups[dtype] = setup
    document.intro = INTRO.format(sizes=setup.said())
    allowed = time.monotonic() + EXPORTING * (settings.until - time.monotonic())
    exported = export_all(settings, document, setups, allowed)
    rows: list[list[str]] = []
    for dtype, until in shared(list(setups), settings.until):
        if OURS in exported[dtype]:
            rows += attention_rows(document, setups[dtype], lengths[0])
            table = report.table(ATTENTION_HEAD, rows, texts=len(ATTENTION_HEAD))
            document.put("Attention of our graph", table)
        measure_all(document, setups[dtype], exported[dtype], lengths, until)


def missing(device: str) -> str | None:
    """What is not installed, or None."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ImportError as error:
        return f"{error.name} is not installed"
    available, wanted = onnxruntime.get_available_providers(), onnx_speed.PROVIDERS[device]
    if wanted in available:
        return None
    return (
        f"onnxruntime {onnxruntime.__version__} has no {wanted} here, only {', '.join(available)}; install "
        "onnxruntime-gpu in place of onnxruntime"
    )


def export_all(
    settings: Settings, document: Document, setups: dict[str, Setup], until: float
) -> dict[str, list[str]]:
    """Runs all exports at the same time; returns the graphs of each dtype that there are."""
    processes = {}
    path = os.pathsep.join([str(report.ROOT), os.environ.get("PYTHONPATH", "")])
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    for dtype, setup in setups.items():
        for graph in (OURS, *PEERS):
            if graph == "optimum" and settings.optimum_python is None:
                document.skip(graph, "--optimum-python names no Python that has it")
                continue
            command = onnx_speed.export_command(setup, graph, settings.optimum_python)
            environment = os.environ | {"PYTHONPATH": path}
            processes[dtype, graph] = subprocess.Popen(command, env=environment, **pipes)
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


def measure_all(
    document: Document, setup: Setup, graphs: Sequence[str], lengths: Sequence[int], until: float
) -> None:
    """Measures torch and each graph, and writes a table after each."""
    results: Results = {length: {} for length in lengths}
    reference = onnx_speed.stock_logits(setup, lengths[0])
    measuring.release()
    sides: list[tuple[str, Callable[[float], dict[int, Cell]]]] = []
    if OURS in graphs:  # the repository is there too
        sides = [(TORCH, partial(measure_torch, setup, lengths))]
        sides += [(name, partial(fresh, measure, setup, name, lengths)) for name in (OURS, COPIED)]
    sides += [(name, partial(fresh, measure, setup, name, lengths)) for name in graphs if name != OURS]
    differences: dict[str, float] = {}
    for (name, call), side_until in shared(sides, until):
        try:
            for length, cell in call(side_until).items():
                results[length][name] = cell
        except Exception as error:  # the other sides can still be measured; a process may have been killed
            note = document.fail if name.startswith((OURS, TORCH)) else document.skip
            note(f"{name}, {setup.dtype}", error)
            continue
        measuring.release()
        found = results[lengths[0]][name].logits
        differences[name] = onnx_speed.difference(reference[: len(found)], found)
        own = differences.get(TORCH, 0.0)
        if name != TORCH and not differences[name] <= max(EXACT, ROUNDING * own):
            said = f"logits differ from stock's in float32 by {differences[name]:.1e}, torch's by {own:.1e}"
            document.fail(f"{name}, {setup.dtype}", said)
        rows = rows_of(results, differences)
        document.put(f"BLOOM's graphs, {setup.dtype}", report.table(HEAD, rows, texts=2))


def measure(setup: Setup, name: str, lengths: Sequence[int], until: float) -> dict[int, Cell]:
    """Measures one graph at all lengths; needs a process of its own, whose memory nothing else uses."""
    cached = Cached(setup, GRAPHS[OURS if name == COPIED else name])
    cached.in_place = name == OURS
    cached.prompt(onnx_speed.tokens(setup, WARM_UP), WARM_UP)
    before = free_memory(setup.device)
    results: dict[int, Cell] = {}
    failure, longest = None, 0.0
    for length in lengths:
        cell = results[length] = Cell()
        late = time.monotonic() + 16 * longest > until
        cell.prompt.failure = failure or ("no time" if late else None)
        if cell.failure:
            continue
        with measuring.noting_failure(cell.prompt):
            ids = onnx_speed.tokens(setup, length + WARM_UP + STEPS)
            cached.prompt(ids[:, :length], ids.shape[1])  # fills the memory pool
            onnx_speed.measure_steps(setup, cached, ids, length, RUNS, cell)
            longest = max(cell.prompt.seconds)
            cell.prompt.extra = before - free_memory(setup.device) if setup.device != "cpu" else None
        if cell.failure == "fails":
            raise RuntimeError(cell.prompt.reason)
        failure = cell.failure
    return results


def free_memory(device: str) -> int:
    """Bytes of the GPU that no process uses; 0 on the CPU."""
    return torch.cuda.mem_get_info()[0] if device != "cpu" else 0


@torch.inference_mode()
def measure_torch(setup: Setup, lengths: Sequence[int], until: float) -> dict[int, Cell]:
    """The same for the converted model in torch."""
    model = measuring.load(setup, OURS)
    results = dict(zip(lengths, measure_lengths(setup, model, lengths, until), strict=True))
    results[lengths[0]].logits = onnx_speed.stock_logits(setup, lengths[0], OURS, setup.dtype)
    return results


def rows_of(results: Results, differences: dict[str, float]) -> Iterator[list[str]]:
    """The lines of one dtype's table."""
    for length, cells in results.items():
        for name, cell in cells.items():
            ours = Cell() if name == OURS else cells.get(OURS, Cell())
            gap = differences.get(name) if length == min(results) else None
            yield [
                *(str(length), name),
                *(cell.prompt.milliseconds, ratio(cell.prompt.median, ours.prompt.median)),
                *(cell.prompt.megabytes, ratio(cell.prompt.extra, ours.prompt.extra)),
                *(cell.token.milliseconds, ratio(cell.token.median, ours.token.median)),
                "-" if gap is None else f"{gap:.1e}",
            ]


def attention_rows(document: Document, setup: Setup, length: int) -> list[list[str]]:
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


def attention(setup: Setup, length: int) -> list[list[str]]:
    """A line for a prompt, and one for a token over a shared buffer; needs a process of its own."""
    os.environ[KERNEL_INFO] = "1"
    cached = Cached(setup, GRAPHS[OURS], profile=setup.folder / "profile")
    ids = onnx_speed.tokens(setup, length + WARM_UP)
    prompt = partial(cached.prompt, ids[:, :length], ids.shape[1])
    token = partial(cached.step, ids[:, length : length + 1])
    found = []
    for name, call in (("prefill", prompt), ("decoding", token)):
        with printed() as lines:
            times = kernels.profile(call, setup.device)
        found.append((name, ", ".join(kernel_info(lines)) or "-", kernels.described(times)))
    nodes = [event["args"] for event in cached.profiled() if event["name"].endswith("_kernel_time")]
    ran = {node.get("provider", "-") for node in nodes if node["op_name"] == "GroupQueryAttention"}
    return [[setup.dtype, name, ", ".join(sorted(ran)), said, *kinds] for name, said, kinds in found]


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
            kept = [word for word in words if not word.startswith(("Operator=", "Node=", "DataType="))]
            found.append(" ".join(kept))
    return list(dict.fromkeys(found))
